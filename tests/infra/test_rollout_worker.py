import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from infra.datasets import load_prompts
from infra.engines.base import GenerationRequest, Sampling, generate_all
from infra.engines.transformers import TransformersEngine
from infra.models.load import load_model
from infra.models.tiny import make_tokenizer
from infra.stores.memory import MemoryStore
from infra.workers.rollout import RolloutWorker
from rl_core.columns.jagged import flat_values, row_lengths
from rl_core.rollout.seeding import derive_seed
from rl_core.views import new_batch
from schemas.catalog import CATALOG
from schemas.config.model import ModelConfig
from schemas.config.run import RunConfig
from schemas.errors import (
    ConfigError,
    DataError,
    LeaseError,
    ModelError,
    RewardFailureError,
    RewardImportError,
    UserError,
    VersionError,
)
from schemas.rollout import PutResult, RolloutHandle, RolloutShard, check_failures
from schemas.step import EvalReport, RunHandle
from tests.tiny import make_tiny_data, make_tiny_model, tiny_row, write_rows

NUM_PROMPTS, NUM_SAMPLES = 5, 3
GROUPS = range(NUM_PROMPTS)  # those of a step's own prompts

REWARDS = """
def parts(prompt, completion, answer, info):
    return {"reward": len(completion) / 10, "index": info["index"]}

def fails_for_some(prompt, completion, answer, info):
    if int(answer) % 2:
        raise RuntimeError(f"no reward for {prompt}")
    return 1.0

def fails(prompt, completion, answer, info):
    raise RuntimeError("no reward at all")

def hangs_for_one(prompt, completion, answer, info):
    while int(answer) == 1:
        pass
    return {"reward": 1.0, "length": len(completion)}

def is_even(prompt, completion, answer, info):
    return 1.0 - int(answer) % 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, 7 training prompts and 4 held-out ones."""
    folder = tmp_path_factory.mktemp("run")
    make_tiny_model(folder / "model")
    make_tiny_data(folder / "train.parquet", 7)
    make_tiny_data(folder / "eval.parquet", 4)
    (folder / "rollout_rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture(autouse=True)
def _importable_rewards(folder: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(folder)


def run_of(
    folder: Path, *, reward: str = "parts", limits: dict | None = None, num_workers: int = 1, **changes: object
) -> RunHandle:
    fields = {
        "steps": 3,
        "model": {"path": str(folder / "model")},
        "data": {"train_path": str(folder / "train.parquet"), "eval_path": str(folder / "eval.parquet")},
        "reward": {
            "kind": "function",
            "path": f"rollout_rewards:{reward}",
            "max_failure_fraction": 0.7,
            **(limits or {"num_processes": 0, "timeout_seconds": None}),
        },
        "rollout": {
            "num_prompts": NUM_PROMPTS,
            "samples_per_prompt": NUM_SAMPLES,
            "max_response_tokens": 8,
            "num_workers": num_workers,
        },
        "runtime": {"num_threads": 1},
    }
    config = RunConfig.model_validate(fields | changes)
    return RunHandle(run_id="run", directory=str(folder), config=config, store_incarnation="memory")


def worker_of(run: RunHandle, shard: int = 0, store: MemoryStore | None = None) -> RolloutWorker:
    worker = RolloutWorker(run, shard, store or open_store())
    worker.start()
    return worker


def open_store() -> MemoryStore:
    store = MemoryStore("run", 2**20)
    for step in range(3):
        store.open_lease(step)
    return store


def read(store: MemoryStore, shard: RolloutShard, result: PutResult, step: int = 0) -> pa.RecordBatch:
    batch = new_batch(
        run_id="run",
        step=step,
        policy_version=0,
        chunks=[result.chunk],
        dtypes=result.dtypes,
        prompt_lengths=np.array(shard.prompt_lengths),
        response_lengths=np.array(shard.response_lengths),
    )
    return store.read(batch, batch.columns)


def put(worker: RolloutWorker, shard: RolloutShard, step: int = 0, parts: tuple[str, ...] | None = None) -> PutResult:
    return worker.put(step, shard.shard, shard.kept, tuple(shard.parts) if parts is None else parts)


def rows_of(store: MemoryStore, worker: RolloutWorker, shard: RolloutShard, step: int = 0) -> dict[str, dict]:
    """What the worker puts of a shard, by sample."""
    stored = read(store, shard, put(worker, shard, step), step)
    return {row["sample_id"]: row for row in stored.to_pylist()}


def assert_same_rows(found: dict[str, dict], expected: dict[str, dict]) -> None:
    """Equal in all but the last bits of the log-probs: other batches round otherwise."""
    assert found.keys() == expected.keys()
    for sample_id, row in expected.items():
        logprobs = found[sample_id].pop("sampler_logprobs")
        assert logprobs == pytest.approx(row.pop("sampler_logprobs"), abs=1e-5)
        assert found[sample_id] == row


def test_what_is_put_is_what_was_reported(folder: Path) -> None:
    store = open_store()
    worker = worker_of(run_of(folder), store=store)
    shard = worker.generate(0, 0, 0, GROUPS)
    rows = read(store, shard, put(worker, shard))

    assert rows.num_rows == NUM_PROMPTS * NUM_SAMPLES
    produced = {name for name, spec in CATALOG.items() if spec.producer == "rollout"}
    assert set(rows.schema.names) == produced | {"reward_index"}
    assert rows["prompt_ids"].type.value_type == pa.uint16()
    assert row_lengths(rows["response_ids"]).tolist() == list(shard.response_lengths) == list(shard.loss_tokens)
    assert flat_values(rows["loss_mask"]).all()
    assert rows["reward"].to_pylist() == [np.float32(reward) for reward in shard.rewards]
    assert rows["finish_reason"].to_pylist() == list(shard.finish_reasons)
    assert rows["group_id"].to_pylist() == list(shard.group_ids) == [g for g in range(5) for _ in range(3)]
    assert rows["sample_id"].to_pylist()[:4] == ["0-0-0", "0-0-1", "0-0-2", "0-1-0"]
    assert set(rows["policy_version"].to_pylist()) == {0}


def test_rows_hold_together(folder: Path) -> None:
    store = open_store()
    worker = worker_of(run_of(folder), store=store)
    shard = worker.generate(0, 0, 0, GROUPS)
    tokenizer = make_tokenizer()
    for row in read(store, shard, put(worker, shard)).to_pylist():
        info = json.loads(row["info"])
        assert info["data_source"] == "tiny"
        assert row["prompt_text"] == f"{info['index']} + 1 ="
        assert row["answer"] == str(info["index"] + 1)
        assert row["prompt_text"] in tokenizer.decode(row["prompt_ids"])
        assert row["response_text"] == tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        assert row["reward"] == pytest.approx(len(row["response_text"]) / 10)
        assert row["reward_index"] == info["index"]
        assert (row["response_ids"][-1] == tokenizer.eos_token_id) == (row["finish_reason"] == "stop")


def test_the_driver_gets_scalars_and_a_few_texts(folder: Path) -> None:
    shard = worker_of(run_of(folder)).generate(0, 0, 0, GROUPS)
    assert len({sample.prompt for sample in shard.samples}) == 4  # each of another prompt
    assert len(shard.samples) == 4
    assert shard.samples[0].reward == shard.rewards[0]
    metrics = RolloutHandle(step=0, policy_version=0, shards=(shard,)).metrics
    assert metrics["reward_index"].weight == NUM_PROMPTS * NUM_SAMPLES
    assert {"rollout/generate_seconds", "rollout/reward_seconds"} < set(metrics)
    assert shard.failure is None
    assert len(shard.model_dump_json()) < 4000


def test_another_worker_puts_the_same_rows(folder: Path) -> None:
    store = open_store()
    first = worker_of(run_of(folder), store=store)
    shard = first.generate(1, 0, 2, GROUPS)
    assert first.has_shard(1, 0, 2)
    assert not first.has_shard(1, 1, 2)  # another version would have sampled others
    assert not first.has_shard(1, 0, 0)
    chunk = put(first, shard, 1).chunk
    for worker in (worker_of(run_of(folder), 1, store), first):
        assert not worker.has_shard(1, 0, 2)  # never had them, or let go of them
        again = worker.generate(1, 0, 2, GROUPS)
        assert again.replace(seconds=shard.seconds, worker=0) == shard
        assert put(worker, again, 1).chunk == chunk  # other content under one key is refused
    assert store.usage().num_chunks == 1


def test_chosen_groups_are_those_of_the_whole(folder: Path) -> None:
    run = run_of(folder)
    whole_store, store = open_store(), open_store()
    whole = worker_of(run, store=whole_store)
    expected = rows_of(whole_store, whole, whole.generate(2, 0, 0, range(9)), 2)
    worker = worker_of(run, store=store)
    shard = worker.generate(2, 0, 0, (3, 6, 8))
    assert shard.groups == shard.kept == (3, 6, 8)
    chosen = {sample_id: row for sample_id, row in expected.items() if row["group_id"] in (3, 6, 8)}
    assert len(chosen) == 3 * NUM_SAMPLES
    assert_same_rows(rows_of(store, worker, shard, 2), chosen)


def test_only_kept_groups_are_put(folder: Path) -> None:
    store = open_store()
    worker = worker_of(run_of(folder), store=store)
    whole, more = worker.generate(1, 0, 0, GROUPS), worker.generate(1, 0, 1, (5, 6))
    shard = whole.keep({1, 4, 6})
    assert (shard.groups, shard.kept) == (tuple(GROUPS), (1, 4))
    rows = rows_of(store, worker, shard, 1)
    assert [row["group_id"] for row in rows.values()] == list(shard.group_ids) == [1, 1, 1, 4, 4, 4]
    assert [row["reward"] for row in rows.values()] == pytest.approx(shard.rewards)
    assert [row["reward_index"] for row in rows.values()] == list(shard.parts["index"])
    assert shard.rewards == tuple(r for g, r in zip(whole.group_ids, whole.rewards, strict=True) if g in (1, 4))
    assert len(rows_of(store, worker, more.keep({6}), 1)) == NUM_SAMPLES
    assert store.usage().num_chunks == 2


def test_a_step_that_is_begun_again_holds_nothing_twice(folder: Path) -> None:
    store = open_store()
    worker = worker_of(run_of(folder), store=store)
    for shard, groups in enumerate((GROUPS, (5, 6), GROUPS, (5, 6))):
        last = worker.generate(0, 0, shard % 2, groups)
    assert len(rows_of(store, worker, last)) == 2 * NUM_SAMPLES


def test_a_worker_lets_go_of_what_earlier_steps_dropped(folder: Path) -> None:
    worker = worker_of(run_of(folder))
    worker.generate(0, 0, 0, GROUPS)
    worker.generate(1, 0, 0, GROUPS)
    assert not worker.has_shard(0, 0, 0)
    assert worker.has_shard(1, 0, 0)


def test_all_workers_chunks_have_the_same_reward_parts(folder: Path) -> None:
    store = open_store()
    worker = worker_of(run_of(folder), store=store)
    shard = worker.generate(0, 0, 0, GROUPS)
    assert tuple(shard.parts) == ("index",)
    result = put(worker, shard, parts=("index", "style"))  # another worker's samples have a part that these lack
    rows = read(store, shard, result)
    assert result.traffic.num_puts == 1
    assert result.traffic.put_bytes == result.chunk.num_bytes
    assert rows["reward_style"].null_count == rows.num_rows
    assert rows["reward_index"].null_count == 0


def test_steps_and_seeds_differ(folder: Path) -> None:
    store = open_store()
    worker = worker_of(run_of(folder), store=store)
    texts = [tuple(s.response for s in worker.generate(step, 0, 0, GROUPS).samples) for step in (0, 1, 0)]
    assert texts[0] == texts[2]
    assert texts[0] != texts[1]
    other = worker_of(run_of(folder, seed=1)).generate(0, 0, 0, GROUPS)
    assert tuple(sample.response for sample in other.samples) != texts[0]


def test_the_number_of_workers_changes_no_sample(folder: Path) -> None:
    store = open_store()
    whole = worker_of(run_of(folder), store=store)
    expected = rows_of(store, whole, whole.generate(2, 0, 0, GROUPS), 2)
    store = open_store()
    found = {}
    for shard in range(2):
        worker = worker_of(run_of(folder, num_workers=2), shard, store)
        report = worker.generate(2, 0, shard, GROUPS[shard::2])
        assert set(report.group_ids) == set(range(shard, NUM_PROMPTS, 2))
        found |= rows_of(store, worker, report, 2)
    assert_same_rows(found, expected)


def test_only_the_held_version_is_served(folder: Path, tmp_path: Path) -> None:
    worker = worker_of(run_of(folder))
    before = worker.generate(0, 0, 0, GROUPS)
    other = load_model(ModelConfig(path=str(make_tiny_model(tmp_path, seed=1))))
    for call in (lambda: worker.generate(0, 1, 0, GROUPS), lambda: worker.evaluate(1)):
        with pytest.raises(VersionError, match="holds policy version 0, not the expected 1"):
            call()
    worker.engine.load_weights(dict(other.named_parameters()), 1)
    assert worker.version() == 1
    assert worker.has_shard(0, 0, 0)  # what version 0 sampled stays until it is put
    assert worker.generate(0, 1, 0, GROUPS).samples != before.samples
    assert worker.has_shard(0, 1, 0)


def test_failed_rewards_are_null_and_counted(folder: Path) -> None:
    store = open_store()
    worker = worker_of(run_of(folder, reward="fails_for_some"), store=store)
    shard = worker.generate(0, 0, 0, GROUPS)
    rows = read(store, shard, put(worker, shard))
    failed = [int(answer) % 2 == 1 for answer in rows["answer"].to_pylist()]
    assert 0 < sum(failed) < len(failed)
    assert [reward is None for reward in shard.rewards] == failed
    assert rows["reward"].to_pylist() == [None if bad else 1.0 for bad in failed]
    assert shard.failure is not None
    assert shard.failure.startswith("RuntimeError: no reward for ")


def test_a_reward_that_never_returns_costs_its_rows_only(folder: Path) -> None:
    store = open_store()
    run = run_of(
        folder,
        reward="hangs_for_one",
        limits={"num_processes": 1, "timeout_seconds": 1.0},
        data={"train_path": str(folder / "train.parquet"), "shuffle": False},  # answers 1 to 5
    )
    worker = worker_of(run, store=store)
    shard = worker.generate(0, 0, 0, GROUPS)
    rows = read(store, shard, put(worker, shard)).to_pylist()
    hung = [row["answer"] == "1" for row in rows]
    assert sum(hung) == NUM_SAMPLES
    assert [reward is None for reward in shard.rewards] == hung
    assert [row["reward"] for row in rows] == [None if bad else 1.0 for bad in hung]
    assert [row["reward_length"] for row in rows] == [
        None if bad else len(row["response_text"]) for bad, row in zip(hung, rows, strict=True)
    ]
    assert shard.failure == "TimeoutError: no answer within 1 s"


@pytest.mark.parametrize("max_failure_fraction", [0.5, 1.0])
def test_too_many_failed_rewards_stop_the_step(folder: Path, max_failure_fraction: float) -> None:
    reward = {
        "kind": "function",
        "path": "rollout_rewards:fails",
        "max_failure_fraction": max_failure_fraction,
    }
    run = run_of(folder)
    run = run.replace(config=run.config.replace(reward=reward))
    shard = worker_of(run).generate(0, 0, 0, GROUPS)
    with pytest.raises(RewardFailureError, match=r"15 of 15 rewards of step 0 failed.*no reward at all"):
        check_failures(shard.rewards, shard.failure, max_failure_fraction, "step 0")
    with pytest.raises(RewardFailureError, match=r"4 of 4 rewards of the evaluation failed.*no reward at all"):
        worker_of(run).evaluate(0)


def test_evaluation_by_hand(folder: Path) -> None:
    worker = worker_of(run_of(folder, reward="is_even", eval={"num_prompts": 3}))  # answers 1, 2, 3
    report = worker.evaluate(0)
    assert (report.policy_version, report.num_prompts, report.num_failed) == (0, 3, 0)
    assert report.accuracy == pytest.approx(1 / 3)
    assert report.reward == pytest.approx(1 / 3)


def test_evaluation_leaves_failed_rewards_out(folder: Path) -> None:
    report = worker_of(run_of(folder, reward="fails_for_some")).evaluate(0)  # answers 1, 2, 3, 4
    assert (report.num_prompts, report.num_failed, report.accuracy, report.reward) == (4, 2, 1.0, 1.0)


def test_an_evaluation_samples_in_its_own_way(folder: Path, tmp_path: Path) -> None:
    """The figures are those of what a bare engine draws with the evaluation's own settings."""
    names = ("even", "odd", "even", "odd")
    rows = [tiny_row(index, data_source=name) for index, name in enumerate(names)]
    write_rows(tmp_path / "two.jsonl", rows)
    n, limit, threshold = 3, 5, 0.4
    run = run_of(
        folder,
        data={"train_path": str(folder / "train.parquet"), "eval_path": str(tmp_path / "two.jsonl")},
        eval={
            "samples_per_prompt": n,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.9,
            "max_response_tokens": limit,
            "accuracy_threshold": threshold,
        },
    )
    worker = worker_of(run)
    report = worker.evaluate(0)

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
    again = worker.evaluate(0)
    assert again.replace(seconds=report.seconds) == report


def test_a_source_whose_rewards_all_failed_has_no_figures(folder: Path, tmp_path: Path) -> None:
    rows = [tiny_row(0, data_source="odd"), tiny_row(1, data_source="even")]  # answers 1 and 2
    data = {"train_path": str(folder / "train.parquet"), "eval_path": str(write_rows(tmp_path / "two.jsonl", rows))}
    report = worker_of(run_of(folder, reward="fails_for_some", data=data)).evaluate(0)
    assert (report.accuracy, report.num_failed) == (1.0, 1)
    assert [source.mean_at_n for source in report.sources] == [None, 1.0]
    assert EvalReport.model_validate_json(report.model_dump_json()) == report


def test_steps_take_their_prompts_from_all_sources(folder: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "more.jsonl", [tiny_row(40 + index) for index in range(3)])
    sources = [{"path": str(folder / "train.parquet")}, {"path": str(tmp_path / "more.jsonl"), "weight": 1.5}]
    store = open_store()
    worker = worker_of(run_of(folder, data={"sources": sources}), store=store)
    answers = {int(row["answer"]) for row in rows_of(store, worker, worker.generate(0, 0, 0, GROUPS)).values()}
    assert len(answers) == NUM_PROMPTS
    assert sum(answer > 40 for answer in answers) == 3  # 3 of 5, by weight


def test_evaluation_does_not_disturb_the_held_rows(folder: Path) -> None:
    store = open_store()
    worker = worker_of(run_of(folder), store=store)
    shard = worker.generate(0, 0, 0, GROUPS)
    worker.evaluate(0)
    assert read(store, shard, put(worker, shard)).num_rows == len(shard.rewards)


def test_a_put_needs_the_lease_and_keeps_the_rows_when_refused(folder: Path) -> None:
    store = MemoryStore("run", 2**20)
    worker = worker_of(run_of(folder), store=store)
    shard = worker.generate(0, 0, 0, GROUPS)
    with pytest.raises(LeaseError):
        put(worker, shard)
    store.open_lease(0)
    assert read(store, shard, put(worker, shard)).num_rows == len(shard.rewards)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"model": {"path": "/no/such/model"}}, ModelError, "no such folder"),
        ({"data": {"train_path": "/no/such/data.parquet"}}, DataError, "no such file"),
        ({"reward": "none"}, RewardImportError, "no such function"),
        ({"rollout": {"max_response_tokens": 505}}, ConfigError, "more than the 512 positions"),
        (
            {"eval": {"max_response_tokens": 505}},
            ConfigError,
            r"eval\.max_response_tokens is 505, together more than the 512 positions",
        ),
    ],
)
def test_what_a_user_got_wrong_is_said_at_the_start(
    folder: Path, changes: dict, error: type[UserError], text: str
) -> None:
    with pytest.raises(error, match=text):
        worker_of(run_of(folder, **changes))


def test_evaluation_needs_a_file(folder: Path) -> None:
    worker = worker_of(run_of(folder, data={"train_path": str(folder / "train.parquet")}))
    with pytest.raises(ConfigError, match=r"data\.eval_path is not set"):
        worker.evaluate(0)
