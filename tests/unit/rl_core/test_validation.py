"""Held-out metrics, computed by hand."""

from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.rollout.evaluation import (
    HeldOutSample,
    best_at_n,
    extract_answer,
    maj_at_n,
    mean_at_n,
    number_answers,
    split_prompts,
    summarize,
    summarize_source,
)
from schemas.config.rollout import EvalConfig
from schemas.errors import RewardFailureError
from schemas.step import EvalShard
from tests.support.configs import run_config


def test_means_are_over_prompts_and_ignore_failures() -> None:
    assert mean_at_n([[1.0, 0.0], [1.0, None], [None, None]]) == pytest.approx((0.5 + 1.0) / 2)
    assert mean_at_n([[True, False, False, False], [False] * 4]) == pytest.approx(1 / 8)
    assert mean_at_n([[None], []]) is None


def test_best_of_all_samples() -> None:
    correct = [[True, False, False], [False, False, False], [None, True, None], [None, None, None]]
    assert best_at_n(correct, 3) == pytest.approx(2 / 3)
    assert best_at_n([[None]], 1) is None


def test_best_of_fewer_than_all_samples_by_hand() -> None:
    # One of four is correct; three of the six pairs hold it.
    assert best_at_n([[True, False, False, False]], 2) == pytest.approx(1 / 2)
    assert best_at_n([[True, False, None, False, False], [True, False]], 2) == pytest.approx((1 / 2 + 1) / 2)


@given(correct=st.lists(st.booleans(), min_size=1, max_size=8), n=st.integers(1, 8))
def test_best_is_the_mean_over_all_subsets(correct: list[bool], n: int) -> None:
    choices = [any(chosen) for chosen in combinations(correct, min(n, len(correct)))]
    assert best_at_n([correct], n) == pytest.approx(fmean(choices))
    assert best_at_n([correct], 1) == pytest.approx(mean_at_n([correct]))


def test_majorities_by_hand() -> None:
    answers = [["4", "5", "5"], ["4", "5", "4"], ["5", "4", "6"], ["4", "5", "5"]]
    correct = [[True, False, False], [True, False, True], [False, True, False], [True, None, False]]
    # 5 wins, wrong; 4 wins, correct; a tie goes to 5, wrong; one 5 failed, so that a tie goes to 4, correct.
    assert maj_at_n(answers, correct) == pytest.approx(2 / 4)
    assert maj_at_n([*answers, ["4"]], [*correct, [None]]) == pytest.approx(2 / 4)
    assert maj_at_n([["4"]], [[None]]) is None
    assert maj_at_n([["4", "4"]], [[False, True]]) == 0  # its first sample decides


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (" 42\n", "42"),
        (r"so \boxed{ 42 }.", "42"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{7} and \boxed{8", "7"),
        (r"\boxed {3}", "3"),
        ("\\boxed\n{3}", "3"),
        (r"\fbox{3}", "3"),
        (r"\framebox{3}", "3"),
        (r"\boxed3", "3"),
        (r"-\boxed{3}", "-3"),
        ("So:\n- \\boxed{3}", "3"),
        (r"x = - \boxed{3}", "-3"),
        (r"5-\boxed{3}", "3"),
        (r"-\boxed{a + b}", "-(a + b)"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"cut \boxed{8", r"cut \boxed{8"),
        (r"\boxed{}", ""),
        ("ends in \\", "ends in \\"),
        ("\\boxed{ends in \\", "\\boxed{ends in \\"),
        ("", ""),
    ],
)
def test_the_answer_of_a_response(response: str, answer: str) -> None:
    assert extract_answer(response) == answer


@given(st.text(alphabet="\\boxed{}a ", max_size=40))
def test_any_response_has_an_answer(response: str) -> None:
    answer = extract_answer(response)
    assert answer == answer.strip()
    assert answer in response


def test_a_source_by_hand() -> None:
    report = summarize_source(
        "math",
        [
            [HeldOutSample(0, 1.0, 2, False), HeldOutSample(1, 0.5, 4, False), HeldOutSample(1, 0.5, 6, True)],
            [HeldOutSample(0, None, 8, True), HeldOutSample(1, 0.9, 2, False), HeldOutSample(1, 0.0, 2, False)],
        ],
        n=3,
        threshold=0.9,
    )
    assert (report.data_source, report.num_prompts, report.num_failed) == ("math", 2, 1)
    assert report.mean_at_n == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert report.best_at_n == 1
    assert report.maj_at_n == pytest.approx(1 / 2)  # 1, wrong, and 1, correct like its first sample
    assert report.reward == pytest.approx((2 / 3 + 0.45) / 2)
    assert report.response_tokens == pytest.approx(24 / 6)
    assert report.truncated == pytest.approx(2 / 6)


def test_a_source_whose_rewards_all_failed() -> None:
    report = summarize_source("math", [[HeldOutSample(0, None, 1, False)]], n=1, threshold=1.0)
    assert (report.mean_at_n, report.best_at_n, report.maj_at_n, report.reward) == (None, None, None, None)
    assert report.num_failed == 1


def test_equal_answers_have_the_number_of_the_first() -> None:
    assert number_answers(["4", " 5\n", r"so \boxed{4}", "five", "5"]) == [0, 1, 0, 3, 1]


def test_batches_cover_the_prompts_in_order() -> None:
    config = EvalConfig(num_prompts=7, batch_prompts=3)
    assert split_prompts(config, 100) == {0: range(3), 1: range(3, 6), 2: range(6, 7)}
    assert split_prompts(config, 4) == {0: range(3), 1: range(3, 4)}
    assert split_prompts(config, 0) == {}


SHARD = EvalShard(
    data_sources=("math", "code"),
    rewards=(1.0, 0.0, None, 1.0),
    answers=(0, 1, 0, 0),
    response_lengths=(2, 4, 6, 8),
    finish_reasons=("stop", "stop", "length", "stop"),
    failure="ValueError: no number",
)
OTHER_SHARD = EvalShard(
    data_sources=("math",), rewards=(0.0, 0.0), answers=(0, 0), response_lengths=(1, 1), finish_reasons=("stop",) * 2
)


def test_the_reports_of_all_batches_are_merged() -> None:
    config = run_config(
        eval={"samples_per_prompt": 2, "temperature": 1.0}, reward={"kind": "exact", "max_failure_fraction": 0.5}
    )
    report = summarize(config, 7, [SHARD, OTHER_SHARD], seconds=2.5)
    assert (report.policy_version, report.num_prompts, report.samples_per_prompt) == (7, 3, 2)
    assert (report.num_failed, report.seconds) == (1, 2.5)
    assert report.accuracy == report.reward == pytest.approx((1 / 2 + 1 + 0) / 3)
    math, code = report.sources
    assert (math.data_source, math.num_prompts, math.mean_at_n) == ("math", 2, pytest.approx(1 / 4))
    assert (math.best_at_n, math.maj_at_n, math.response_tokens) == (0.5, 0.5, 2.0)  # a tie goes to the first answer
    assert (code.data_source, code.num_prompts, code.mean_at_n, code.truncated) == ("code", 1, 1.0, 0.5)


def test_too_many_failures_over_all_batches_are_an_error() -> None:
    config = run_config(
        eval={"samples_per_prompt": 2, "temperature": 1.0}, reward={"kind": "exact", "max_failure_fraction": 0.1}
    )
    with pytest.raises(RewardFailureError, match=r"1 of 6 rewards of the evaluation failed.*ValueError: no number"):
        summarize(config, 0, [OTHER_SHARD, SHARD], seconds=0.0)
