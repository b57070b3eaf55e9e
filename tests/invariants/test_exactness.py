"""One update's gradient and metrics are those of a plain reference, for every budget, rank count and row order.

Every loss and every aggregation is held to it, each with a KL term, an entropy bonus and a correction of the mismatch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from rl_core.losses import LossInputs, policy_loss
from rl_core.planning import plan_step
from rl_core.scoring import pack_row, packed_logprobs, use_packed_attention
from schemas.config.correction import CorrectionConfig, MaskedCorrection, NoCorrection, TruncatedCorrection
from schemas.config.kl import KlConfig
from schemas.config.loss import CispoLoss, ClippedLoss, GspoLoss, LossConfig
from schemas.metrics import Metrics, merge_metrics, values
from schemas.plan import UpdatePlan
from tests.packed import VOCAB_SIZE, plain_logprobs, tiny_qwen3

TEMPERATURE = 0.8
NORM_TOKENS = 12.0
LENGTHS = [(3, 6), (1, 9), (5, 1), (2, 0), (4, 12), (1, 1), (2, 7), (6, 3), (3, 10)]
UNTRAINED = 7  # this row has a response, but no loss token
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
# Token budget, ranks, seed of the row order. The longest row has 16 tokens; of 12 ranks, some have dummies only.
SPLITS = [(16, 1, 0), (24, 2, 1), (30, 4, 2), (10_000, 1, 3), (10_000, 12, 4)]


@dataclass(frozen=True)
class Algorithm:
    """What makes up the loss."""

    loss: LossConfig
    kl: KlConfig
    correction: CorrectionConfig


# All kinds have their ranges narrow enough for some tokens to be clipped, on both sides.
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
}
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
ALGORITHMS = {
    f"{kind}-{aggregation}": Algorithm(
        algorithm.loss.replace(aggregation=aggregation), algorithm.kl, algorithm.correction
    )
    for kind, algorithm in KINDS.items()
    for aggregation in AGGREGATIONS
}
DEFAULT_AGGREGATION = {"clipped": "token_mean", "gspo": "seq_mean_token_mean", "cispo": "token_mean"}


@dataclass(frozen=True, eq=False)
class Row:
    """One sample with all that the loss needs."""

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
    """Rows whose log-probs differ enough from the policy's for some tokens to be clipped, truncated and left out."""
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


# The reference: every sample by itself, no packing and no shared code, as the papers write it.


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


POLICY_TERMS: dict[str, Callable[..., Tensor]] = {"clipped": clipped_term, "gspo": gspo_term, "cispo": cispo_term}


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
    """Stands for the entropy: some other function of the policy."""
    return logprobs**2 / 2


@cache
def reference_logprobs(dtype: torch.dtype) -> list[Tensor]:
    """Each row's log-probs, by a forward of its own; their graphs stay."""
    model = policy(dtype)
    model.set_attn_implementation("sdpa")
    return [plain_logprobs(model, row.prompt, row.response, TEMPERATURE) for row in batch(dtype)]


def reference_update(members: Sequence[int], algorithm: Algorithm, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The gradient and loss of an update of these rows."""
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


def packed_update(
    rows: Sequence[Row],
    groups: Sequence[Sequence[int]],
    update: UpdatePlan,
    algorithm: Algorithm,
    dtype: torch.dtype,
) -> tuple[Tensor, float, Metrics]:
    """The sums of the gradients, losses and metrics of all micro-batches, each packed."""
    model = policy(dtype)
    use_packed_attention(model)
    model.zero_grad()
    total, parts = 0.0, []
    for group in groups:
        members = [rows[row] for row in group]
        response_lengths = torch.tensor([len(row.response) for row in members], dtype=torch.int64)
        packed = pack_row(
            _concat([row.prompt for row in members], torch.int64),
            np.array([len(row.prompt) for row in members], dtype=np.int64),
            _concat([row.response for row in members], torch.int64),
            response_lengths,
        )
        logprobs = packed_logprobs(model, packed, temperature=TEMPERATURE, chunk_tokens=5)
        inputs = LossInputs.from_rows(
            policy_logprobs=logprobs,
            behavior_logprobs=_concat([row.behavior for row in members], dtype),
            sampler_logprobs=_concat([row.sampler for row in members], dtype),
            reference_logprobs=_concat([row.reference for row in members], dtype),
            entropy=entropy_of(logprobs),
            advantages=_concat([row.advantage.reshape(1) for row in members], dtype),
            loss_mask=_concat([row.mask for row in members], torch.bool),
            response_lengths=response_lengths,
        )
        loss, metrics = policy_loss(
            inputs,
            algorithm.loss,
            algorithm.kl,
            algorithm.correction,
            norm_tokens=NORM_TOKENS,
            num_loss_tokens=update.num_loss_tokens,
            num_live_sequences=update.num_live_sequences,
        )
        loss.backward()
        total += loss.item()
        parts.append(metrics)
    return gradient(model), total, merge_metrics(parts)


def _concat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate, also nothing at all: a dummy micro-batch has no rows."""
    return torch.cat([torch.empty(0, dtype=dtype), *parts])


def plan_updates(rows: Sequence[Row], **options: int) -> tuple[UpdatePlan, ...]:
    columns = zip(*((len(row.prompt), len(row.response), int(row.mask.sum())) for row in rows), strict=True)
    prompts, responses, trained = (np.array(column, dtype=np.int64) for column in columns)
    return plan_step(prompts, responses, trained, **{"num_updates": 1, "num_ranks": 1, "seed": 5} | options).updates


def micro_batches(update: UpdatePlan) -> list[Sequence[int]]:
    return [micro.rows for rank in update.ranks for micro in rank]


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).double().norm() / theirs.double().norm())


@cache
def expected_update(name: str, dtype: torch.dtype) -> tuple[Tensor, float, dict[str, float]]:
    """The reference's gradient and loss, and the metrics of everything in one micro-batch."""
    rows = batch(dtype)
    (update,) = plan_updates(rows, token_budget=10_000)
    metrics = packed_update(rows, [update.rows], update, ALGORITHMS[name], dtype)[2]
    return *reference_update(range(len(rows)), ALGORITHMS[name], dtype), values(metrics)


def assert_exact(
    rows: Sequence[Row], groups: list[Sequence[int]], update: UpdatePlan, name: str, dtype: torch.dtype
) -> None:
    grad, loss, metrics = packed_update(rows, groups, update, ALGORITHMS[name], dtype)
    expected_grad, expected_loss, expected_metrics = expected_update(name, dtype)
    assert relative_error(grad, expected_grad) < TOLERANCE[dtype]
    assert loss == pytest.approx(expected_loss, rel=10 * TOLERANCE[dtype])
    assert metrics["loss"].value == pytest.approx(expected_loss, rel=10 * TOLERANCE[dtype])
    assert values(metrics) == pytest.approx(expected_metrics, rel=10 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_exact(name: str, dtype: torch.dtype) -> None:
    rows = batch(dtype)
    (update,) = plan_updates(rows, token_budget=30, num_ranks=2)
    assert_exact(rows, micro_batches(update), update, name, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("token_budget", "num_ranks", "seed"), SPLITS)
def test_every_budget_rank_count_and_order_is_exact(token_budget: int, num_ranks: int, seed: int, kind: str) -> None:
    order = np.random.default_rng(seed).permutation(len(LENGTHS))
    rows = [batch(torch.float32)[row] for row in order]
    (update,) = plan_updates(rows, token_budget=token_budget, num_ranks=num_ranks)
    assert_exact(rows, micro_batches(update), update, f"{kind}-{DEFAULT_AGGREGATION[kind]}", torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_per_micro_batch_is_exact(kind: str) -> None:
    rows = batch(torch.float64)
    (update,) = plan_updates(rows, token_budget=64)
    # Rows without a loss token may take part, too: they change nothing.
    groups: list[Sequence[int]] = [[row] for row in range(len(rows))]
    assert_exact(rows, groups, update, f"{kind}-{DEFAULT_AGGREGATION[kind]}", torch.float64)


def test_each_update_has_its_own_denominators() -> None:
    rows, algorithm, dtype = batch(torch.float64), ALGORITHMS["clipped-token_mean"], torch.float64
    updates = plan_updates(rows, token_budget=24, num_updates=2)
    assert len(updates) == 2
    for update in updates:
        grad, loss, _ = packed_update(rows, micro_batches(update), update, algorithm, dtype)
        expected_grad, expected_loss = reference_update(update.rows, algorithm, dtype)
        assert relative_error(grad, expected_grad) < TOLERANCE[dtype]
        assert loss == pytest.approx(expected_loss, rel=1e-11)


@pytest.mark.parametrize(("kind", "num_bounds"), [("clipped", 4), ("gspo", 3), ("cispo", 2)])
def test_every_bound_is_exercised(kind: str, num_bounds: int) -> None:
    metrics = expected_update(f"{kind}-{DEFAULT_AGGREGATION[kind]}", torch.float32)[2]
    bounds = ("clip_fraction/", "correction/truncated", "correction/masked")
    shares = {name: value for name, value in metrics.items() if name.startswith(bounds)}
    assert len(shares) == num_bounds
    assert all(0 < share < 1 for share in shares.values()), shares
    assert not all(bool(row.mask.all()) for row in batch(torch.float32))
