"""Scoring with reward functions: results, failures, async functions, weighted sums."""

import asyncio
import math
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from rl_core.rewards import RewardItem, RewardOutcome, is_concurrent, load_reward, score_all, score_one
from schemas.config.reward import FunctionReward, RewardConfig
from schemas.errors import RewardImportError
from tests.unit.rl_core.reward_items import config_of, item, outcome_of


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (0.5, 0.5),
        (1, 1.0),
        (True, 1.0),
        (0, 0.0),
        (np.float32(0.25), 0.25),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(True), 1.0),
        (Decimal("1.5"), 1.5),
        (Fraction(1, 4), 0.25),
    ],
)
def test_any_real_number_is_a_reward(score: object, expected: float) -> None:
    outcome = outcome_of(score)
    assert (outcome.reward, outcome.failure) == (expected, None)
    assert type(outcome.reward) is float


def test_a_dict_gives_the_reward_and_its_parts() -> None:
    outcome = outcome_of({"reward": 1.5, "format": 0.5, "answer": 1})
    assert outcome.reward == 1.5
    assert outcome.parts == {"format": 0.5, "answer": 1.0}


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (None, "NoneType"),
        ("1.0", "'1.0'"),
        ({"accuracy": 1.0}, "no 'reward' or 'score', only ['accuracy']"),
        ({"reward": 1.0, "format": math.nan}, "reward part 'format' is nan"),
        (1e39, "infinite in float32"),
        (-1e300, "infinite in float32"),
        (10**400, "the reward is inf"),
        (np.array([1.0, 2.0]), "expected one number"),
        (1j, "expected a number"),
        ({"reward": 1.0, "format": 1e39}, "reward part 'format' is 1e+39"),
        ({"reward": 1.0, "format": "good"}, "reward part 'format' is 'good'"),
        ({"reward": 1.0, "": 1}, "can't be named ''"),
        ({"reward": 1.0, "a b/c": 1}, "can't be named 'a b/c'"),
        ({"reward": 1.0, "\ud83d": 1}, "can't be named '\\ud83d'"),
        ({"reward": 1.0, "failed": 1}, "can't be named 'failed'"),
        ({"reward": 1.0, 1: 1, "1": 2}, "two parts are named '1'"),
    ],
)
def test_any_other_result_is_a_recorded_failure_and_not_zero(score: object, text: str) -> None:
    outcome = outcome_of(score)
    assert outcome.reward is None
    assert outcome.failure is not None
    assert text in outcome.failure


def test_the_score_of_verl_is_a_reward_and_its_texts_are_left_out() -> None:
    outcome = outcome_of({"score": 1.5, "acc": True, "pred": "42", "长度": 3, "note": None})
    assert (outcome.reward, outcome.parts, outcome.failure) == (1.5, {"acc": 1.0, "长度": 3.0}, None)
    assert outcome_of({"reward": 1, "score": 2}) == RewardOutcome(1.0, {"score": 2.0})


def test_a_function_gets_a_row_of_its_own() -> None:
    def score(prompt: str, completion: str, answer: str, info: dict) -> float:
        info["tests"].pop()
        return len(info["tests"])

    def rank(prompt: str, completions: list[str], answer: str, info: dict) -> list[float]:
        return [len(info["tests"].pop()) for _ in range(len(completions) - 1) if completions.pop()] + [0.0]

    info = {"tests": ["a", "bc"]}
    assert [outcome.reward for outcome in score_all(score, [RewardItem("", "4", "4", info)] * 3)] == [1, 1, 1]
    group = RewardItem("", ["1", "2"], "4", info)
    assert [outcome.group for outcome in score_all(rank, [group] * 2)] == [(RewardOutcome(2.0), RewardOutcome(0.0))] * 2
    assert (info, group.completion) == ({"tests": ["a", "bc"]}, ["1", "2"])


def test_a_plain_function_may_run_an_event_loop() -> None:
    async def wait() -> float:
        await asyncio.sleep(0)
        return 1.0

    assert [outcome.reward for outcome in score_all(lambda *_: asyncio.run(wait()), [item()] * 2)] == [1.0, 1.0]


def test_a_raising_function_fails_its_own_item_only() -> None:
    def score(prompt: str, completion: str, answer: str, info: dict) -> float:
        return 1 / int(completion)

    outcomes = score_all(score, [item("1"), item("0"), item("2")])
    assert [outcome.reward for outcome in outcomes] == [1.0, None, 0.5]
    assert outcomes[1].failure == "ZeroDivisionError: division by zero"


def test_the_function_gets_prompt_completion_answer_and_info() -> None:
    seen = []
    score_all(lambda *arguments: seen.append(arguments) or 0.0, [item("5", "4", data_source="sums")])
    assert seen == [("2 + 2 =", "5", "4", {"data_source": "sums"})]


def test_async_items_run_together() -> None:
    started, all_started = [], asyncio.Event()

    async def score(prompt: str, completion: str, answer: str, info: dict) -> float:
        started.append(completion)
        if len(started) == 50:
            all_started.set()
        await all_started.wait()  # forever, if each item waited for the previous one
        return float(completion)

    outcomes = score_all(score, [item(str(number)) for number in range(50)])
    assert [outcome.reward for outcome in outcomes] == [float(number) for number in range(50)]


def test_a_function_is_found_by_its_path(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_reward_module.py").write_text(
        "def score(prompt, completion, answer, info): return len(completion)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    function = load_reward(FunctionReward(path="my_reward_module:score"))
    assert score_all(function, [item("four")])[0].reward == 4.0


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("no_such_module_anywhere:score", "importing 'no_such_module_anywhere' raised ModuleNotFoundError"),
        ("broken_reward_module:score", "importing 'broken_reward_module' raised SyntaxError"),
        ("math:no_such_name", "has no such function 'no_such_name'"),
        ("math:pi", "is not a function 'pi'"),
        ("sys:no_such_name", "sys has no such function 'no_such_name'"),
        ("exiting_reward_module:score", "raised SystemExit: 0; put what is to run as a program under `if __name__"),
        ("code:score", "as that comes first on the module path; give your file another name"),
    ],
)
def test_a_path_without_a_function_is_rejected(tmp_path, monkeypatch, path: str, text: str) -> None:
    (tmp_path / "broken_reward_module.py").write_text("def score(:\n")
    (tmp_path / "exiting_reward_module.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "code.py").write_text("def score(*_): return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(RewardImportError, match=r"reward\.path") as caught:
        load_reward(FunctionReward(path=path))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def weighted(**parts: tuple[float, dict]) -> RewardConfig:
    return config_of(
        "weighted", parts={name: {"weight": weight, "reward": reward} for name, (weight, reward) in parts.items()}
    )


def test_a_weighted_sum_by_hand() -> None:
    config = weighted(
        answer=(2.0, {"kind": "numeric"}),
        form=(0.5, {"kind": "format", "parts": {"equals": "=", "dots": r"\.\.\."}}),
        length=(-0.1, {"kind": "length", "target": 10}),
        exact=(0.0, {"kind": "exact"}),
    )
    (outcome,) = score_all(load_reward(config), [item("x = 4")])
    assert outcome.reward == pytest.approx(2 * 1 + 0.5 * 0.5 - 0.1 * 0.5)
    assert outcome.parts == {
        "answer": 1.0,
        "form": 0.5,
        "form_equals": 1.0,
        "form_dots": 0.0,
        "length": 0.5,
        "exact": 0.0,
    }


PART_REWARDS = """
import asyncio

async def slow(prompt, completion, answer, info):
    await asyncio.sleep(0.05)
    return {"reward": 1, "sub": 2}

def breaks(prompt, completion, answer, info):
    return 1 / int(completion)
"""


@pytest.fixture
def _part_rewards(tmp_path, monkeypatch) -> None:
    (tmp_path / "part_rewards.py").write_text(PART_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_part_rewards")
def test_a_failed_part_fails_its_row_only() -> None:
    config = weighted(
        length=(1, {"kind": "length", "target": 1}), breaks=(0, {"kind": "function", "path": "part_rewards:breaks"})
    )
    outcomes = score_all(load_reward(config), [item("2"), item("0")])
    assert outcomes[0] == RewardOutcome(1.0, {"length": 1.0, "breaks": 0.5})
    text = "RuntimeError: part 'breaks' failed: ZeroDivisionError: division by zero"
    assert outcomes[1] == RewardOutcome(None, failure=text)


@pytest.mark.usefixtures("_part_rewards")
def test_async_parts_are_awaited_and_their_names_must_differ() -> None:
    slow = {"kind": "function", "path": "part_rewards:slow"}
    function = load_reward(weighted(judge=(3, slow), exact=(1, {"kind": "exact"})))
    assert is_concurrent(function)
    assert score_all(function, [item()] * 2) == [RewardOutcome(4.0, {"judge": 1.0, "judge_sub": 2.0, "exact": 1.0})] * 2
    function = load_reward(weighted(judge=(3, slow), judge_sub=(1, {"kind": "exact"})))
    assert (
        score_all(function, [item()])[0].failure == "RuntimeError: two parts are named 'judge_sub': rename one of them"
    )
    assert not is_concurrent(load_reward(weighted(exact=(1, {"kind": "exact"}))))


def test_an_async_function_may_raise_timeouts() -> None:
    async def gives_up(prompt: str, completion: str, answer: str, info: dict) -> float:
        raise TimeoutError("the judge is away")

    assert asyncio.run(score_one(gives_up, item())).failure == "TimeoutError: the judge is away"


def test_a_failure_has_a_message_whatever_is_raised() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fail(prompt: str, completion: str, answer: str, info: dict) -> float:
        raise {
            "exit": SystemExit(3),
            "text": Unprintable(),
            "long": ValueError("x" * 5000),
            "half": ValueError("\ud800"),
        }[completion]

    failures = [
        outcome.failure or "" for outcome in score_all(fail, [item(c) for c in ("exit", "text", "long", "half")])
    ]
    assert failures[0] == "SystemExit: 3"
    assert failures[1] == "Unprintable, whose message can't be formatted"
    assert len(failures[2]) == 1000
    assert failures[3] == "ValueError: ?"


def test_only_rewards_that_may_hang_need_processes() -> None:
    assert not any(config_of(kind).needs_processes for kind in ("exact", "numeric"))
    assert config_of("math").needs_processes
    unlimited = config_of("math", num_processes=0, timeout_seconds=math.inf)
    assert unlimited.timeout_seconds is None
    assert not unlimited.needs_processes
    assert TypeAdapter(RewardConfig).validate_json(unlimited.model_dump_json()) == unlimited
    assert not weighted(exact=(1, {"kind": "exact"})).needs_processes
    mixed = weighted(exact=(1, {"kind": "exact"}), math=(1, {"kind": "math"}))
    assert mixed.needs_processes
    assert TypeAdapter(RewardConfig).validate_json(mixed.model_dump_json()) == mixed
