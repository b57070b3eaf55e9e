import asyncio
import math
import time

import numpy as np
import pytest

from rl_core.rewards import RewardItem, load_reward, score_all
from schemas.config.reward import ExactReward, FunctionReward, ReasoningGymReward
from schemas.errors import RewardImportError


def item(completion: str = "4", answer: str = "4", **info: object) -> RewardItem:
    return RewardItem(prompt="2 + 2 =", completion=completion, answer=answer, info=info)


def outcome_of(score: object):
    (outcome,) = score_all(lambda *_: score, [item()])
    return outcome


def test_exact_compares_without_surrounding_white_space() -> None:
    outcomes = score_all(load_reward(ExactReward()), [item(" 4\n"), item("44"), item("")])
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("score", "expected"), [(0.5, 0.5), (1, 1.0), (True, 1.0), (np.float32(0.25), 0.25), (0, 0.0)])
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
        ({"accuracy": 1.0}, "no 'reward', only ['accuracy']"),
        ({"reward": 1.0, "format": math.nan}, "reward part 'format' is nan"),
    ],
)
def test_anything_else_is_a_recorded_failure_and_not_zero(score: object, text: str) -> None:
    outcome = outcome_of(score)
    assert outcome.reward is None
    assert outcome.failure is not None
    assert text in outcome.failure


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
    async def score(prompt: str, completion: str, answer: str, info: dict) -> float:
        await asyncio.sleep(0.1)
        return float(completion)

    started = time.perf_counter()
    outcomes = score_all(score, [item(str(number)) for number in range(50)])
    assert time.perf_counter() - started < 2.5  # one after the other: 5 s
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
    ],
)
def test_a_path_that_leads_nowhere_says_so(tmp_path, monkeypatch, path: str, text: str) -> None:
    (tmp_path / "broken_reward_module.py").write_text("def score(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardImportError, match=r"reward\.path") as caught:
        load_reward(FunctionReward(path=path))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


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


def test_a_missing_reasoning_gym_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(RewardImportError, match=r"pip install 'sluice\[demo\]'"):
        load_reward(ReasoningGymReward())
