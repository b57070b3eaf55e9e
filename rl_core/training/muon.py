"""Muon: momentum whose matrices are orthogonalized (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982).

torch's own Muon iterates in bfloat16, which puts an update off by some percent, and differently for gradients that
differ by rounding, as those of another number of ranks do; here it is float32. There, each rank orthogonalizes every
matrix; here a matrix is gathered by one rank, and R ranks orthogonalize R matrices at a time.
"""

import math
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rl_core.training.sharding import layer_modules, local_tensor
from schemas.errors import ModelError

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: it takes singular values from (0, 1] to about 0.7 to 1.2
_ITERATIONS = 5
_EPSILON = 1e-7
MOMENTUM = "momentum_buffer"
_OF_VECTORS = ("bias", "A_log")  # two-dimensional too: the biases of experts, and the decays of Mamba's states


def matrices_of(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the trained matrices of the decoder layers, also stacked ones of experts, large ones first.

    Embeddings, the LM head, vectors, also stacked ones, and convolutions are not among them: AdamW trains these (Jordan
    et al.). A weight of several layers, or of a layer within another one, is there once.

    Raises:
        ModelError: There is none.
    """
    weights = {
        id(weight): weight
        for layer in layer_modules(model)
        for name, weight in layer.named_parameters()
        if weight.requires_grad and not name.endswith(_OF_VECTORS)
    }
    if not (matrices := [weight for weight in weights.values() if is_matrix(weight)]):
        raise ModelError(f'{type(model).__name__} has no matrices in layers for Muon; set optim.kind = "adamw"')
    return sorted(matrices, key=Tensor.numel, reverse=True)


def is_matrix(weight: Tensor) -> bool:
    """Return whether a decoder layer's weight is a matrix, [m, n], or a stack of them, [E, m, n]."""
    return weight.ndim in (2, 3) and min(weight.shape[-2:]) > 1


@torch.no_grad()
def muon_step(weights: Iterable[nn.Parameter], state: MutableMapping[Tensor, Any], group: dict[str, Any]) -> None:
    """Update the weights that have a gradient; of sharded ones, this is a collective.

    With learning rate a, decay w, momentum b and gradient G: M = b M + (1 - b) G, U = orthogonalize(b M + (1 - b) G),
    W = (1 - a w) W - 0.2 a sqrt(max(m, n)) U. The factor gives U the root mean square of AdamW's updates, so that one
    learning rate fits both (Liu et al., equation 4).

    Args:
        weights: Matrices as of `matrices_of`, in the same order on all ranks.
        state: The optimizer's, which holds M.
        group: `lr`, `weight_decay` and `momentum`.
    """
    live = [weight for weight in weights if weight.grad is not None]
    for weight, update in _orthogonalized(live, state, group["momentum"]):
        scale = 0.2 * math.sqrt(max(weight.shape[-2:]))
        local_tensor(weight).mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return U V^T of [..., m, n] = U S V^T, approximately: by 5 Newton-Schulz iterations, in the matrix's dtype."""
    a, b, c = _COEFFICIENTS
    wide = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPSILON)  # so that no singular value exceeds 1
    for _ in range(_ITERATIONS):
        gram = wide @ wide.mT
        polynomial = (gram @ gram).mul_(c).add_(gram, alpha=b)
        wide = torch.add(polynomial @ wide, wide, alpha=a)
    return wide.mT if matrix.shape[-2] > matrix.shape[-1] else wide


def _orthogonalized(
    weights: Sequence[nn.Parameter], state: MutableMapping[Tensor, Any], momentum: float
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each weight and this rank's shard of its orthogonalized update."""
    together = [weight for weight in weights if weight.ndim == 2 and _ranks(weight) is not None]
    apart = {id(weight) for weight in weights} - {id(weight) for weight in together}
    for weight in weights:
        if id(weight) in apart:  # this rank has whole matrices
            yield weight, orthogonalize(_direction(weight, state, momentum))
    if not together:
        return
    ranks = _ranks(together[0])
    num_ranks = dist.get_world_size(ranks)
    for first in range(0, len(together), num_ranks):
        part = together[first : first + num_ranks]
        shards = [_direction(weight, state, momentum) for weight in part]
        yield from zip(part, _exchange(shards, [weight.shape for weight in part], ranks), strict=True)


def _direction(weight: nn.Parameter, state: MutableMapping[Tensor, Any], momentum: float) -> Tensor:
    """Move this rank's momentum towards the gradient, and return Nesterov's: what is to be orthogonalized."""
    if MOMENTUM not in state[weight]:
        state[weight][MOMENTUM] = torch.zeros_like(weight, requires_grad=False)
    assert weight.grad is not None
    gradient, average = local_tensor(weight.grad), local_tensor(state[weight][MOMENTUM])
    average.lerp_(gradient, 1 - momentum)
    return gradient.lerp(average, momentum)


def _exchange(
    shards: Sequence[Tensor], shapes: Sequence[torch.Size], ranks: dist.ProcessGroup | None
) -> Sequence[Tensor]:
    """Gather matrix r, [m_r, n_r], on rank r, have each rank orthogonalize its own, and scatter them again.

    `shards` are at most R of this rank, [m_r', n_r]; `shapes` are those of the matrices.
    """
    rank, num_ranks = dist.get_rank(ranks), dist.get_world_size(ranks)
    own = shapes[rank] if rank < len(shapes) else torch.Size((0, 1))
    sent = [shard.numel() for shard in shards] + [0] * (num_ranks - len(shards))
    received = [rows * own[1] for rows in _rows_by_rank(own[0], num_ranks)]
    whole, flat = shards[0].new_empty(own.numel()), torch.cat([shard.flatten() for shard in shards])
    dist.all_to_all_single(whole, flat, received, sent, group=ranks)
    if rank < len(shapes):
        whole = orthogonalize(whole.view(own)).flatten()
    dist.all_to_all_single(flat, whole, sent, received, group=ranks)
    parts = torch.split(flat, sent[: len(shards)])
    return [part.view_as(shard) for part, shard in zip(parts, shards, strict=True)]


def _rows_by_rank(num_rows: int, num_ranks: int) -> list[int]:
    """Return the rows that each rank holds of a matrix, as FSDP shards it: all as many, but for the last ones."""
    each = -(-num_rows // num_ranks)
    return [max(0, min(each, num_rows - rank * each)) for rank in range(num_ranks)]


def _ranks(weight: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that hold shards of a weight; None if this one holds all of it."""
    if not isinstance(weight, DTensor):
        return None
    [dim] = [number for number, placement in enumerate(weight.placements) if placement.is_shard()]
    return weight.device_mesh.get_group(dim) if weight.device_mesh.size(dim) > 1 else None
