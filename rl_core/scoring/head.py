"""The scoring head: log-probs, entropy and the most likely tokens at selected positions, without keeping logits.

R scored positions, H hidden size, V vocabulary entries, C positions per chunk, K most likely tokens. Only [C, V] logits
exist at once, in the forward and in the backward, which recomputes all but the last; autograd would keep all [R, V].

Precision: the operands of the matmul are in the weight's dtype, the compute dtype; products are
summed, kept and normalized in float32. Logits rounded to bfloat16 would be off by up to 2^-8 of their size, and with
them every ratio of two policies; float32 accumulation costs nothing (cf. arXiv:2506.13585 on heads in float32).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from schemas.errors import ScoringError


@dataclass(frozen=True)
class HeadOptions:
    """Options of the scoring head."""

    temperature: float
    scale: float  # of the linear layer's output (Cohere, Granite)
    softcap: float | None  # logits become softcap * tanh(logits / softcap)
    chunk_tokens: int  # C
    top_k: int  # K of the most likely tokens; 0 for none, or for given ones
    has_entropy: bool
    has_entropy_grad: bool
    num_tokens: int | None = None  # the most likely tokens are sought among the first of these; None: among all


def lm_head(model: PreTrainedModel) -> nn.Linear:
    """Return the model's LM head.

    Raises:
        ScoringError: It isn't a linear layer.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear):
        raise ScoringError(
            f"{type(model).__name__} has a {type(head).__name__} as its LM head; scoring needs an nn.Linear"
        )
    return head


def score_targets(
    states: Tensor,
    head: nn.Linear,
    targets: Tensor,
    options: HeadOptions,
    top_ids: Tensor | None = None,
    sampling_mask: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Score one target per hidden state.

    Args:
        states: [R, H] hidden states that predict the targets.
        head: The LM head.
        targets: [R] int64 token ids.
        options: What to compute.
        top_ids: [R, K] int64 token ids to score in place of the most likely ones; None: these.
        sampling_mask: int64 numbers [R], with sum M, and ids [M] of the tokens that have a probability at each
            position, next to the target; where there is none, all have. None: all, everywhere.

    Returns:
        Log-probs [R] and entropy [R] (empty unless requested) in nats, the K largest log-probs [R, K] in descending
        order or those of `top_ids`, and their token ids [R, K] int64. Floats are float32, or float64 for a float64
        model. All floats have gradients, the entropy only with `has_entropy_grad`.
    """
    scores: tuple[Tensor, Tensor, Tensor, Tensor] = _Score.apply(  # type: ignore[no-untyped-call]
        states, head.weight, head.bias, targets, options, top_ids, *(sampling_mask or (None, None))
    )
    return scores


class _Score(torch.autograd.Function):
    """The head's autograd function: one [V, H] gradient buffer, and logits that are recomputed chunk by chunk.

    The backward begins with the last chunk, whose logits are kept where the forward leaves them, as for an entropy:
    they take no more memory than it has needed, and are not recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: HeadOptions,
        given_ids: Tensor | None,
        mask_counts: Tensor | None,
        mask_ids: Tensor | None,
    ) -> tuple[Tensor, ...]:
        top_ids = targets.new_empty(len(targets), 0) if given_ids is None else given_ids
        projection = _Projection(weight, bias, options)
        chunks = _chunks(options, states, targets, top_ids)
        parts, logits = [], None
        for (chunk, chosen, further), mask in zip(chunks, _masks(options, mask_counts, mask_ids), strict=False):
            del logits  # else they would coexist with those of this chunk
            logits = projection.logits(chunk)
            parts.append(_score_chunk(options, logits, chosen, further, mask))
        logprobs, largest, normalizer, entropy, top_logprobs, top_ids = map(torch.cat, zip(*parts, strict=True))
        per_token = (states, targets, largest, normalizer, entropy, top_ids)
        ctx.save_for_backward(weight, bias, *per_token, mask_counts, mask_ids)
        ctx.options = options
        ctx.kept = logits if options.has_entropy else None
        ctx.mark_non_differentiable(top_ids, *([] if options.has_entropy_grad else [entropy]))
        return logprobs, entropy, top_logprobs, top_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, grad_top: Tensor, _: Tensor) -> tuple[Any, ...]:
        weight, bias, *per_token, mask_counts, mask_ids = ctx.saved_tensors
        options: HeadOptions = ctx.options
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        projection = _Projection(weight, bias, options)
        grad_weight = torch.zeros_like(weight, dtype=projection.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=projection.dtype) if needs_bias else None
        grad_states = []
        chunks = _chunks(options, *per_token, grad_logprobs, grad_entropy, grad_top)
        logits, ctx.kept = ctx.kept, None  # a second backward computes them again
        with_masks = list(zip(chunks, _masks(options, mask_counts, mask_ids), strict=False))
        for (chunk, targets, largest, *rest), mask in reversed(with_masks):
            if logits is None:
                logits = projection.logits(chunk).sub_(largest[:, None])
            slope = projection.slope(logits, largest)
            grad_logits = _grad_chunk(options, logits, targets, *rest, mask=mask).mul_(slope)
            if needs_states:
                grad_states.append(projection.matmul(grad_logits, projection.weight).to(chunk.dtype))
            if grad_weight is not None:
                projection.add_matmul(grad_weight, grad_logits.t(), chunk)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            del slope, grad_logits  # else they would coexist with those of the next chunk
            logits = None
        return (
            torch.cat(grad_states[::-1]) if needs_states else None,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 5,
        )


class _Projection:
    """The linear layer, scale, softcap and temperature, with explicit precisions."""

    def __init__(self, weight: Tensor, bias: Tensor | None, options: HeadOptions) -> None:
        self._operand_dtype, self.dtype = weight.dtype, torch.promote_types(weight.dtype, torch.float32)
        self._options = options
        self.weight = self._operand(weight)
        self._bias = None if bias is None else bias.to(self.dtype)

    def logits(self, states: Tensor) -> Tensor:
        """Compute [C, V] logits, scaled, softcapped and divided by the temperature, from [C, H] states."""
        logits = self.matmul(states, self.weight.t())
        if self._bias is not None:
            logits += self._bias
        if self._options.scale != 1:
            logits *= self._options.scale
        if (softcap := self._options.softcap) is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        return logits if self._options.temperature == 1 else logits.div_(self._options.temperature)

    def slope(self, logits: Tensor, largest: Tensor) -> Tensor | float:
        """Compute the derivative of the logits, given less the largest [C], with respect to the linear layer's output.

        It is [C, V] if softcapped, else one number.
        """
        temperature, softcap = self._options.temperature, self._options.softcap
        factor = self._options.scale / temperature
        if softcap is None:
            return factor
        return (1 - ((logits + largest[:, None]).mul_(temperature / softcap)).square_()).mul_(factor)

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply two operands, accumulating in float32 or better."""
        left, right = self._operand(left), self._operand(right)
        return left @ right if left.dtype == self.dtype else torch.mm(left, right, out_dtype=self.dtype)

    def add_matmul(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add the product of two operands to `total`, in place."""
        left, right = self._operand(left), self._operand(right)
        if left.dtype == self.dtype:
            total.addmm_(left, right)
        else:
            total += torch.mm(left, right, out_dtype=self.dtype)

    def _operand(self, tensor: Tensor) -> Tensor:
        """Round to the operands' dtype; on a CPU, where no kernel accumulates in a wider dtype, widen it again."""
        rounded = tensor.to(self._operand_dtype)
        return rounded if rounded.is_cuda else rounded.to(self.dtype)


_Mask = tuple[Tensor, Tensor] | None


def _masks(options: HeadOptions, counts: Tensor | None, ids: Tensor | None) -> Iterator[_Mask]:
    """Yield the numbers and ids of the tokens that have a probability for each chunk of C; None without end if all."""
    if counts is None or ids is None:
        yield from repeat(None)
        return
    of_chunks = torch.split(counts, _chunk_sizes(options, len(counts)))
    sizes = torch.stack([each.sum() for each in of_chunks]).tolist()
    yield from zip(of_chunks, torch.split(ids, sizes), strict=True)


def _excluded(logits: Tensor, targets: Tensor, mask: tuple[Tensor, Tensor]) -> Tensor:
    """Return which of the tokens have no probability: bool [C, V]."""
    counts, ids = mask
    excluded = (counts > 0)[:, None].repeat(1, logits.shape[-1])
    excluded[torch.arange(len(counts), device=counts.device).repeat_interleave(counts), ids] = False
    return excluded.scatter_(-1, targets[:, None], False)


def _score_chunk(
    options: HeadOptions, logits: Tensor, targets: Tensor, top_ids: Tensor, mask: _Mask
) -> tuple[Tensor, ...]:
    """Compute log-probs [C], and what the backward and the caller need, of [C, V] logits.

    Returns log-probs, the largest logits, the normalizers of the logits less these, and entropy, all [C]; and top
    log-probs and ids [C, K]. With an entropy, `logits` is less the largest afterwards; else it is of no use.
    """
    excluded = None if mask is None else _excluded(logits, targets, mask)
    if excluded is not None:
        logits.masked_fill_(excluded, -torch.inf)
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    if options.top_k:
        top_ids = logits[:, : options.num_tokens].topk(options.top_k).indices
    top = logits.gather(-1, top_ids)
    largest = logits.amax(-1)
    logits.sub_(largest[:, None])
    # One exponential per logit, in place unless the entropy needs the logits too.
    weights = logits.exp() if options.has_entropy else logits.exp_()
    total = weights.sum(-1)
    normalizer, entropy = total.log(), logits.new_empty(len(logits), 0)
    if options.has_entropy:
        if excluded is not None:
            logits.masked_fill_(excluded, 0.0)  # else 0 x -inf
        entropy = normalizer - torch.einsum("cv,cv->c", weights, logits) / total
    of_all = normalizer + largest
    return chosen - of_all, largest, normalizer, entropy, top - of_all[:, None], top_ids


def _grad_chunk(
    options: HeadOptions,
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    top_ids: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    grad_top: Tensor,
    *,
    mask: _Mask,
) -> Tensor:
    """Compute the gradient with respect to [C, V] logits in place, from the logits less the largest.

    With the distribution p and its entropy H: d log p_i / d z_v = [i = v] - p_v and d H / d z_v = -p_v (log p_v + H).
    """
    excluded = None if mask is None else _excluded(logits, targets, mask)
    logprobs = logits.sub_(normalizer[:, None])
    total = (grad_logprobs + grad_top.sum(-1))[:, None]
    if options.has_entropy_grad:
        probs = logprobs.exp()
        grad = logprobs.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(total).mul_(probs).neg_()
    else:
        grad = logprobs.exp_().mul_(-total)
    if excluded is not None:
        grad.masked_fill_(excluded, 0.0)
    grad.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])
    return grad.scatter_add_(-1, top_ids, grad_top)


def _chunks(options: HeadOptions, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Iterate over the chunks of all tensors along their first axis."""
    sizes = _chunk_sizes(options, len(tensors[0]))
    return zip(*(torch.split(tensor, sizes) for tensor in tensors), strict=True)


def _chunk_sizes(options: HeadOptions, num_positions: int) -> list[int]:
    """Return the sizes of the chunks: C each, the first one's what is left; one of none, if there are no positions."""
    count, left = divmod(num_positions, options.chunk_tokens)
    return [left] * (left > 0 or not count) + [options.chunk_tokens] * count
