"""Processes for the checkpoint tests: ranks that save and load together, and saves that are killed.

`python -m tests.support.checkpoint_processes FOLDER` runs all of them and leaves the results in FOLDER.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # otherwise the optimizer imports it, in every process
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from infra.checkpoints.state import copy_trained, policy_tensors, restore_policy
from infra.checkpoints.store import CheckpointStore
from infra.checkpoints.writing import StagedPlanner
from rl_core.training.sharding import make_mesh
from tests.support.checkpoint_tensors import save_assets

NUM_RANKS, NUM_REPLICAS = 2, 2
POINTS = ("rank-00000-00000.safetensors", "hf/config.json", "manifest.json")  # files before which a save is killed
WEIGHTS = {"model/a": torch.arange(6.0), "model/b": torch.ones(2, 2)}


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with dimensions that the ranks don't divide and a layer with fewer rows than ranks."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        model(torch.linspace(-1, 1, 21).reshape(3, 7) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main(folder: Path) -> None:
    """Run everything in forked processes; a fork requires that there are no threads."""
    run_forked([lambda: save_alone(folder / "by-one")])
    run_forked([lambda rank=rank: be_replica(rank, folder) for rank in range(NUM_RANKS * NUM_REPLICAS)])
    run_forked([lambda rank=rank: be_rank(rank, folder) for rank in range(NUM_RANKS)])
    run_forked([lambda point=point: save_until(folder / f"killed-at-{Path(point).name}", point) for point in POINTS])


def save_alone(folder: Path) -> None:
    model, optimizer = make_model()
    train(model, optimizer)
    tensors = policy_tensors(model, optimizer)
    CheckpointStore(str(folder)).save(1, tensors, num_updates=2, report=None).wait()
    save_file({name: value.detach() for name, value in tensors.items()}, folder / "expected.safetensors")


def be_replica(rank: int, folder: Path) -> None:
    """Save and load as one of two replicas' two shards."""
    join(rank, NUM_RANKS * NUM_REPLICAS, folder / "rendezvous-replicas")
    mesh = make_mesh("cpu", NUM_RANKS * NUM_REPLICAS, NUM_REPLICAS)
    save_again(rank, folder / "again-by-four", mesh)
    shard_and_save(rank, folder / "by-four", mesh)
    load_shards(rank, folder, "by-one", "loaded-by-four", mesh)


def be_rank(rank: int, folder: Path) -> None:
    join(rank, NUM_RANKS, folder / "rendezvous")
    save_again(rank, folder / "again-by-two")
    shard_and_save(rank, folder / "by-two")
    for source in ("by-one", "by-two", "by-four"):
        load_shards(rank, folder, source, "loaded-by-two")
    lose_a_rank(rank, folder)


def join(rank: int, num_ranks: int, rendezvous: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)


def shard_and_save(rank: int, folder: Path, mesh: DeviceMesh | None = None) -> None:
    model, optimizer = sharded_model(mesh)
    train(model, optimizer)
    tensors = policy_tensors(model, optimizer)
    store = CheckpointStore(str(folder))
    pending = store.save(1, tensors, num_updates=2, report=None, write_assets=save_assets, process_group=group())
    expected = {name: whole(value) for name, value in tensors.items()}
    train(model, optimizer)  # while it is being written
    pending.wait()
    if rank == 0:
        save_file(expected, folder / "expected.safetensors")


def save_again(rank: int, folder: Path, mesh: DeviceMesh | None = None) -> None:
    """Save four versions: the third after a restore, the last with the previous weights; note what rank 0 plans."""
    store, (model, optimizer) = CheckpointStore(str(folder)), sharded_model(mesh)
    create, planned = StagedPlanner.create_global_plan, list[int]()

    def counted(planner: StagedPlanner, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        planned.append(sum(len(plan.items) for plan in plans))
        return create(planner, plans)

    StagedPlanner.create_global_plan = counted  # type: ignore[method-assign]
    for version in range(1, 5):
        if version == 3:
            model, optimizer = sharded_model(mesh)
            restore_policy(store, 2, model, optimizer)
        previous = copy_trained(model) if version == 4 else None
        train(model, optimizer)
        tensors = policy_tensors(model, optimizer, previous)
        store.save(version, tensors, num_updates=version, report=None, process_group=group()).wait()
        expected = {name: whole(value) for name, value in tensors.items()}
        if rank == 0:
            save_file(expected, folder / f"expected-{version}.safetensors")
    if rank == 0:
        (folder / "planned.json").write_text(json.dumps(planned))
    StagedPlanner.create_global_plan = create  # type: ignore[method-assign]


def load_shards(rank: int, folder: Path, source: str, name: str, mesh: DeviceMesh | None = None) -> None:
    model, optimizer = sharded_model(mesh)
    restore_policy(CheckpointStore(str(folder / source)), 1, model, optimizer)
    loaded = {name: whole(value) for name, value in policy_tensors(model, optimizer).items()}
    if rank == 0:
        save_file(loaded, folder / source / f"{name}.safetensors")


def lose_a_rank(rank: int, folder: Path) -> None:
    """Kill rank 1 as it writes its part; rank 0 records the error that it gets."""
    model, optimizer = sharded_model()
    if rank == 1:
        kill_at("rank-00001-00000.safetensors")
    store = CheckpointStore(str(folder / "by-two"))
    tensors = policy_tensors(model, optimizer)
    try:
        store.save(2, tensors, num_updates=2, report=None, process_group=group()).wait()
    except RuntimeError as error:
        (folder / "lost.txt").write_text(type(error).__name__)


def save_until(folder: Path, point: str) -> None:
    """Save version 1, and get killed while saving version 2, just before a file appears."""
    store = CheckpointStore(str(folder))
    store.save(1, WEIGHTS, num_updates=1, report=None, write_assets=save_assets).wait()
    kill_at(point)
    changed = {name: value + 1 for name, value in WEIGHTS.items()}
    store.save(2, changed, num_updates=2, report=None, write_assets=save_assets).wait()


def kill_at(point: str) -> None:
    """Make this process kill itself (signal 9) when it is about to rename a file to `point`."""
    replace = os.replace

    def killing_replace(source: str, target: str) -> None:
        if str(target).endswith(point):
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = killing_replace  # type: ignore[assignment]


def sharded_model(mesh: DeviceMesh | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = make_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def group() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo")


def run_forked(functions: list[Callable[[], None]]) -> None:
    """Run each function in a process of its own, all at the same time."""
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of a process with threads may hang"
    children = []
    for function in functions:
        if not (child := os.fork()):
            try:
                function()
                os._exit(0)  # an orderly exit would wait for the other rank
            finally:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
