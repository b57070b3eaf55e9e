"""The policy worker as a plain object, on a store in memory: what an update does, and that it does it only once."""

import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from infra.checkpoints.state import policy_tensors
from infra.checkpoints.store import open_checkpoints
from infra.storage.lineage import Fork, save_fork
from infra.storage.runs import RunDirectory
from infra.stores.chunk_index import MemoryStore
from infra.workers.policy import PolicyWorker
from infra.workers.rollout import RolloutWorker
from infra.workers.scoring import ReferenceWorker
from rl_core.columns.jagged import flat_values
from rl_core.planning import plan_forward, plan_step
from rl_core.planning.plan import rank_rows
from rl_core.views import decode_ints, new_batch, select, with_column
from schemas.batch import BatchHandle, ChunkKey
from schemas.config.loss import ClipCovLoss, ClippedLoss, KlCovLoss, LossConfig, TruncatedCorrection
from schemas.config.model import LoraConfig
from schemas.config.store import TieredStore
from schemas.errors import NonFiniteError, VersionError
from schemas.metrics import values
from schemas.plan import ForwardPlan, StepPlan
from schemas.step import RunHandle
from tasks.put import prompt_rows
from tests.support.configs import run_config
from tests.support.tiny import make_tiny_data, make_tiny_model


@pytest.fixture
def run(tmp_path: Path) -> RunHandle:
    make_tiny_model(tmp_path / "model")
    make_tiny_data(tmp_path / "train.parquet", 8)
    config = run_config(
        tmp_path,
        rollout={"num_prompts": 4, "samples_per_prompt": 2, "max_response_tokens": 6},
        kl={"coef": 0.1},
        optim={"lr": 1e-2, "updates_per_step": 2},
    )
    directory = tmp_path / "runs" / "run-1"
    directory.mkdir(parents=True)
    return RunHandle(run_id="run-1", identity="run-1", directory=str(directory), config=config, store_incarnation="g")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore("run-1", capacity_bytes=2**20)


def started(run: RunHandle, store: MemoryStore) -> PolicyWorker:
    worker = PolicyWorker(run, store=store)
    worker.start()
    return worker


def make_step(
    run: RunHandle, store: MemoryStore, policy: PolicyWorker, token_budget: int = 64, poison: bool = False
) -> tuple[BatchHandle, StepPlan]:
    """Roll out, score and plan step 0; advantages alternate in sign."""
    store.open(0)
    rollout = RolloutWorker(run, store=store)
    rollout.start()
    groups = tuple(range(run.config.rollout.num_prompts))
    shard = rollout.generate(0, 0, 0, groups)
    stored = rollout.put(0, 0, 0, groups, (), 0)
    lengths = shard.prompt_lengths, shard.response_lengths
    batch = new_batch(run.run_id, 0, 0, [stored.chunk], stored.dtypes, *lengths, prompt_rows([stored]))
    reference = ReferenceWorker(run, store=store)
    reference.start()
    plan = forward_plan(batch)
    for put in (policy.score(batch, plan, 0).put, reference.score(batch, plan).put):
        batch = with_column(batch, put.dtypes, [put.chunk], range(batch.num_rows))
    advantages = np.tile(np.array([1, -1], dtype=np.float32), batch.num_rows // 2)
    if poison:
        advantages[3] = np.nan
    key = ChunkKey(run_id=run.run_id, step=0, stage="advantage")
    chunk = store.put(key, pa.record_batch({"advantages": pa.array(advantages)}))
    batch = with_column(batch, {"advantages": "float"}, [chunk], range(batch.num_rows))
    plan = plan_step(
        np.array(shard.prompt_lengths),
        np.array(shard.response_lengths),
        np.array(shard.loss_tokens),
        num_updates=2,
        num_ranks=1,
        token_budget=token_budget,
        seed=0,
    )
    return batch, plan


def forward_plan(batch: BatchHandle) -> ForwardPlan:
    lengths = decode_ints(batch.prompt_lengths), decode_ints(batch.response_lengths)
    return plan_forward(*lengths, num_ranks=1, token_budget=64)


def parameters(worker: PolicyWorker, version: int) -> dict[str, torch.Tensor]:
    with worker.weights(version) as weights:
        return {name: tensor.clone() for name, tensor in weights.items()}


def test_before_an_update_policy_reference_and_sampler_agree(run: RunHandle, store: MemoryStore) -> None:
    batch, _ = make_step(run, store, started(run, store))
    columns = store.read(batch, ["behavior_logprobs", "reference_logprobs", "sampler_logprobs"])
    behavior, reference, sampler = map(flat_values, columns.columns)
    assert np.array_equal(behavior, reference)
    assert np.abs(behavior - sampler).max() < 1e-5


@pytest.mark.parametrize(("keep_steps", "kept"), [("all", [3, 5, 6]), (1, [5, 6])])
def test_a_fork_that_keeps_all_steps_keeps_the_checkpoint_that_it_began_with(
    run: RunHandle, store: MemoryStore, keep_steps: Literal["all"] | int, kept: list[int]
) -> None:
    run = run.replace(config=run.config.replace(store=TieredStore(keep_steps=keep_steps)))
    directory = RunDirectory.of(run)
    save_fork(directory, Fork(parent="runs/parent", run_id="parent", step=3, changes={}))
    worker, checkpoints = started(run, store), open_checkpoints(directory, run.config.checkpoint)
    tensors = policy_tensors(worker._module.model, worker._trainer.optimizer)
    for version in (3, 4, 5, 6):
        checkpoints.save(version, tensors, num_updates=version, report=None).wait()
    worker.restore()
    assert worker.retain([]) == 6
    assert checkpoints.complete_versions() == kept


def test_an_update_is_applied_once_and_reported_again(run: RunHandle, store: MemoryStore) -> None:
    worker = started(run, store)
    before = parameters(worker, 0)
    batch, plan = make_step(run, store, worker)
    report = worker.update(batch, plan, 0)
    after = parameters(worker, 1)
    assert report.policy.version == 1
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert worker.update(batch, plan, 0) == report
    again = parameters(worker, 1)
    assert all(torch.equal(after[name], again[name]) for name in after)


def test_a_plan_keeps_the_schedule_of_a_run_that_has_become_longer(run: RunHandle, store: MemoryStore) -> None:
    def learning_rate(num_steps: int, planned: int | None) -> float:
        optim = run.config.optim.replace(schedule="linear", lr=1.0)
        config = run.config.replace(steps=num_steps, optim=optim)
        worker = started(run.replace(config=config), store)
        return float(values(worker.update(batch, plan.replace(num_steps=planned), 0).metrics)["learning_rate"])

    batch, plan = make_step(run, store, started(run, store))
    assert plan.replace(num_steps=4).digest == plan.digest
    short = learning_rate(4, planned=None)
    assert short == pytest.approx(1 - 1 / 16)  # two updates: of 1, and of the rest before the second of eight
    assert learning_rate(8, planned=4) == learning_rate(4, planned=4) == short < learning_rate(8, planned=8)


def test_samples_that_share_their_prompt_are_scored_and_trained_on_as_those_that_do_not(
    run: RunHandle, store: MemoryStore
) -> None:
    worker = started(run, store)
    batch, _ = make_step(run, store, worker)
    prompts, responses = decode_ints(batch.prompt_lengths), decode_ints(batch.response_lengths)
    options, prefixes = {"num_ranks": 1, "token_budget": 64}, (np.arange(8) // 2, prompts)
    forward = plan_forward(prompts, responses, prefixes=prefixes, **options)
    assert forward.num_tokens == prompts[::2].sum() + responses.sum()
    put = worker.score(batch, forward, 0, "shared").put
    rows = batch.replace(groups=batch.groups[:2])  # as they were sampled
    scored = with_column(rows, put.dtypes, [put.chunk], rank_rows([forward], 0))
    shared, apart = (store.read(each, ["behavior_logprobs"])["behavior_logprobs"] for each in (scored, batch))
    assert np.abs(flat_values(shared) - flat_values(apart)).max() < 1e-6
    weights, reports = [], []
    for shared_by in (prefixes, None):
        fresh = started(run, store)
        groups = {"groups": prefixes[0], "prefixes": shared_by}
        plan = plan_step(prompts, responses, responses, num_updates=2, seed=0, **options, **groups)
        reports.append(values(fresh.update(batch, plan, 0).metrics))
        weights.append(parameters(fresh, 1))
    assert reports[0] == pytest.approx(reports[1], rel=1e-4, abs=1e-6)
    # AdamW moves a weight of a tiny gradient by its sign, so that rounding may show in single ones.
    distances = torch.cat([(weights[0][name] - weights[1][name]).abs().flatten() for name in weights[0]])
    assert float(distances.mean()) < 1e-6


def test_a_rank_that_is_about_to_join_others_may_open_all_files_that_its_node_allows(
    run: RunHandle, store: MemoryStore
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        PolicyWorker(run, store=store).prepare()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_another_version_is_rejected(run: RunHandle, store: MemoryStore) -> None:
    worker = started(run, store)
    batch, plan = make_step(run, store, worker)
    rows = forward_plan(batch)
    for call in (
        lambda: worker.update(batch, plan, 3),
        lambda: parameters(worker, 1),
        lambda: worker.score(batch, rows, 2),
        lambda: worker.save(4),
    ):
        with pytest.raises(VersionError, match="holds version 0"):
            call()


LOSSES = (ClippedLoss(), ClipCovLoss(share=0.3, cov_low=-9, cov_high=9), KlCovLoss(share=0.3))
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.kind)


@every_loss
def test_a_step_that_is_scored_and_trained_on_again_has_the_same_bits(run: RunHandle, loss: LossConfig) -> None:
    run = run.replace(config=run.config.replace(loss=loss))
    steps = []
    for _ in range(2):
        store = MemoryStore("run-1", capacity_bytes=2**20)
        worker = started(run, store)
        steps.append((values(worker.update(*make_step(run, store, worker), 0).metrics), parameters(worker, 1)))
    (first, weights), (second, again) = steps
    assert first == second
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@every_loss
def test_a_restart_from_a_checkpoint_continues_bit_for_bit(
    run: RunHandle, store: MemoryStore, loss: LossConfig
) -> None:
    run = run.replace(config=run.config.replace(loss=loss))
    worker = started(run, store)
    batch, plan = make_step(run, store, worker)
    report = worker.update(batch, plan, 0)
    worker.save(1)
    worker.finish_saving()
    fresh = started(run, store)
    assert fresh.update(batch, plan, 0) == report  # recorded in the manifest
    assert ("clip_fraction/cov" in report.metrics) == (loss.kind != "clipped")
    weights = [parameters(each, 1) for each in (worker, fresh)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    # The next update also needs the optimizer's state and count.
    for each in (worker, fresh):
        each.update(batch, plan, 1)
    weights = [parameters(each, 2) for each in (worker, fresh)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("schedule", [{"warmup_updates": 7}, {"schedule": "cosine"}])
def test_a_restart_from_a_checkpoint_goes_on_with_the_learning_rates_schedule(
    run: RunHandle, store: MemoryStore, schedule: dict[str, object]
) -> None:
    config = run.config.replace(steps=4, optim=run.config.optim.replace(**schedule))
    scheduled = run.replace(config=config)
    worker = started(scheduled, store)
    batch, plan = make_step(scheduled, store, worker)
    begun = worker.update(batch, plan, 0)
    worker.save(1)
    worker.finish_saving()
    fresh = started(scheduled, store)
    expected, found = (each.update(batch.replace(step=1), plan, 1) for each in (worker, fresh))
    rates = [values(report.metrics)["learning_rate"] for report in (begun, expected, found)]
    assert rates[0] != rates[1] == rates[2]
    weights = [parameters(each, 2) for each in (worker, fresh)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.fixture
def half(run: RunHandle) -> Iterator[RunHandle]:
    """The run in bfloat16, whose workers are process groups of their own, on CUDA by default."""
    yield run.replace(config=run.config.replace(model=run.config.model.replace(compute_dtype="bfloat16")))
    dist.destroy_process_group()


def test_in_bfloat16_policy_and_reference_agree_and_a_restart_continues_bit_for_bit(
    half: RunHandle, store: MemoryStore
) -> None:
    worker = started(half, store)
    batch, plan = make_step(half, store, worker)
    behavior, reference = map(flat_values, store.read(batch, ["behavior_logprobs", "reference_logprobs"]).columns)
    assert np.array_equal(behavior, reference)
    worker.update(batch, plan, 0)
    worker.save(1)
    worker.finish_saving()
    fresh = started(half, store)
    for each in (worker, fresh):
        each.update(batch, plan, 1)
    weights = [{name: whole(tensor) for name, tensor in parameters(each, 2).items()} for each in (worker, fresh)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert {tensor.dtype for tensor in weights[0].values()} == {torch.float32}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4)])
def test_the_previous_version_is_available_if_it_may_sample(
    run: RunHandle, store: MemoryStore, lora: LoraConfig | None
) -> None:
    config = run.config
    stale = config.replace(
        model=config.model.replace(lora=lora),
        correction=TruncatedCorrection(),
        runtime=config.runtime.replace(max_staleness=1),
    )
    run = run.replace(config=stale)
    worker = started(run, store)
    before = parameters(worker, 0)
    batch, plan = make_step(run, store, worker)
    worker.update(batch, plan, 0)
    after = parameters(worker, 1)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    worker.save(1)
    worker.finish_saving()
    fresh = started(run, store)
    for each in (worker, fresh):
        for version, expected in ((0, before), (1, after)):
            found = parameters(each, version)
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        with pytest.raises(VersionError):
            parameters(each, 2)
    worker.update(batch, plan, 1)
    with pytest.raises(VersionError, match="holds version 2"):
        parameters(worker, 0)


def test_the_token_budget_does_not_change_the_update(run: RunHandle, store: MemoryStore) -> None:
    results = []
    for budget in (16, 4096):
        worker = started(run, store)
        batch, plan = make_step(run, store, worker, token_budget=budget)
        results.append((worker.update(batch, plan, 0), parameters(worker, 1), plan))
    (small, small_weights, small_plan), (large, large_weights, large_plan) = results
    assert len(small_plan.updates[0].ranks[0]) > len(large_plan.updates[0].ranks[0]) == 1
    for name, weight in small_weights.items():
        torch.testing.assert_close(weight, large_weights[name], rtol=1e-4, atol=1e-6)
    for name in ("loss", "kl", "ratio", "grad_norm"):
        assert small.metrics[name].value == pytest.approx(large.metrics[name].value, rel=1e-4, abs=1e-6)


def test_a_non_finite_loss_raises_before_the_optimizer_steps(run: RunHandle, store: MemoryStore) -> None:
    worker = started(run, store)
    before = parameters(worker, 0)
    batch, plan = make_step(run, store, worker, poison=True)
    with pytest.raises(NonFiniteError, match=r"loss of update \d is not finite: rows \[3\] .*whose advantages are"):
        worker.update(batch, plan, 0)
    with pytest.raises(VersionError, match="holds no complete version"):
        parameters(worker, 0)
    assert worker.start().version == 0
    after = parameters(worker, 0)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_gradient_that_is_infinite_once_is_not_applied(run: RunHandle, store: MemoryStore) -> None:
    """No micro-batch's own gradient is, when each is computed again, so that all rows are named."""
    worker = started(run, store)
    before = parameters(worker, 0)
    batch, plan = make_step(run, store, worker)
    weight = next(iter(worker._trainer.named_parameters().values()))
    scales = iter([torch.inf])
    weight.register_hook(lambda gradient: gradient * next(scales, 1.0))
    rows = sorted(row for micro in plan.updates[0].ranks[0] for row in micro.rows)
    with pytest.raises(NonFiniteError, match=rf"gradient of update 0 is not finite: rows {re.escape(str(rows))} of"):
        worker.update(batch, plan, 0)
    assert worker.start().version == 0
    after = parameters(worker, 0)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_scoring_follows_a_view_of_the_batch(run: RunHandle, store: MemoryStore) -> None:
    worker = started(run, store)
    batch, _ = make_step(run, store, worker)
    rows = [5, 1, 6]
    store.open(1)
    part = select(batch, rows).replace(step=1, groups=select(batch, rows).groups[:2])
    put = worker.score(part, forward_plan(part), 0).put
    scored = with_column(part, put.dtypes, [put.chunk], range(3))
    expected = store.read(select(batch, rows), ["behavior_logprobs"])["behavior_logprobs"]
    actual = store.read(scored, ["behavior_logprobs"])["behavior_logprobs"]
    np.testing.assert_allclose(flat_values(actual), flat_values(expected), atol=1e-6)


def test_with_lora_the_reference_is_the_policy_without_its_adapter(run: RunHandle, store: MemoryStore) -> None:
    model = run.config.model.replace(lora=LoraConfig(rank=2, alpha=4))
    adapted = run.replace(config=run.config.replace(model=model))
    assert not adapted.config.needs_reference_worker
    worker = started(adapted, store)
    batch, plan = make_step(adapted, store, worker)
    base = parameters(worker, 0)
    report = worker.update(batch, plan, 0)
    assert report.metrics["grad_norm"].value > 0
    merged = parameters(worker, 1)
    assert base.keys() == merged.keys()
    assert any(not torch.equal(base[name], merged[name]) for name in base)

    store.clear(0)
    store.open(0)
    again, _ = make_step(run, store, started(run, store))  # the same rows, and the base model's log-probs of them
    bare = again.replace(groups=tuple(group for group in again.groups if "reference_logprobs" not in group.dtypes))
    store.delete([chunk for chunk in again.chunks if "/reference/" in chunk.key])
    put = worker.score_reference(bare, forward_plan(bare)).put
    scored = with_column(bare, put.dtypes, [put.chunk], range(bare.num_rows))
    columns = store.read(scored, ["behavior_logprobs", "reference_logprobs"])
    assert columns["behavior_logprobs"].equals(columns["reference_logprobs"])

    worker.save(1)
    worker.finish_saving()
    fresh = started(adapted, store)
    assert all(torch.equal(merged[name], weight) for name, weight in parameters(fresh, 1).items())


def test_the_kl_in_the_reward_is_reported_by_row(run: RunHandle, store: MemoryStore) -> None:
    config = run.config.replace(kl={"coef": 0.1, "in_reward": True, "estimator": "k1"})
    worker = started(run.replace(config=config), store)
    batch, _ = make_step(run, store, worker)
    bare = batch.replace(groups=tuple(group for group in batch.groups if "reference_logprobs" not in group.dtypes))
    store.delete([chunk for chunk in batch.chunks if "/reference/" in chunk.key])
    reference = ReferenceWorker(run.replace(config=config), store=store)
    reference.start()
    reference._module.model.get_output_embeddings().weight.mul_(1.1)  # otherwise it is the policy
    result = reference.score(bare, forward_plan(bare))
    scored = with_column(bare, result.put.dtypes, [result.put.chunk], range(bare.num_rows))
    columns = store.read(scored, ["behavior_logprobs", "reference_logprobs"])
    policy, base = (column.to_pylist() for column in columns.columns)
    expected = [sum(p - b for p, b in zip(*pair, strict=True)) for pair in zip(policy, base, strict=True)]
    np.testing.assert_allclose(result.row_kl, expected, rtol=1e-5)
    assert max(map(abs, expected)) > 1e-3
