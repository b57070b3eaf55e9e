"""AdamW and Muon over the trainable parameters, and gradient clipping by the global norm over all ranks.

The learning rate is a pure function of a run's progress, so that resuming needs no scheduler state.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from rl_core.training.muon import MOMENTUM, muon_step
from rl_core.training.sharding import full_tensor
from schemas.config.optim import OptimConfig

_MOMENTS = {"exp_avg", "exp_avg_sq", MOMENTUM}
_PART_BYTES = 2**28


def make_optimizer(module: nn.Module, config: OptimConfig, matrices: Sequence[nn.Parameter] = ()) -> "PolicyOptimizer":
    """Create the config's optimizer; AdamW's kernel is by default, on CUDA, the fused one."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    by_muon = set(map(id, matrices))
    others = [parameter for parameter in parameters if id(parameter) not in by_muon]
    groups: list[dict[str, Any]] = [{"params": others}]
    if matrices:
        groups.append({"params": list(matrices), "momentum": config.momentum})
    return PolicyOptimizer(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        offload=config.offload,
        **_kernels(config, on_cuda=all(parameter.is_cuda for parameter in parameters)),
    )


def _kernels(config: OptimConfig, *, on_cuda: bool) -> dict[str, bool]:
    """Return torch's options of the implementation; for the loop, both others are switched off."""
    if config.implementation == "auto":
        return {"fused": True} if on_cuda else {}
    return {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}


class PolicyOptimizer(AdamW):
    """AdamW, and Muon for a second group of parameters if there is one.

    Args:
        groups: The parameters of AdamW; and those of Muon, with its `momentum`.
        offload: Whether moments stay in host memory; a step moves those of some parameters at a time to their device.
        settings: AdamW's.
    """

    def __init__(self, groups: list[dict[str, Any]], *, offload: bool = False, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._offload = offload

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        groups = self.param_groups
        try:
            for group in groups:
                for part in _parts(group["params"]) if self._offload else [group["params"]]:
                    self._move(part, None)
                    if "momentum" in group:
                        muon_step(part, self.state, group)
                    else:
                        self.param_groups = [group | {"params": part}]
                        super().step(closure)
                    self._move(part, torch.device("cpu"))
        finally:
            self.param_groups = groups

    def _move(self, parameters: Sequence[nn.Parameter], device: torch.device | None) -> None:
        """Move moments to a device, None: to that of their parameter; if they are offloaded."""
        for parameter in parameters if self._offload else ():
            state = self.state.get(parameter, {})
            for name in _MOMENTS & state.keys():
                state[name] = state[name].to(device or parameter.device)


def moments_of(state: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the moments of a parameter's optimizer state: all but its number of steps."""
    return (value for name, value in state.items() if name in _MOMENTS)


def _parts(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield consecutive parameters, each time of `_PART_BYTES` on a rank or a little more."""
    part: list[nn.Parameter] = []
    for parameter in parameters:
        part.append(parameter)
        if sum(map(_shard_bytes, part)) >= _PART_BYTES:
            yield part
            part = []
    if part:
        yield part


def _shard_bytes(parameter: nn.Parameter) -> float:
    """Return the mean size of a rank's shard: equal on all ranks, which step the same matrices together with Muon."""
    if not isinstance(parameter, DTensor):
        return parameter.nbytes
    shards = (number for number, placement in enumerate(parameter.placements) if placement.is_shard())
    return parameter.numel() * parameter.element_size() / math.prod(map(parameter.device_mesh.size, shards))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Clip the gradients' global norm, over all ranks, to `max_norm`; return the norm before clipping."""
    norm: Tensor = nn.utils.clip_grad_norm_(parameters, max_norm)
    return full_tensor(norm).item()


def learning_rate(config: OptimConfig, num_updates: int, step: int, part: int, num_steps: int) -> float:
    """Return the learning rate of update `part` (from 0) of step `step` (from 0) of a run of `num_steps` steps.

    It warms up linearly over the first `warmup_updates` (`num_updates` were before), then is constant, or decays by a
    line or a half cosine to 0 at the end of the run. The decay follows the steps, not the updates: a fork may have
    other `updates_per_step` than the steps that it took over, and a step with few rows has fewer updates than that. If
    the warm-up is as long as the run in the updates of such a fork, past it the rate is that of a decay over all steps.
    """
    if num_updates < config.warmup_updates:
        return config.lr * (num_updates + 1) / (config.warmup_updates + 1)
    if config.schedule == "constant":
        return config.lr
    total, done = num_steps * config.updates_per_step, step * config.updates_per_step + part
    start = config.warmup_updates if config.warmup_updates < total else 0
    progress = min(max((done - start) / (total - start), 0.0), 1.0)
    return config.lr * (1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress)))
