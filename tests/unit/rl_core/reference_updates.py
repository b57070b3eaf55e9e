"""The algorithms under test and a batch of rows, and a plain reference of each update's gradient and loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import get_args

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from schemas.config.loss import CorrectionConfig, KlConfig, KlEstimator, LossConfig
from tests.support.packed import VOCAB_SIZE, plain_logprobs, tiny_qwen3
from tests.unit.rl_core.loss_inputs import AGGREGATIONS, CORRECTIONS, LOSSES, POLICY_TERMS, WEIGHTS, Row

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


KL_TERMS = [KlConfig(coef=0.1, estimator=estimator) for estimator in get_args(KlEstimator)]
# Every loss and aggregation, with some KL term and some correction: each of these is among them.
ALGORITHMS = {
    f"{name}-{aggregation}": Algorithm(
        loss.replace(aggregation=aggregation, entropy_coef=0.01, observation_coef=0.07), kl, correction
    )
    for (name, loss), kl, correction in zip(LOSSES.items(), cycle(KL_TERMS), cycle(CORRECTIONS.values()), strict=False)
    for aggregation in AGGREGATIONS
}
DEFAULTS = {name: f"{name}-{type(loss).model_fields['aggregation'].default}" for name, loss in LOSSES.items()}


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
        columns = (mask, behavior, behavior + noise[2], own + noise[1], advantage)
        rows.append(Row(prompt, response, *columns, selected=noise[1] > noise[2]))
    return rows


def gradient(model: Qwen3ForCausalLM) -> Tensor:
    grads = [parameter.grad for parameter in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads if grad is not None]).clone()


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
    config, per_sequence, observed = algorithm.loss, [], []
    for member in members:
        row = batch(dtype)[member]
        if not row.mask.any():
            continue
        observed.append(-reference_logprobs(dtype)[member][~row.mask])
        logprobs = reference_logprobs(dtype)[member][row.mask]
        importance = torch.exp(row.behavior - row.sampler)[row.mask]
        weights = WEIGHTS[algorithm.correction.kind](importance, algorithm.correction)
        losses = weights * POLICY_TERMS[config.kind](row, logprobs, config)
        kl = reference_kl(row.reference[row.mask] - logprobs, algorithm.kl.estimator)
        per_sequence.append(losses + algorithm.kl.coef * kl - config.entropy_coef * entropy_of(logprobs))
    loss = {
        "token_mean": lambda: torch.cat(per_sequence).mean(),
        "seq_mean_token_mean": lambda: torch.stack([losses.mean() for losses in per_sequence]).mean(),
        "seq_mean_token_sum": lambda: torch.stack([losses.sum() for losses in per_sequence]).mean(),
        "seq_mean_token_sum_norm": lambda: torch.stack([losses.sum() / NORM_TOKENS for losses in per_sequence]).mean(),
    }[config.aggregation]()
    loss = loss + config.observation_coef * torch.cat(observed).mean()
    policy(dtype).zero_grad()
    loss.backward(retain_graph=True)
    return gradient(policy(dtype)), loss.item()
