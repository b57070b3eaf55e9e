"""The built-in rewards, and the validation of reward configs."""

import math
import re

import pytest
from pydantic import TypeAdapter, ValidationError

from rl_core.rewards import RewardItem, RewardOutcome, load_reward, score_all
from schemas.config.reward import ExactReward, MathReward, ReasoningGymReward, RewardConfig
from schemas.errors import RewardImportError
from tests.unit.rl_core.reward_items import item, reward_of
from tests.unit.rl_core.reward_pairs import EXPRESSIONS, PAIRS, UNITS


def test_exact_ignores_surrounding_white_space() -> None:
    outcomes = score_all(load_reward(ExactReward()), [item(" 4\n"), item("44"), item("")])
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0, 0.0]


def test_reasoning_gym_scores_its_own_entries() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    function = load_reward(ReasoningGymReward())
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]  # 4 - 1 - 7
    info = {"data_source": "chain_sum", "metadata": entry["metadata"]}
    outcomes = score_all(
        function,
        [
            RewardItem(entry["question"], " -4 ", "-4", info),
            RewardItem(entry["question"], "4", "-4", info),
            RewardItem(entry["question"], "-4", "-4", info | {"data_source": "reasoning_gym/chain_sum"}),
            RewardItem(entry["question"], "-4", "-4", info | {"metadata": '{"num_terms": 3}'}),
            RewardItem(entry["question"], "-4", "-4", {"data_source": "chain_sum"}),
            RewardItem(entry["question"], "-4", "-4", info | {"data_source": "no_such_task"}),
        ],
    )
    assert [outcome.reward for outcome in outcomes[:4]] == [1.0, 0.0, 1.0, 1.0]
    assert outcomes[4].failure == "KeyError: 'metadata'"
    assert "no_such_task" in (outcomes[5].failure or "")


def test_full_marks_only_gives_nothing_for_partial_credit() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("spell_backward", size=1, seed=1)[0]
    info = {"data_source": "spell_backward", "metadata": entry["metadata"]}
    items = [
        RewardItem(entry["question"], text, entry["answer"], info) for text in (entry["answer"], entry["answer"][::-1])
    ]
    partial, full = (
        [outcome.reward for outcome in score_all(load_reward(ReasoningGymReward(full_marks_only=only)), items)]
        for only in (False, True)
    )
    assert partial[0] == full[0] == 1
    assert 0 < partial[1] < 1
    assert full[1] == 0


def test_a_missing_reasoning_gym_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(RewardImportError, match=r"pip install 'sluice-rl\[reasoning-gym\]'"):
        load_reward(ReasoningGymReward())


@pytest.mark.parametrize(("kind", "answer", "completion", "reward"), PAIRS)
def test_a_response_is_right_or_wrong(kind: str, answer: str, completion: str, reward: float) -> None:
    if kind == "math":
        pytest.importorskip("math_verify")
    assert reward_of(kind, completion, answer) == RewardOutcome(reward)


@pytest.mark.parametrize("text", ["\\boxed{" * 5000, "-$" * 20_000, "1/" * 20_000, "1," + " " * 40_000 + "2"])
def test_numeric_reads_long_nonsense(text: str) -> None:
    assert reward_of("numeric", text, "3").reward == 0


def test_numeric_tolerances_by_hand() -> None:
    assert reward_of("numeric", "3.1416", "3.14159").reward == 0  # off by 3.2e-6 of it
    assert reward_of("numeric", "3.1416", "3.14159", relative_tolerance=1e-5).reward == 1
    assert reward_of("numeric", "3.1416", "3.14159", relative_tolerance=0, absolute_tolerance=2e-5).reward == 1
    assert reward_of("numeric", "1e-9", "0", relative_tolerance=0.5).reward == 0
    assert reward_of("numeric", "3.14", "3.14", relative_tolerance=0).reward == 1
    assert reward_of("numeric", "12345679", "12345678").reward == 0  # whole numbers
    assert reward_of("numeric", "12345679", "12345678", relative_tolerance=1e-6).reward == 1
    assert reward_of("numeric", "(1, 20.1)", "(1, 20)", absolute_tolerance=0.2).reward == 1


@pytest.mark.parametrize("answer", ["", "seven", "9" * 400])
def test_an_answer_without_a_number_is_a_failure(answer: str) -> None:
    assert "has no finite number" in (reward_of("numeric", "7", answer).failure or "")


@pytest.mark.parametrize("answer", ["5 apples and 3 pears", "x = 3, y = 4", "12 + 3 = 15"])
def test_an_answer_with_several_numbers_is_a_failure(answer: str) -> None:
    assert "has 2 numbers" in (reward_of("numeric", answer, answer).failure or "")
    assert reward_of("numeric", "so 15", f"{answer} #### 15").reward == 1


@pytest.mark.parametrize("answer", EXPRESSIONS)
def test_an_answer_that_is_more_than_a_number_is_a_failure(answer: str) -> None:
    failure = reward_of("numeric", answer, answer).failure or ""
    assert "is more than a number" in failure or "has 2 numbers" in failure
    assert "take reward.kind 'math'" in failure


@pytest.mark.parametrize("answer", UNITS)
def test_units_and_words_belong_to_no_number(answer: str) -> None:
    assert reward_of("numeric", "so 5", answer).reward == 1


@pytest.mark.parametrize("answer", ["1" + " " * 40_000 + "x", "1 " + "{" * 40_000, "a" * 40_000 + "1", "1" * 20_000])
def test_numeric_reads_long_answers(answer: str) -> None:
    reward_of("numeric", "5", answer)


def test_math_needs_an_answer() -> None:
    pytest.importorskip("math_verify")
    assert "finds no expression in the answer" in (reward_of("math", "42", "").failure or "")


def test_a_missing_math_verify_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(RewardImportError, match=r"pip install 'sluice-rl\[math\]'"):
        load_reward(MathReward())


def test_a_format_pattern_must_match_the_whole_response() -> None:
    pattern = "<think>.*</think>\\s*<answer>[^<]*</answer>"
    assert reward_of("format", " <think>one\ntwo</think>\n<answer>3</answer>\n", pattern=pattern).reward == 1
    assert reward_of("format", "so <think>one</think><answer>3</answer>", pattern=pattern).reward == 0
    assert reward_of("format", "<think>one</think><answer>3</answer> or 4", pattern=pattern).reward == 0


def test_parts_of_a_format_are_columns_and_their_mean_is_the_reward() -> None:
    parts = {"thinks": "<think>.+</think>", "answers": "<answer>", "polite": "please", "short": r"\A.{,60}\Z"}
    outcome = reward_of("format", "<think>one\ntwo</think> <answer>3", parts=parts)
    assert outcome == RewardOutcome(0.75, {"thinks": 1.0, "answers": 1.0, "polite": 0.0, "short": 1.0})


def test_length_grows_up_to_its_target() -> None:
    rewards = [reward_of("length", text, target=4).reward for text in ("", "a", "a b", "abcd", "abcdef")]
    assert rewards == [0, 0.25, 0.75, 1, 1]
    assert reward_of("length", "one  two\nthree", target=4, unit="words").reward == 0.75


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"kind": "format", "pattern": "(a"}, "not a regular expression: missing )"),
        ({"kind": "format", "parts": {"a": "["}}, "not a regular expression"),
        ({"kind": "format"}, "set either pattern"),
        ({"kind": "format", "pattern": "a", "parts": {"a": "a"}}, "set either pattern"),
        ({"kind": "format", "parts": {"reward": "a"}}, "can't be named 'reward'"),
        ({"kind": "format", "parts": {"failed": "a"}}, "can't be named 'failed'"),
        ({"kind": "format", "parts": {"A b": "a"}}, "should match pattern"),
        ({"kind": "length"}, "Field required"),
        ({"kind": "length", "target": 0}, "greater than 0"),
        ({"kind": "numeric", "relative_tolerance": -1}, "greater than or equal to 0"),
        ({"kind": "exact", "timeout_seconds": 1}, "Extra inputs are not permitted"),
        ({"kind": "math", "timeout_seconds": 0}, "greater than 0"),
        ({"kind": "math", "num_processes": 0}, "timeout_seconds = 30 needs num_processes of at least 1"),
        ({"kind": "weighted", "parts": {}}, "at least 1 item"),
        ({"kind": "weighted", "parts": {"a": {"weight": 0, "reward": {"kind": "exact"}}}}, "all weights are 0"),
        ({"kind": "weighted", "parts": {"a": {"weight": math.nan, "reward": {"kind": "exact"}}}}, "finite number"),
        ({"kind": "weighted", "parts": {"a": {"weight": "much", "reward": {"kind": "exact"}}}}, "valid number"),
        ({"kind": "weighted", "parts": {"a": {"reward": {"kind": "weighted", "parts": {}}}}}, "expected tags"),
        (
            {"kind": "weighted", "parts": {"a": {"reward": {"kind": "group_function", "path": "a:b"}}}},
            "a group function can't be a part of a sum",
        ),
        ({"kind": "group_function", "path": "a.b"}, "expected module:name"),
        (
            {"kind": "weighted", "parts": {"a": {"reward": {"kind": "math", "timeout_seconds": 5}}}},
            "set reward.timeout_seconds, not that of a part",
        ),
    ],
)
def test_invalid_rewards_are_rejected(config: dict, text: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(text)):
        TypeAdapter(RewardConfig).validate_python(config)
