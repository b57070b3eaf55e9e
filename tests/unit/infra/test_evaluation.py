"""Held-out evaluation: its samples and its figures."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from infra.datasets import PromptRow, load_prompts
from infra.engines.base import Generation, GenerationRequest, Sampling, generate_all
from infra.engines.embedded.engine import TransformersEngine
from infra.environments.trajectory import Trajectory, TrajectoryBuilder
from infra.models.load import load_model
from infra.models.tiny import make_tokenizer
from infra.rewards.local import LocalRewardScorer
from infra.workers.prompt_groups import Evaluator
from infra.workers.sampling import ResponseSampler
from rl_core.rewards import load_reward
from rl_core.rollout.seeding import derive_seed
from schemas.errors import ConfigError
from schemas.step import EvalReport
from tests.support.rollout_workers import GROUPS, evaluate, make_folder, open_store, put, read, run_of, worker_of
from tests.support.tiny import tiny_row, write_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def _importable_rewards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)


def test_evaluation_by_hand(folder: Path) -> None:
    report = evaluate(run_of(folder, reward="is_even", eval={"num_prompts": 3}))  # answers 1, 2, 3
    assert (report.policy_version, report.num_prompts, report.num_failed) == (0, 3, 0)
    assert report.accuracy == pytest.approx(1 / 3)
    assert report.reward == pytest.approx(1 / 3)


def test_failed_rewards_are_not_counted(folder: Path) -> None:
    report = evaluate(run_of(folder, reward="fails_for_some"))  # answers 1, 2, 3, 4
    assert (report.num_prompts, report.num_failed, report.accuracy, report.reward) == (4, 2, 1.0, 1.0)


def test_an_evaluation_samples_with_its_own_settings(folder: Path, tmp_path: Path) -> None:
    """Compare the figures with those of samples that a bare engine gives with the evaluation's own settings."""
    names = ("even", "odd", "even", "odd")
    rows = [tiny_row(index, data_source=name) for index, name in enumerate(names)]
    write_rows(tmp_path / "two.jsonl", rows)
    n, limit, threshold = 3, 5, 0.4
    run = run_of(
        folder,
        data={"eval_path": str(tmp_path / "two.jsonl")},
        eval={
            "batch_prompts": 3,  # two batches, with prompts of both sources in each
            "samples_per_prompt": n,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.9,
            "max_response_tokens": limit,
            "accuracy_threshold": threshold,
        },
    )
    worker = worker_of(run)
    report = evaluate(run, worker)

    model, tokenizer = load_model(run.config.model), make_tokenizer()
    prompts = load_prompts(str(tmp_path / "two.jsonl"), run.config.data, tokenizer)
    requests = [
        GenerationRequest(prompts[row].prompt_ids, tuple(derive_seed(0, "eval", row, sample) for sample in range(n)))
        for row in range(4)
    ]
    sampling = Sampling(limit, 0.7, top_p=0.9, top_k=20, stop_token_ids=(tokenizer.eos_token_id,))
    drawn = generate_all(TransformersEngine(model), requests, sampling)
    rewards = [len(tokenizer.decode(one.token_ids, skip_special_tokens=True)) / 10 for one in drawn]  # as `parts`
    assert (report.num_prompts, report.samples_per_prompt, report.num_failed) == (4, n, 0)
    assert report.reward == pytest.approx(np.mean(rewards))
    assert report.accuracy == pytest.approx(np.mean(np.array(rewards) >= threshold))
    assert [source.data_source for source in report.sources] == ["even", "odd"]
    for name, source in zip(("even", "odd"), report.sources, strict=True):
        mine = [row * n + sample for row in range(4) if names[row] == name for sample in range(n)]
        right = np.array([rewards[index] >= threshold for index in mine]).reshape(2, n)
        assert (source.num_prompts, source.num_failed) == (2, 0)
        assert source.mean_at_n == pytest.approx(right.mean())
        assert source.best_at_n == pytest.approx(right.any(axis=1).mean())
        assert source.reward == pytest.approx(np.mean([rewards[index] for index in mine]))
        assert source.response_tokens == pytest.approx(np.mean([len(drawn[index].token_ids) for index in mine]))
        assert source.truncated == pytest.approx(np.mean([drawn[index].finish_reason == "length" for index in mine]))
    assert evaluate(run, worker) == report


def test_a_source_whose_rewards_all_failed_has_no_figures(folder: Path, tmp_path: Path) -> None:
    rows = [tiny_row(0, data_source="odd"), tiny_row(1, data_source="even")]  # answers 1 and 2
    data = {"eval_path": str(write_rows(tmp_path / "two.jsonl", rows))}
    report = evaluate(run_of(folder, reward="fails_for_some", data=data))
    assert (report.accuracy, report.num_failed) == (1.0, 1)
    assert [source.mean_at_n for source in report.sources] == [None, 1.0]
    assert EvalReport.model_validate_json(report.model_dump_json()) == report


def test_evaluation_does_not_disturb_the_pending_rows(folder: Path) -> None:
    store = open_store()
    run = run_of(folder)
    worker = worker_of(run, store=store)
    shard = worker.generate(0, 0, 0, GROUPS)
    evaluate(run, worker)
    assert read(store, shard, put(worker, shard)).num_rows == len(shard.rewards)


def test_evaluation_needs_a_file(folder: Path) -> None:
    worker = worker_of(run_of(folder, data={"eval_path": None}))
    for ask in (worker.num_held_out, lambda: worker.evaluate(0, range(1))):
        with pytest.raises(ConfigError, match=r"data\.eval_path is not set"):
            ask()


class PlayedEpisodes:
    """Trajectories that are given: of each, the model's first turn, what a tool answered, and the last turn."""

    def __init__(self, texts: Sequence[tuple[str, str, str]], tokenizer: PreTrainedTokenizerFast) -> None:
        self._texts, self._tokenizer = texts, tokenizer

    def begin(self, prompts: list[PromptRow], seeds: Sequence[int], journal: None) -> list[PromptRow]:
        return prompts

    def play(self, prompts: list[PromptRow], seeds: object, sampling: object) -> Iterator[tuple[int, Trajectory]]:
        for number, (prompt, texts) in enumerate(zip(prompts, self._texts, strict=True)):
            row = TrajectoryBuilder(number, prompt.prompt_ids, 0, None)
            first, answer, last = (np.array(self._tokenizer(text)["input_ids"], dtype=np.int32) for text in texts)
            row.add_turn(Generation(first, np.zeros(len(first), dtype=np.float32), "stop"), texts[0])
            row.add_environment_tokens(answer, parent=len(row.tokens) - 1)
            row.add_turn(Generation(last, np.zeros(len(last), dtype=np.float32), "stop"), texts[2])
            yield number, row.finish("done")


def test_of_several_turns_the_last_one_is_the_vote(folder: Path) -> None:
    config = run_of(folder, eval={"samples_per_prompt": 3, "temperature": 1.0}).config
    tokenizer = make_tokenizer()
    prompts = load_prompts(str(folder / "eval.parquet"), config.data, tokenizer)
    played = PlayedEpisodes([("add", r"\boxed{7}", "3"), ("sum up", "3", " 3"), ("add", r"\boxed{7}", "4")], tokenizer)
    scorer = LocalRewardScorer(load_reward(config.reward))
    sampler = ResponseSampler(None, scorer, tokenizer, played)  # type: ignore[arg-type]
    shard = Evaluator(config, prompts, sampler, Sampling(8)).generate([0])
    assert shard.answers == (0, 0, 2)
    assert shard.response_lengths == (4, 8, 4)  # one token a character, without those of the tool
    assert shard.rewards == pytest.approx((0.1, 0.2, 0.1))  # by the last turn's characters
