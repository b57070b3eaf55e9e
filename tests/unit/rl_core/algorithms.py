"""The algorithms under test and a batch of rows, and a plain reference of each update's gradient and loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import get_args

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from schemas.config.kinds import configs_of, kinds_of
from schemas.config.loss import (
    Aggregation,
    CispoLoss,
    ClippedLoss,
    CorrectionConfig,
    CrossEntropyLoss,
    GspoLoss,
    KlConfig,
    LossConfig,
    MaskedCorrection,
    NoCorrection,
    SapoLoss,
    TruncatedCorrection,
)
from tests.support.packed import VOCAB_SIZE, plain_logprobs, tiny_qwen3

TEMPERATURE = 0.8
NORM_TOKENS = 12.0
LENGTHS = [(3, 6), (1, 9), (5, 1), (2, 0), (4, 12), (1, 1), (2, 7), (6, 3), (3, 10)]
UNTRAINED = 7  # this row has a response, but no loss token


@dataclass(frozen=True)
class Algorithm:
    """The configs of a loss."""

    loss: LossConfig
    kl: KlConfig
    correction: CorrectionConfig


# All clip ranges are narrow enough that some tokens are clipped, on both sides.
KINDS: dict[str, Algorithm] = {
    "clipped": Algorithm(
        ClippedLoss(clip_low=0.2, clip_high=0.28, dual_clip=1.5, entropy_coef=0.01),
        KlConfig(coef=0.1, estimator="k3"),
        TruncatedCorrection(cap=1.1),
    ),
    "gspo": Algorithm(
        GspoLoss(clip_low=0.05, clip_high=0.02),
        KlConfig(coef=0.1, estimator="k2"),
        MaskedCorrection(level="sequence", low=0.6, high=1.7),
    ),
    "cispo": Algorithm(
        CispoLoss(clip_low=0.3, clip_high=0.2, entropy_coef=0.01), KlConfig(coef=0.1, estimator="k1"), NoCorrection()
    ),
    "sapo": Algorithm(SapoLoss(), KlConfig(coef=0.1, estimator="k3"), TruncatedCorrection(cap=1.1)),
    "cross_entropy": Algorithm(CrossEntropyLoss(), KlConfig(), NoCorrection()),
}
AGGREGATIONS = get_args(Aggregation)
ALGORITHMS = {
    f"{kind}-{aggregation}": Algorithm(
        algorithm.loss.replace(aggregation=aggregation), algorithm.kl, algorithm.correction
    )
    for kind, algorithm in KINDS.items()
    for aggregation in AGGREGATIONS
}
DEFAULT_AGGREGATION = {
    kind: config.model_fields["aggregation"].default
    for kind, config in zip(kinds_of(LossConfig), configs_of(LossConfig), strict=True)
}


@dataclass(frozen=True, eq=False)
class Row:
    """One sample with all inputs of the loss."""

    prompt: Tensor
    response: Tensor
    mask: Tensor
    behavior: Tensor
    sampler: Tensor
    reference: Tensor
    advantage: Tensor


@cache
def policy(dtype: torch.dtype) -> Qwen3ForCausalLM:
    return tiny_qwen3(dtype=dtype, num_hidden_layers=1)


@cache
def batch(dtype: torch.dtype) -> list[Row]:
    """Create rows whose log-probs differ enough from the policy's for clipping, truncation and masking."""
    generator = torch.Generator().manual_seed(3)
    model, rows = policy(dtype), []
    model.set_attn_implementation("sdpa")
    for index, (num_prompt, num_response) in enumerate(LENGTHS):
        prompt = torch.randint(VOCAB_SIZE, (num_prompt,), generator=generator)
        response = torch.randint(VOCAB_SIZE, (num_response,), generator=generator)
        with torch.no_grad():
            own = plain_logprobs(model, prompt, response, TEMPERATURE)
        noise = 0.3 * torch.randn(3, num_response, generator=generator, dtype=torch.float64).to(dtype)
        mask = torch.rand(num_response, generator=generator) < (0.0 if index == UNTRAINED else 0.8)
        advantage = torch.randn((), generator=generator, dtype=torch.float64).to(dtype)
        behavior = own + noise[0]
        rows.append(Row(prompt, response, mask, behavior, behavior + noise[2], own + noise[1], advantage))
    return rows


def gradient(model: Qwen3ForCausalLM) -> Tensor:
    grads = [parameter.grad for parameter in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads if grad is not None]).clone()


# The reference computes every sample alone, without packing or shared code, by the formulas of the papers.


def clipped_term(row: Row, logprobs: Tensor, config: ClippedLoss) -> Tensor:
    ratio = torch.exp(logprobs - row.behavior[row.mask])
    surrogate = torch.minimum(
        ratio * row.advantage, torch.clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * row.advantage
    )
    if config.dual_clip is not None and row.advantage < 0:
        surrogate = torch.maximum(surrogate, config.dual_clip * row.advantage)
    return -surrogate


def gspo_term(row: Row, logprobs: Tensor, config: GspoLoss) -> Tensor:
    ratio = torch.exp((logprobs - row.behavior[row.mask]).mean())
    clipped = torch.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    return -torch.minimum(ratio * row.advantage, clipped * row.advantage).expand(len(logprobs))


def cispo_term(row: Row, logprobs: Tensor, config: CispoLoss) -> Tensor:
    ratio = torch.exp(logprobs - row.behavior[row.mask]).detach()
    return -torch.clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * row.advantage * logprobs


def sapo_term(row: Row, logprobs: Tensor, config: SapoLoss) -> Tensor:
    ratio = torch.exp(logprobs - row.behavior[row.mask])
    tau = config.tau_positive if row.advantage > 0 else config.tau_negative
    return -row.advantage * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))


def cross_entropy_term(row: Row, logprobs: Tensor, config: CrossEntropyLoss) -> Tensor:
    return -logprobs


POLICY_TERMS: dict[str, Callable[..., Tensor]] = {
    "clipped": clipped_term,
    "gspo": gspo_term,
    "cispo": cispo_term,
    "sapo": sapo_term,
    "cross_entropy": cross_entropy_term,
}


def reference_weights(row: Row, correction: CorrectionConfig) -> Tensor:
    importance = torch.exp(row.behavior - row.sampler)[row.mask]
    if correction.kind == "truncated":
        return torch.clip(importance, max=correction.cap)
    if correction.kind == "masked":
        product = importance.prod()
        return (product if correction.low <= product <= correction.high else 0.0) * torch.ones_like(importance)
    return torch.ones_like(importance)


def reference_kl(x: Tensor, estimator: str) -> Tensor:
    return {"k1": -x, "k2": x**2 / 2, "k3": torch.exp(x) - x - 1}[estimator]


def entropy_of(logprobs: Tensor) -> Tensor:
    """Return some other function of the policy in place of the entropy."""
    return logprobs**2 / 2


@cache
def reference_logprobs(dtype: torch.dtype) -> list[Tensor]:
    """Compute each row's log-probs by a separate forward, and keep their graphs."""
    model = policy(dtype)
    model.set_attn_implementation("sdpa")
    return [plain_logprobs(model, row.prompt, row.response, TEMPERATURE) for row in batch(dtype)]


def reference_update(members: Sequence[int], algorithm: Algorithm, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Compute the gradient and loss of an update of these rows."""
    config, per_sequence = algorithm.loss, []
    for member in members:
        row = batch(dtype)[member]
        if not row.mask.any():
            continue
        logprobs = reference_logprobs(dtype)[member][row.mask]
        losses = reference_weights(row, algorithm.correction) * POLICY_TERMS[config.kind](row, logprobs, config)
        kl = reference_kl(row.reference[row.mask] - logprobs, algorithm.kl.estimator)
        per_sequence.append(losses + algorithm.kl.coef * kl - config.entropy_coef * entropy_of(logprobs))
    loss = {
        "token_mean": lambda: torch.cat(per_sequence).mean(),
        "seq_mean_token_mean": lambda: torch.stack([losses.mean() for losses in per_sequence]).mean(),
        "seq_mean_token_sum": lambda: torch.stack([losses.sum() for losses in per_sequence]).mean(),
        "seq_mean_token_sum_norm": lambda: torch.stack([losses.sum() / NORM_TOKENS for losses in per_sequence]).mean(),
    }[config.aggregation]()
    policy(dtype).zero_grad()
    loss.backward(retain_graph=True)
    return gradient(policy(dtype)), loss.item()
