"""Two ranks with 8-bit moments: `python -m tests.support.eight_bit_ranks FOLDER` trains, saves and resumes them.

FOLDER/by-two and FOLDER/by-one get checkpoints of two updates by two ranks and by one, and `after.safetensors` the
weights and moments of two further updates, by two ranks, from each.
"""

import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # otherwise the optimizer imports it, in every process
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from infra.checkpoints.state import policy_tensors, restore_policy
from infra.checkpoints.store import CheckpointStore
from rl_core.training.optimizer import make_optimizer
from rl_core.training.sharding import local_tensor
from schemas.config.optim import OptimConfig
from tests.support.checkpoint_processes import NUM_RANKS, group, run_forked, whole

OPTIM = OptimConfig(lr=0.01, weight_decay=0.1, implementation="8bit")


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a layer whose rows the ranks don't divide, and whose bias has float32 moments."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(512, 5))
    return model, make_optimizer(model, OPTIM)


def sharded_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = make_model()
    fully_shard(model)
    return model, make_optimizer(model, OPTIM)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Update with a gradient that is the same for every number of ranks."""
    plain, _ = make_model()
    generator = torch.Generator().manual_seed(seed)
    for parameter, like in zip(model.parameters(), plain.parameters(), strict=True):
        gradient, rows = torch.randn(like.shape, generator=generator), -(-len(like) // NUM_RANKS)
        parameter.grad = torch.zeros_like(parameter)
        mine = gradient if len(local_tensor(parameter)) == len(like) else gradient.split(rows)[dist.get_rank()]
        local_tensor(parameter.grad).copy_(mine)
    optimizer.step()
    optimizer.zero_grad()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    for seed in (1, 2):
        step(model, optimizer, seed)
    tensors, ranks = policy_tensors(model, optimizer), group() if dist.is_initialized() else None
    CheckpointStore(str(folder)).save(1, tensors, num_updates=2, report=None, process_group=ranks).wait()


def be_rank(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS)
    save(*sharded_model(), folder / "by-two")
    for source in ("by-two", "by-one"):
        model, optimizer = sharded_model()
        restore_policy(CheckpointStore(str(folder / source)), 1, model, optimizer)
        for seed in (3, 4):
            step(model, optimizer, seed)
        after = {name: whole(value) for name, value in policy_tensors(model, optimizer).items()}
        if rank == 0:
            save_file(after, folder / source / "after.safetensors")


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    run_forked([lambda: save(*make_model(), Path(sys.argv[1]) / "by-one")])
    run_forked([partial(be_rank, Path(sys.argv[1]), rank) for rank in range(NUM_RANKS)])
