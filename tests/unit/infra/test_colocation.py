"""Workers that take turns in a GPU's memory, here a CPU's: what moves, in counted bytes, and that no bit changes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from infra.engines.base import Sampling, generate_all
from infra.engines.embedded.engine import TransformersEngine
from infra.engines.program.engine import ProgramEngine
from infra.engines.program.process import StartedEngine
from infra.models.load import load_model
from infra.models.lora import add_adapter
from infra.stores.chunk_index import MemoryStore
from infra.workers.policy import PolicyWorker
from infra.workers.reward import RewardWorker
from infra.workers.scoring import ReferenceWorker
from rl_core.rewards import RewardItem
from rl_core.storages import storage_bytes
from schemas.config.model import LoraConfig, ModelConfig
from schemas.config.reward import ModelReward
from schemas.errors import EngineLostError, VersionError
from schemas.step import RunHandle
from tests.support.engine_checks import assert_identical, request
from tests.support.odd_engine import calls_of, open_odd_engine
from tests.support.tiny import make_tiny_reward_model
from tests.support.weight_tensors import load_state
from tests.unit.infra.test_policy_worker import forward_plan, make_step, parameters, run, started, store

__all__ = ["run", "store"]  # fixtures
ALL = ("weights", "optimizer", "gradients")


def whole_bytes(run: RunHandle) -> int:
    """The bytes of the run's model in float32."""
    return sum(4 * weight.numel() for weight in load_model(run.config.model).parameters())


def test_an_engine_drops_its_weights_and_samples_the_same_with_published_ones(run: RunHandle) -> None:
    engine = TransformersEngine(load_model(ModelConfig(path=run.config.model.path)))
    whole, requests, sampling = whole_bytes(run), [request([5, 6, 7], 1, 2), request([9], 3)], Sampling(20)
    before, strides = generate_all(engine, requests, sampling), [w.stride() for w in engine.model.parameters()]
    given = {name: weight.clone() for name, weight in engine.model.named_parameters()}
    slept = engine.sleep(("weights", "cache"))
    assert (slept.freed, slept.moved, slept.kept, slept.resident) == ({"weights": whole}, {}, {}, {"weights": 0})
    assert storage_bytes(engine.model.parameters()) == 0
    assert engine.sleep(("weights", "cache")).freed == {"weights": 0}  # it sleeps already
    with pytest.raises(VersionError, match=r"asleep \(cache and weights released\): wake it and publish"):
        generate_all(engine, requests, sampling)
    assert engine.wake(("weights",)).resident == {"weights": whole}
    assert engine.version is None
    load_state(engine, given, version=3)
    with pytest.raises(VersionError, match=r"asleep \(cache"):
        generate_all(engine, requests, sampling)
    engine.wake(("cache",))
    assert [weight.stride() for weight in engine.model.parameters()] == strides  # of the decode layout
    assert_identical(generate_all(engine, requests, sampling), before)


def test_an_engine_whose_weights_are_awake_but_not_published_is_refused(run: RunHandle) -> None:
    engine = TransformersEngine(load_model(ModelConfig(path=run.config.model.path)))
    engine.sleep(("weights",))
    engine.wake(("weights",))
    with pytest.raises(VersionError, match="has no weights"):
        generate_all(engine, [request([5], 1)], Sampling(2))


@pytest.fixture(params=["whole", "adapter", "sharded in bfloat16"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_policy_that_moves_out_and_in_trains_and_saves_the_same(
    run: RunHandle, store: MemoryStore, kind: str
) -> None:
    changes = {
        "whole": {},
        "adapter": {"lora": LoraConfig(rank=2)},
        "sharded in bfloat16": {"compute_dtype": "bfloat16"},
    }[kind]
    run = run.replace(config=run.config.replace(model=run.config.model.replace(**changes)))
    staying, moving = started(run, store), started(run, store)
    assert moving.sleep(ALL).moved == {"weights": weight_bytes(staying), "optimizer": 0}  # before the first update
    batch, plan = make_step(run, store, staying)
    trained = 4 * sum(weight.numel() for weight in moving._module.parameters() if weight.requires_grad)
    for version in range(2):
        reports = [worker.update(batch, plan, version) for worker in (staying, moving)]  # moves in what it needs
        assert reports[0].metrics == reports[1].metrics
        out = moving.sleep(ALL)
        assert out.moved == {"weights": weight_bytes(staying), "optimizer": 2 * trained}
        assert out.freed == {"gradients": 0}  # each update drops its own
        assert out.resident == {"weights": 0, "optimizer": 0}
    assert moving.wake(("weights",)).resident == {"weights": weight_bytes(staying), "optimizer": 0}
    moving.save(2)
    moving.finish_saving()
    for other in (moving, started(run, store)):  # the second one resumes from the checkpoint
        assert staying.handle().version == other.handle().version == 2
        expected, found = parameters(staying, 2), parameters(other, 2)
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def weight_bytes(worker: PolicyWorker) -> int:
    return storage_bytes(worker._module.parameters())


def test_gradients_are_dropped_and_offloaded_moments_stay(run: RunHandle, store: MemoryStore) -> None:
    run = run.replace(config=run.config.replace(optim=run.config.optim.replace(offload=True)))
    policy = started(run, store)
    for weight in policy._module.parameters():
        weight.grad = torch.ones_like(weight)
    out = policy.sleep(ALL)
    assert out.freed == {"gradients": whole_bytes(run)}
    assert out.moved == {"weights": whole_bytes(run)}  # the optimizer keeps its moments in host memory itself


def test_a_reference_scores_the_same_after_it_was_out(run: RunHandle, store: MemoryStore) -> None:
    batch, _ = make_step(run, store, started(run, store))
    bare = batch.replace(groups=tuple(group for group in batch.groups if "reference_logprobs" not in group.dtypes))
    reference = ReferenceWorker(run, store=store)
    reference.start()
    assert reference.sleep(("weights",)).moved == {"weights": whole_bytes(run)}
    put = reference.score(bare, forward_plan(bare)).put  # the same content, or the store would reject it
    assert put is not None


STARTED = StartedEngine(dtype="bfloat16", itemsize=2, max_model_len=64, processes=[], cache_bytes=32)


def test_an_engine_that_fails_at_wake_up_is_lost(run: RunHandle) -> None:
    # As on a GPU without free memory, which takes CUDA.
    process = open_odd_engine(wake="raise CUDA Error: out of memory at csrc/cumem_allocator.cpp:62")
    engine = ProgramEngine(process, STARTED, load_model(run.config.model), can_sleep=True)
    assert engine.sleep(("weights", "cache")).freed == {"weights": whole_bytes(run) // 2, "cache": 32}
    assert calls_of(process) == [["sleep", {"weights": True, "keep": False}]]
    assert engine.version is None
    with pytest.raises(EngineLostError, match=r"could not wake up weights.*out of memory.*lower rollout.gpu_memory"):
        engine.wake(("weights",))
    with pytest.raises(EngineLostError, match="could not wake up"):  # so that its worker is created again
        engine.check()


def test_an_engine_with_adapters_keeps_its_weights_in_host_memory(run: RunHandle, tmp_path: Path) -> None:
    shapes, lora = load_model(run.config.model), LoraConfig(rank=2, publish="adapters")
    add_adapter(shapes, lora)
    process = open_odd_engine()
    engine = ProgramEngine(process, STARTED, shapes, can_sleep=True, lora=lora, shared_memory=str(tmp_path))
    slept, weights = engine.sleep(("weights", "cache")), sum(2 * weight.numel() for weight in shapes.parameters())
    assert (slept.moved, slept.freed, slept.resident) == ({"weights": weights}, {"cache": 32}, {})
    assert calls_of(process) == [["sleep", {"weights": True, "keep": True}]]
    assert engine.version == 0
    engine.close()


def test_a_reward_model_that_moves_out_scores_the_same(run: RunHandle, tmp_path: Path) -> None:
    folder = make_tiny_reward_model(tmp_path / "liked")
    model = ModelReward(path=str(folder), max_tokens=100)
    worker = RewardWorker(run.replace(config=run.config.replace(reward=model)))
    assert worker.sleep(("weights",)).resident == {}  # it has not started
    worker.start()
    item = RewardItem("2 + 2 =", ["4", "5"], "4", {})
    before = worker.score(item)
    slept = worker.sleep(("weights",))
    assert slept.moved["weights"] > 0
    assert slept.resident == {"weights": 0}
    assert worker.wake(("weights",)).resident == slept.moved
    assert worker.score(item) == before
    worker.sleep(("weights",))
    assert worker.score(item) == before  # a call moves in what it needs
    assert len({outcome.reward for outcome in before.group}) == 2
