"""The rollout worker: what it generates, keeps and puts, as a function of step and groups alone."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from infra.datasets import PromptRow
from infra.engines.base import Generation, SamplingMask
from infra.environments.slot import Failure, Reply
from infra.environments.trajectory import TrajectoryBuilder, measure
from infra.models.load import load_model
from infra.models.tiny import make_tokenizer
from infra.stores.chunk_index import MemoryStore
from infra.stores.files import FsspecColumnStore
from infra.stores.tiered import TieredColumnStore
from infra.workers.prompt_groups import Row
from infra.workers.rollout import RolloutWorker
from infra.workers.sampling import ResponseSampler, ResponseStart
from rl_core.columns.codec import encoded_bytes
from rl_core.columns.jagged import flat_values, row_lengths
from rl_core.views import decode_ints
from schemas.batch import ChunkKey, ChunkRef
from schemas.catalog import CATALOG, column_spec
from schemas.config.model import ModelConfig
from schemas.errors import (
    ConfigError,
    DataError,
    ModelError,
    RewardFailureError,
    RewardImportError,
    StepNotOpenError,
    StoreError,
    UserError,
    VersionError,
)
from schemas.metric_catalog import metric_spec
from schemas.metrics import Max, Mean, Sum
from schemas.rollout import RolloutHandle, SampleText, SourceSchedule, check_failures
from tests.support.rollout_workers import (
    GROUPS,
    NUM_PROMPTS,
    NUM_SAMPLES,
    assert_same_rows,
    evaluate,
    make_folder,
    open_store,
    put,
    read,
    rows_of,
    run_of,
    worker_of,
)
from tests.support.tiny import make_tiny_model, make_tiny_moe, tiny_row, write_rows
from tests.support.weight_tensors import load_state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def _importable_rewards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)


def test_the_stored_columns_agree_with_the_report(folder: Path) -> None:
    store = open_store()
    experts = {"model": {"path": str(make_tiny_moe(folder / "moe"))}, "rollout": {"router_replay": True}}
    worker = worker_of(run_of(folder, **experts), store=store)
    shard = worker.generate(0, 0, 0, GROUPS)
    rows = read(store, shard, put(worker, shard))
    assert rows.num_rows == NUM_PROMPTS * NUM_SAMPLES
    produced = {name for name, spec in CATALOG.items() if spec.producer == "rollout" and spec.axis != "turn"}
    of_others = {"sampler_versions", "episode_end", "teacher_prompt_ids"}  # staleness, environments, distillation
    of_others |= {"sampling_mask_counts", "sampling_mask_ids", "prefix_tokens"}  # truncation; fine-tuning
    assert set(rows.schema.names) == produced - of_others | {"reward_index"}
    assert rows["prompt_ids"].type.value_type == pa.uint16()
    assert row_lengths(rows["response_ids"]).tolist() == list(shard.response_lengths) == list(shard.loss_tokens)
    assert flat_values(rows["loss_mask"]).all()
    assert rows["reward"].to_pylist() == [np.float32(reward) for reward in shard.rewards]
    assert [reason == "length" for reason in rows["finish_reason"].to_pylist()] == list(shard.truncated)
    assert rows["group_id"].to_pylist() == list(shard.group_ids) == [g for g in range(5) for _ in range(3)]
    assert rows["sample_id"].to_pylist()[:4] == ["0-0-0", "0-0-1", "0-0-2", "0-1-0"]
    assert set(rows["policy_version"].to_pylist()) == {0}


def test_the_columns_of_a_row_agree_with_one_another(folder: Path) -> None:
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
    assert len({sample.prompt for sample in shard.samples}) == 4  # each of a different prompt
    assert len(shard.samples) == 4
    assert shard.samples[0].reward == shard.rewards[0]
    long = SampleText(prompt="a" * 300 + "b", response="c" * 300 + "d", answer="e" * 301, reward=None)
    assert (long.prompt, long.response, long.answer) == ("a" * 299 + "b", "c" * 300, "e" * 300)
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
    assert not first.has_shard(1, 1, 2)  # another version would have given other samples
    assert not first.has_shard(1, 0, 0)
    chunk = put(first, shard, 1).chunk
    for number, worker in ((1, worker_of(run_of(folder), 1, store)), (0, first)):
        assert worker.put(1, 0, 2, shard.kept, tuple(shard.parts), number) is None  # never generated it, or dropped it
        again = worker.generate(1, 0, 2, GROUPS)
        assert again.replace(seconds=shard.seconds, telemetry=shard.telemetry, worker=0) == shard
        assert put(worker, again, 1).chunk == chunk  # other content under the same key is rejected
    assert store.usage().num_chunks == 1


def test_rows_that_wait_are_neither_generated_again_nor_taken_for_another_workers(folder: Path) -> None:
    worker = worker_of(run_of(folder), store=open_store())
    shard = worker.generate(1, 0, 2, GROUPS)
    assert worker.generate(1, 0, 2, GROUPS) is shard
    other = SourceSchedule(shares=(1_000_000,), credits=(0,), positions=(3,))
    assert worker.generate(1, 0, 2, GROUPS, schedules={1: other}) is not shard  # whose prompts may be others
    assert worker.put(1, 0, 2, shard.kept, tuple(shard.parts), holder=1) is None
    failing = worker_of(run_of(folder, reward="fails_for_some"))
    assert failing.generate(1, 0, 2, GROUPS) is not failing.generate(1, 0, 2, GROUPS)  # rewards are tried again
    fewer = worker.generate(1, 0, 2, GROUPS[:2])
    assert fewer.groups == tuple(GROUPS[:2])
    assert put(worker, fewer, 1).chunk.num_rows == 2 * NUM_SAMPLES


def test_some_groups_alone_have_the_rows_that_they_have_among_all(folder: Path) -> None:
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


def test_a_restarted_step_keeps_nothing_twice(folder: Path) -> None:
    store = open_store()
    worker = worker_of(run_of(folder), store=store)
    for shard, groups in enumerate((GROUPS, (5, 6), GROUPS, (5, 6))):
        last = worker.generate(0, 0, shard % 2, groups)
    assert len(rows_of(store, worker, last)) == 2 * NUM_SAMPLES


def test_a_worker_drops_the_pending_shards_of_earlier_steps(folder: Path) -> None:
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
    result = put(worker, shard, parts=("index", "style"))  # as another worker's samples have a second part
    rows = read(store, shard, result)
    assert result.traffic.num_puts == 1
    assert result.traffic.put_bytes == result.chunk.num_bytes
    assert rows["reward_style"].null_count == rows.num_rows
    assert rows["reward_index"].null_count == 0


def test_a_prompt_is_stored_once_for_its_samples(folder: Path) -> None:
    store = open_store()
    worker = worker_of(run_of(folder), store=store)
    shard = worker.generate(0, 0, 0, GROUPS)
    result = put(worker, shard)
    rows = read(store, shard, result)
    assert result.prompt_rows is not None
    held = decode_ints(result.prompt_rows)
    assert held.tolist() == [row // NUM_SAMPLES * NUM_SAMPLES for row in range(rows.num_rows)]
    prompts = rows.select([name for name in rows.schema.names if column_spec(name).is_of_prompt])
    assert prompts.schema.names == ["prompt_ids", "prompt_text", "answer", "info"]
    assert prompts.take(pa.array(held)).equals(prompts)
    texts = [text for name in prompts.schema.names[1:] for text in rows[name].to_pylist()]
    values = rows["prompt_ids"].flatten().nbytes + sum(len(text.encode()) for text in texts)
    saved = values - values // NUM_SAMPLES
    padding = 64 * len(prompts.schema.names)  # of each buffer, in Arrow files
    assert abs(encoded_bytes(rows) - result.chunk.num_bytes - saved) <= padding < saved


def test_steps_and_seeds_differ(folder: Path) -> None:
    store = open_store()
    worker = worker_of(run_of(folder), store=store)
    texts = [tuple(s.response for s in worker.generate(step, 0, 0, GROUPS).samples) for step in (0, 1, 0)]
    assert texts[0] == texts[2]
    assert texts[0] != texts[1]
    other = worker_of(run_of(folder, seed=1)).generate(0, 0, 0, GROUPS)
    assert tuple(sample.response for sample in other.samples) != texts[0]


def test_samples_of_a_prompt_have_seeds_of_their_own_and_one_environment_seed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[ResponseStart] = []
    sample, store = ResponseSampler.sample, open_store()

    def noted(sampler: ResponseSampler, starts: list[ResponseStart], *rest: object) -> object:
        begun.extend(starts)
        return sample(sampler, starts, *rest)

    monkeypatch.setattr(ResponseSampler, "sample", noted)
    worker = worker_of(run_of(folder), store=store)
    rows = rows_of(store, worker, worker.generate(0, 0, 0, GROUPS)).values()
    assert len({start.seed for start in begun}) == NUM_PROMPTS * NUM_SAMPLES
    assert len({(row["group_id"], tuple(row["response_ids"])) for row in rows}) == NUM_PROMPTS * NUM_SAMPLES
    by_group = [{start.environment_seed for start in begun if start.group == group} for group in GROUPS]
    assert [len(seeds) for seeds in by_group] == [1] * NUM_PROMPTS
    assert len(set.union(*by_group)) == NUM_PROMPTS


def test_a_row_that_is_continued_draws_other_noise_than_at_its_start() -> None:
    prompt = PromptRow(np.array([1, 2]), "1 + 1 =", "2", {}, "tiny")
    responses = [None, *(Generation(np.arange(n), np.zeros(n, np.float32), "length") for n in (3, 6))]
    rows = [Row(2, group, number, prompt, each) for group in (0, 1) for number in (0, 1) for each in responses]
    seeds = [row.seed(7) for row in rows]
    assert len(set(seeds)) == len(rows)
    assert [row.seed(7) for row in rows] == seeds  # a function of the run, the row and its tokens so far


def test_only_sampled_tokens_are_trained() -> None:
    row = TrajectoryBuilder(0, np.array([1, 2]), 0, None)
    masks = [
        SamplingMask(np.array(counts, np.int32), np.array(ids, np.int32))
        for counts, ids in (([1, 2], [3, 4, 9]), ([1], [8]))
    ]
    row.add_turn(Generation(np.array([3, 4]), np.array([-0.5, -0.25], np.float32), "stop", sampling_mask=masks[0]), "a")
    row.add_answer(Reply(("b",), 0.5))
    assert not row.add_environment_tokens(np.array([5, 6, 7]), parent=3)
    row.add_turn(Generation(np.array([8]), np.array([-1.0], np.float32), "stop", sampling_mask=masks[1]), "c")
    found = row.finish("done")
    assert found.token_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert found.loss_mask.tolist() == [True, True, False, False, False, True]
    assert (found.parents, found.num_branches, found.num_branch_tokens) == ((-1, 1), 0, 0)
    assert found.logprobs.tolist() == [-0.5, -0.25, 0, 0, 0, -1]
    assert found.sampling_mask is not None
    assert found.sampling_mask.counts.tolist() == [1, 2, 0, 0, 0, 1]
    assert found.sampling_mask.token_ids.tolist() == [3, 4, 9, 8]


def test_requests_of_failed_trajectories_are_measured_too() -> None:
    turn = Generation(np.array([3, 4]), np.zeros(2, np.float32), "stop")
    never_asks = TrajectoryBuilder(2, np.array([1, 2]), 0, None)  # of another environment
    never_asks.add_turn(turn, "a")
    asks = TrajectoryBuilder(0, np.array([1, 2]), 0, None, requests={"messages": 1})
    asks.add_turn(turn, "a")
    asks.add_answer(Reply(requests={"messages": 3, "repeated": 1, "unrested": 1, "seconds": 2.0}))
    fails = TrajectoryBuilder(1, np.array([1, 2]), 0, None)
    fails.add_turn(turn, "a")
    fails.add_call(Reply(failure=Failure("raised", "no"), requests={"responses": 2, "refused": 2, "seconds": 4.0}))
    found = measure([asks.finish("done"), never_asks.finish("done"), fails.finish("failed")])
    assert {name: metric for name, metric in found.items() if name.startswith("requests")} == {
        "requests/chat_completions": Mean(total=0, weight=2),
        "requests/messages": Mean(total=4, weight=2),
        "requests/responses": Mean(total=2, weight=2),
        "requests/repeated": Sum(value=1),
        "requests/refused": Sum(value=2),
        "requests/unrested": Sum(value=1),
        "requests/seconds": Mean(total=6.0, weight=2),
        "requests/seconds_max": Max(value=4.0),
    }
    for name, metric in found.items():
        assert metric_spec(name).reduction == metric.kind


def test_the_number_of_workers_does_not_change_the_samples(folder: Path) -> None:
    store = open_store()
    whole = worker_of(run_of(folder), store=store)
    expected = rows_of(store, whole, whole.generate(2, 0, 0, GROUPS), 2)
    store = open_store()
    found = {}
    for shard in range(2):
        worker = worker_of(run_of(folder, rollout={"num_workers": 2}), shard, store)
        report = worker.generate(2, 0, shard, GROUPS[shard::2])
        assert set(report.group_ids) == set(range(shard, NUM_PROMPTS, 2))
        found |= rows_of(store, worker, report, 2)
    assert_same_rows(found, expected)


def test_only_the_held_version_is_served(folder: Path, tmp_path: Path) -> None:
    worker = worker_of(run_of(folder))
    before = worker.generate(0, 0, 0, GROUPS)
    other = load_model(ModelConfig(path=str(make_tiny_model(tmp_path, seed=1))))
    for call in (lambda: worker.generate(0, 1, 0, GROUPS), lambda: worker.evaluate(1, range(1))):
        with pytest.raises(VersionError, match="holds policy version 0, not the expected 1"):
            call()
    load_state(worker.engine, dict(other.named_parameters()), 1)
    assert worker.engine.version == 1
    assert worker.has_shard(0, 0, 0)  # the samples of version 0 stay until they are put
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
    lost = [row for row, bad in zip(rows.to_pylist(), failed, strict=True) if bad]
    assert list(shard.failures) == [row["sample_id"] for row in lost]
    assert all(reason.startswith("RuntimeError: no reward for ") for reason in shard.failures.values())


def test_a_reward_that_never_returns_costs_only_its_rows(folder: Path) -> None:
    store = open_store()
    run = run_of(
        folder,
        reward="hangs_for_one",
        limits={"num_processes": NUM_SAMPLES, "timeout_seconds": 3.0},
        data={"shuffle": False},  # answers 1 to 5
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
    assert shard.failure == "TimeoutError: no answer within 3 s"


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
        evaluate(run)


def test_steps_take_their_prompts_from_all_sources(folder: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "more.jsonl", [tiny_row(40 + index) for index in range(3)])
    sources = [{"path": str(folder / "train.parquet")}, {"path": str(tmp_path / "more.jsonl"), "weight": 1.5}]
    store = open_store()
    worker = worker_of(run_of(folder, data={"train_path": None, "sources": sources}), store=store)
    answers = {int(row["answer"]) for row in rows_of(store, worker, worker.generate(0, 0, 0, GROUPS)).values()}
    assert len(answers) == NUM_PROMPTS
    assert sum(answer > 40 for answer in answers) == 3  # 3 of 5, by weight


def test_a_put_needs_an_open_step_and_keeps_the_rows_if_rejected(folder: Path) -> None:
    store = MemoryStore("run", 2**20)
    worker = worker_of(run_of(folder), store=store)
    shard = worker.generate(0, 0, 0, GROUPS)
    with pytest.raises(StepNotOpenError):
        put(worker, shard)
    store.open(0)
    assert read(store, shard, put(worker, shard)).num_rows == len(shard.rewards)


def test_a_put_waits_until_its_rows_are_durable(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable = FsspecColumnStore("run", str(tmp_path / "columns"))
    store = TieredColumnStore(MemoryStore("run", 2**20, incarnation=durable.incarnation), durable)
    store.open(0)
    worker = RolloutWorker(run_of(folder), store=store)
    worker.start()
    shard = worker.generate(0, 0, 0, GROUPS)

    def broken(chunk: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(durable, "_put", broken)
        with pytest.raises(StoreError, match="not durable: no space left on device"):
            put(worker, shard)
    assert worker.has_shard(0, 0, 0)  # it is put again
    assert put(worker, shard).chunk in durable.chunks(0)


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
def test_a_users_mistake_is_reported_at_the_start(
    folder: Path, changes: dict, error: type[UserError], text: str
) -> None:
    with pytest.raises(error, match=text):
        worker_of(run_of(folder, **changes))
