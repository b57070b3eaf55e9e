"""AdamW over the trainable parameters, and gradient clipping by the global norm over all ranks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from rl_core.training.eight_bit import EightBitAdamW
from rl_core.training.sharding import full_tensor, local_tensor
from schemas.config.optim import OptimConfig

_MOMENTS = {"exp_avg", "exp_avg_sq"}
_PART_BYTES = 2**28


def make_optimizer(module: nn.Module, config: OptimConfig) -> AdamW:
    """Create AdamW with the config's constants; on CUDA, by default, the fused kernel.

    Raises:
        ConfigError: The moments are to be kept in 8 bits, but bitsandbytes is not installed.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    kind = EightBitAdamW if config.implementation == "8bit" else HostAdamW if config.offload else AdamW
    return kind(
        parameters,
        lr=config.lr,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        **_kernels(config, on_cuda=all(parameter.is_cuda for parameter in parameters)),
    )


def _kernels(config: OptimConfig, *, on_cuda: bool) -> dict[str, bool]:
    """Return torch's options of the implementation; for the loop, both others are switched off."""
    if config.implementation in ("auto", "8bit"):  # in 8 bits, for the weights whose moments are not
        return {"fused": True} if on_cuda else {}
    return {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}


class HostAdamW(AdamW):
    """AdamW that keeps its moments in host memory; a step moves those of some parameters at a time to their device."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        [group] = self.param_groups
        parameters = group["params"]
        try:
            for part in _parts(parameters):
                group["params"] = part
                self._move(part, None)
                super().step(closure)
                self._move(part, torch.device("cpu"))
        finally:
            group["params"] = parameters

    def _move(self, parameters: Sequence[nn.Parameter], device: torch.device | None) -> None:
        """Move moments to a device; None: to that of their parameter."""
        for parameter in parameters:
            state = self.state.get(parameter, {})
            for name in _MOMENTS & state.keys():
                state[name] = state[name].to(device or parameter.device)


def moments_of(state: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the moments of a parameter's optimizer state: all but its number of steps."""
    return (value for name, value in state.items() if name in _MOMENTS)


def _parts(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield consecutive parameters, each time of `_PART_BYTES` on this rank or a little more."""
    part: list[nn.Parameter] = []
    for parameter in parameters:
        part.append(parameter)
        if sum(local_tensor(each).nbytes for each in part) >= _PART_BYTES:
            yield part
            part = []
    if part:
        yield part


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Clip the gradients' global norm, over all ranks, to `max_norm`; return the norm before clipping."""
    norm: Tensor = nn.utils.clip_grad_norm_(parameters, max_norm)
    return full_tensor(norm).item()
