"""Group functions: they get all responses to a prompt at once, in reward processes, rollout worker and evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from infra.datasets import PromptRow
from infra.engines.base import Generation
from infra.engines.embedded.engine import TransformersEngine
from infra.models.load import load_model
from infra.models.tiny import make_tokenizer
from infra.rewards import RewardScorer
from infra.rewards.open import open_reward_scorer
from infra.workers.sampling import ResponseSampler
from rl_core.rewards import RewardItem, RewardOutcome
from schemas.config.model import ModelConfig
from schemas.config.reward import GroupFunctionReward
from schemas.errors import RewardImportError
from tests.support.progress import wait_until
from tests.support.reward_pools import LATE, LIMIT_SECONDS
from tests.support.rollout_workers import GROUPS, evaluate, make_folder, open_store, rows_of, run_of, worker_of

REWARDS = """
import asyncio, os, time

def log(completions):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(" ".join(completions) + "\\n")

def ranks(prompt, completions, answer, info):
    log(completions)
    longest_last = sorted(range(len(completions)), key=lambda index: len(completions[index]))
    return [{"reward": longest_last.index(index), "size": len(completions)} for index in range(len(completions))]

async def misbehaves(prompt, completions, answer, info):
    return odd(prompt, completions, answer, info)

def odd(prompt, completions, answer, info):
    word = completions[0]
    if word == "hang":
        time.sleep(600)
    if word == "leave":
        os._exit(3)
    if word == "raise":
        raise RuntimeError("no such luck")
    if word == "few":
        return [1.0] * (len(completions) - 1)
    if word == "nan":
        return [1.0] * (len(completions) - 1) + [float("nan")]
    if word == "one":
        return 1.0
    return (len(completion) for completion in completions)
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which `ranks` logs the responses of its calls."""
    (tmp_path / "group_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


RANKED = {"kind": "group_function", "path": "group_rewards:ranks"}
IN_PROCESS = {"num_processes": 0, "timeout_seconds": None}


@contextmanager
def opened(name: str, **changes: object) -> Iterator[RewardScorer]:
    fields = {"path": f"group_rewards:{name}", "num_processes": 2, "timeout_seconds": LIMIT_SECONDS, **changes}
    scorer = open_reward_scorer(GroupFunctionReward.model_validate(fields))
    try:
        yield scorer
    finally:
        scorer.close()


def item(completion: str) -> RewardItem:
    return RewardItem("?", completion, "!", {})


@pytest.mark.parametrize("limits", [{}, IN_PROCESS])
def test_ranks_by_hand(calls: Path, limits: dict) -> None:
    completions = ["ccc", "z", "a", "yy", "bb"]
    with opened("ranks", **limits) as scorer:
        outcomes = scorer.score([item(each) for each in completions], groups=[7, 3, 7, 3, 7])
    assert [outcome.reward for outcome in outcomes] == [2, 0, 0, 1, 1]
    assert [outcome.parts["size"] for outcome in outcomes] == [3, 2, 3, 2, 3]
    assert sorted(calls.read_text().splitlines()) == ["ccc a bb", "z yy"]


def test_a_group_is_scored_when_its_last_response_has_arrived(calls: Path) -> None:
    with opened("ranks", timeout_seconds=60) as scorer, scorer.open_batch([0, 1, 0, 1]) as batch:
        for number, completion in ((3, "dddd"), (2, "c"), (1, "bb")):
            batch.add(number, item(completion))
        wait_until(lambda: calls.exists() and calls.read_text() == "bb dddd\n")
        with pytest.raises(AssertionError, match=r"groups \[0\] lack responses"):
            batch.finish()
        with pytest.raises(AssertionError, match="item 2 was added before"):
            batch.add(2, item("c"))
        batch.add(0, item("aaa"))
        found = batch.finish()
    assert {number: outcome.reward for number, outcome in found.items()} == {0: 1, 1: 0, 2: 0, 3: 1}


@pytest.mark.parametrize(("name", "limits"), [("odd", {}), ("misbehaves", {}), ("odd", IN_PROCESS)])
def test_a_failure_is_that_of_the_whole_group_and_no_other(calls: Path, name: str, limits: dict) -> None:
    words = ["raise", "few", "nan", "one", "fine", *([] if limits else ["hang", "leave"])]
    items = [item(each) for word in words for each in (word, "other")]
    with opened(name, **limits) as scorer:
        outcomes = scorer.score(items, groups=[row // 2 for row in range(len(items))])
    assert outcomes[::2][:4] == outcomes[1::2][:4]
    failures = dict(zip(words, (outcome.failure or "" for outcome in outcomes[::2]), strict=True))
    assert failures["raise"] == "RuntimeError: no such luck"
    assert failures["few"] == "ValueError: the group function returned 1 scores for 2 responses"
    assert failures["nan"] == "ValueError: the reward is nan; expected a finite number"
    assert failures["one"] == "TypeError: the group function returned 1.0, a float; expected a list of 2 scores"
    assert outcomes[8:10] == [RewardOutcome(4.0), RewardOutcome(5.0)]
    if not limits:
        assert outcomes[10:12] == [LATE, LATE]
        assert outcomes[12] == outcomes[13]
        assert failures["leave"] == "RewardProcessError: the reward's process ended with exit code 3"


def test_a_group_is_scored_without_what_is_left_out(calls: Path) -> None:
    groups = [0, 0, 0, 1, 1]
    with opened("ranks") as scorer, scorer.open_batch(groups) as batch:
        batch.add(0, RewardItem("", "aaaa", "", {}))
        batch.leave_out(1)
        batch.add(2, RewardItem("", "b", "", {}))
        batch.leave_out(3)
        batch.leave_out(4)
        outcomes = batch.finish()
    assert {number: outcome.reward for number, outcome in outcomes.items()} == {0: 1, 2: 0}
    assert outcomes[0].parts == {"size": 2}


def test_a_missing_group_function_shows_how_one_looks(calls: Path) -> None:
    with opened("none") as scorer, pytest.raises(RewardImportError) as caught:
        scorer.wait_until_ready()
    assert "define `def score(prompt, completions, answer, info) -> list[float]` there" in str(caught.value)


class TestInTheRolloutWorker:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_folder(tmp_path_factory.mktemp("run"))

    def test_a_sampler_keeps_groups_of_the_same_prompt_apart(self, calls: Path, folder: Path) -> None:
        tokenizer = make_tokenizer()
        engine = TransformersEngine(load_model(ModelConfig(path=str(folder / "model"))))
        ids = np.array(tokenizer.encode("1 + 1 ="), dtype=np.int32)
        prompt = PromptRow(ids, "1 + 1 =", "2", {}, "tiny")
        texts = ["aaaa", "b", "cc", "d"]

        def responses() -> Iterator[tuple[int, Generation]]:
            for number in (3, 0, 2, 1):
                tokens = np.array(tokenizer.encode(texts[number], add_special_tokens=False), dtype=np.int32)
                yield number, Generation(tokens, np.zeros(len(tokens), dtype=np.float32), "stop")

        with opened("ranks") as scorer:
            sampler = ResponseSampler(engine, scorer, tokenizer)
            scored, _ = sampler.score([prompt] * 4, [0, 0, 1, 1], responses())
        assert [response.outcome.reward for response in scored] == [1, 0, 1, 0]
        assert [response.text for response in scored] == texts

    def test_a_step_is_ranked_group_by_group(self, calls: Path, folder: Path) -> None:
        store = open_store()
        worker = worker_of(run_of(folder, limits=RANKED), store=store)
        shard = worker.generate(0, 0, 0, GROUPS)
        rows = rows_of(store, worker, shard).values()
        for group in GROUPS:
            of_group = [row for row in rows if row["group_id"] == group]
            assert sorted(row["reward"] for row in of_group) == [0, 1, 2]
            by_length = sorted(of_group, key=lambda row: row["reward"])
            lengths = [len(row["response_text"]) for row in by_length]
            assert lengths == sorted(lengths)
            assert {row["reward_size"] for row in of_group} == {3}
        worker.close()

    def test_an_evaluation_ranks_its_own_samples(self, calls: Path, folder: Path) -> None:
        report = evaluate(run_of(folder, limits=RANKED, eval={"samples_per_prompt": 4, "temperature": 1.0}))
        assert (report.num_prompts, report.num_failed) == (4, 0)
        assert report.reward == pytest.approx(1.5)  # the mean of 0 to 3
        assert len(calls.read_text().splitlines()) == 4
