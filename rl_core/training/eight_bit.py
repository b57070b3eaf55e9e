"""AdamW with 8-bit moments (Dettmers et al. 2021, arXiv:2110.02861), by bitsandbytes' kernels (extra `bitsandbytes`).

A weight [N, ...] has K numbers in each of its N rows. B numbers are a block, with a scale of its own.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import zeros as sharded_zeros
from torch.optim import AdamW

from rl_core.training.sharding import local_tensor
from schemas.errors import ConfigError

BLOCK = 256  # B, a constant of bitsandbytes' kernels


def has_eight_bit_moments(weight: Tensor) -> bool:
    """Return whether a weight's moments are kept in 8 bits: it has rows, each of whole blocks.

    Weights are sharded by rows, so that no shard then cuts a block, and the moments are the same for every number of
    ranks. The moments of other weights stay float32.
    """
    return weight.ndim > 1 and math.prod(weight.shape[1:]) % BLOCK == 0


def moment_bytes(weight: Tensor, num_rows: int) -> int:
    """Return the bytes of both moments of `num_rows` rows of a weight."""
    numbers = num_rows * math.prod(weight.shape[1:])
    return 2 * (numbers + numbers // BLOCK * 4) if has_eight_bit_moments(weight) else 2 * numbers * 4


def require_bitsandbytes() -> None:
    """Check that bitsandbytes, which has the kernels, is installed.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise ConfigError(
            "optim.implementation = '8bit' needs bitsandbytes, which is not installed: pip install "
            "'sluice-rl[bitsandbytes]'"
        ) from None


class EightBitAdamW(AdamW):
    """AdamW that keeps moments in 8 bits wherever `has_eight_bit_moments`.

    The state of such a weight is `exp_avg` and `exp_avg_sq`, uint8 [N, ...], codes of bitsandbytes' dynamic maps, and
    `exp_avg_scale` and `exp_avg_sq_scale`, float32 [N, K / B], the largest number of each block; all are sharded as
    the weight is.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        require_bitsandbytes()
        from bitsandbytes.functional import create_dynamic_map

        super().__init__(params, **options)
        self._maps = create_dynamic_map(signed=True), create_dynamic_map(signed=False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        [group] = self.param_groups
        parameters = group["params"]
        try:
            group["params"] = [each for each in parameters if not has_eight_bit_moments(each)]
            super().step(closure)
        finally:
            group["params"] = parameters
        for parameter in filter(has_eight_bit_moments, parameters):
            if parameter.grad is not None:
                self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        from bitsandbytes.functional import optimizer_update_8bit_blockwise

        state = self.state[parameter]
        if not state:
            state.update(_new_state(parameter))
        state["step"] += 1
        weight = local_tensor(parameter.detach())
        if not weight.numel():
            return
        self._maps = tuple(each.to(weight.device) for each in self._maps)
        assert parameter.grad is not None
        optimizer_update_8bit_blockwise(
            "adam",
            local_tensor(parameter.grad).contiguous(),
            weight,
            local_tensor(state["exp_avg"]),
            local_tensor(state["exp_avg_sq"]),
            *group["betas"],
            beta3=0.0,
            alpha=0.0,
            eps=group["eps"],
            step=int(state["step"].item()),
            lr=group["lr"],
            qmap1=self._maps[0],
            qmap2=self._maps[1],
            absmax1=local_tensor(state["exp_avg_scale"]).view(-1),
            absmax2=local_tensor(state["exp_avg_sq_scale"]).view(-1),
            weight_decay=group["weight_decay"],
        )


def _new_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return moments of zero, sharded as the parameter."""
    moments = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("exp_avg", "exp_avg_sq")}
    shape = parameter.shape[0], math.prod(parameter.shape[1:]) // BLOCK
    scales = {f"{name}_scale": _zeros(shape, parameter) for name in moments}
    return {"step": torch.zeros(()), **moments, **scales}


def _zeros(shape: tuple[int, int], like: Tensor) -> Tensor:
    if isinstance(like, DTensor):
        return sharded_zeros(*shape, device_mesh=like.device_mesh, placements=like.placements)
    return torch.zeros(shape, device=like.device)
