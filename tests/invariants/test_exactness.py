"""One update's gradient is the same for every budget, rank count and row order: that of a plain reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from rl_core.losses import LossInputs, policy_loss
from rl_core.planning import plan_step
from rl_core.replay import pack_row, packed_logprobs, use_packed_attention
from schemas.config.loss import ClippedLoss
from schemas.plan import UpdatePlan
from tests.packed import VOCAB_SIZE, plain_logprobs, tiny_qwen3

TEMPERATURE = 0.8
LENGTHS = [(3, 6), (1, 9), (5, 1), (2, 0), (4, 12), (1, 1), (2, 7), (6, 3), (3, 10)]
UNTRAINED = 7  # this row has a response, but no loss token
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@dataclass(frozen=True, eq=False)
class Row:
    """One sample with all that the loss needs."""

    prompt: Tensor
    response: Tensor
    mask: Tensor
    behavior: Tensor
    reference: Tensor
    advantage: Tensor


@cache
def policy(dtype: torch.dtype) -> Qwen3ForCausalLM:
    return tiny_qwen3(dtype=dtype)


@cache
def batch(dtype: torch.dtype) -> list[Row]:
    """Rows whose behavior and reference log-probs differ enough from the policy's for some tokens to clip."""
    generator = torch.Generator().manual_seed(3)
    model, rows = policy(dtype), []
    model.set_attn_implementation("sdpa")
    for index, (num_prompt, num_response) in enumerate(LENGTHS):
        prompt = torch.randint(VOCAB_SIZE, (num_prompt,), generator=generator)
        response = torch.randint(VOCAB_SIZE, (num_response,), generator=generator)
        with torch.no_grad():
            own = plain_logprobs(model, prompt, response, TEMPERATURE)
        noise = 0.3 * torch.randn(2, num_response, generator=generator, dtype=torch.float64).to(dtype)
        mask = torch.rand(num_response, generator=generator) < (0.0 if index == UNTRAINED else 0.8)
        advantage = torch.randn((), generator=generator, dtype=torch.float64).to(dtype)
        rows.append(Row(prompt, response, mask, own + noise[0], own + noise[1], advantage))
    return rows


def gradient(model: Qwen3ForCausalLM) -> Tensor:
    grads = [parameter.grad for parameter in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads if grad is not None]).clone()


def reference_gradient(rows: Sequence[Row], config: ClippedLoss, dtype: torch.dtype) -> Tensor:
    """Every sample by itself, no packing and no shared code: the update's loss as the papers write it."""
    model = policy(dtype)
    model.set_attn_implementation("sdpa")
    model.zero_grad()
    per_sequence = []
    for row in rows:
        logprobs = plain_logprobs(model, row.prompt, row.response, TEMPERATURE)
        ratio = torch.exp(logprobs - row.behavior)
        clipped = torch.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
        surrogate = torch.minimum(ratio * row.advantage, clipped * row.advantage)
        x = row.reference - logprobs
        losses = (-surrogate + config.kl_coef * (torch.exp(x) - x - 1))[row.mask]
        if len(losses):
            per_sequence.append(losses)
    if config.aggregation == "token_mean":
        loss = torch.cat(per_sequence).mean()
    else:
        loss = torch.stack([losses.mean() for losses in per_sequence]).mean()
    loss.backward()
    return gradient(model)


def packed_gradient(
    rows: Sequence[Row],
    groups: Sequence[Sequence[int]],
    update: UpdatePlan,
    config: ClippedLoss,
    dtype: torch.dtype,
) -> Tensor:
    """The sum of the gradients of all micro-batches, each packed, with the update's denominators."""
    model = policy(dtype)
    use_packed_attention(model)
    model.zero_grad()
    for group in groups:
        members = [rows[row] for row in group]
        response_lengths = torch.tensor([len(row.response) for row in members], dtype=torch.int64)
        packed = pack_row(
            _concat([row.prompt for row in members], torch.int64),
            np.array([len(row.prompt) for row in members], dtype=np.int64),
            _concat([row.response for row in members], torch.int64),
            response_lengths,
        )
        inputs = LossInputs.from_rows(
            policy_logprobs=packed_logprobs(model, packed, temperature=TEMPERATURE, chunk_tokens=5),
            behavior_logprobs=_concat([row.behavior for row in members], dtype),
            advantages=_concat([row.advantage.reshape(1) for row in members], dtype),
            loss_mask=_concat([row.mask for row in members], torch.bool),
            response_lengths=response_lengths,
            reference_logprobs=_concat([row.reference for row in members], dtype),
        )
        loss, _ = policy_loss(
            inputs,
            config,
            num_loss_tokens=update.num_loss_tokens,
            num_live_sequences=update.num_live_sequences,
        )
        loss.backward()
    return gradient(model)


def _concat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate, also nothing at all: a dummy micro-batch has no rows."""
    return torch.cat([torch.empty(0, dtype=dtype), *parts])


def plan_updates(rows: Sequence[Row], **options: int) -> tuple[UpdatePlan, ...]:
    columns = zip(*((len(row.prompt), len(row.response), int(row.mask.sum())) for row in rows), strict=True)
    prompts, responses, trained = (np.array(column, dtype=np.int64) for column in columns)
    return plan_step(prompts, responses, trained, **{"num_updates": 1, "num_ranks": 1, "seed": 5} | options).updates


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).double().norm() / theirs.double().norm())


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("token_budget", "num_ranks"), [(16, 1), (24, 2), (30, 3), (10_000, 1), (10_000, 12)], ids=str)
def test_gradient_for_every_budget_and_rank_count(
    token_budget: int, num_ranks: int, dtype: torch.dtype, aggregation: str
) -> None:
    rows, config = batch(dtype), ClippedLoss(aggregation=aggregation, kl_coef=0.1)
    updates = plan_updates(rows, token_budget=token_budget, num_ranks=num_ranks)
    groups = [micro.rows for rank in updates[0].ranks for micro in rank]
    expected = reference_gradient(rows, config, dtype)
    assert relative_error(packed_gradient(rows, groups, updates[0], config, dtype), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradient_with_one_row_per_micro_batch(dtype: torch.dtype) -> None:
    rows, config = batch(dtype), ClippedLoss(kl_coef=0.1)
    (update,) = plan_updates(rows, token_budget=64)
    # Rows without a loss token may take part, too: they change nothing.
    groups = [[row] for row in range(len(rows))]
    expected = reference_gradient(rows, config, dtype)
    assert relative_error(packed_gradient(rows, groups, update, config, dtype), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradient_for_every_row_order(seed: int, dtype: torch.dtype) -> None:
    rows, config = batch(dtype), ClippedLoss(kl_coef=0.1)
    shuffled = [rows[row] for row in np.random.default_rng(seed).permutation(len(rows))]
    (update,) = plan_updates(shuffled, token_budget=32)
    groups = [micro.rows for rank in update.ranks for micro in rank]
    expected = reference_gradient(rows, config, dtype)
    assert relative_error(packed_gradient(shuffled, groups, update, config, dtype), expected) < TOLERANCE[dtype]


def test_each_update_has_its_own_denominators() -> None:
    rows, config, dtype = batch(torch.float64), ClippedLoss(kl_coef=0.1), torch.float64
    updates = plan_updates(rows, token_budget=24, num_updates=2)
    assert len(updates) == 2
    for update in updates:
        groups = [micro.rows for rank in update.ranks for micro in rank]
        expected = reference_gradient([rows[row] for row in update.rows], config, dtype)
        assert relative_error(packed_gradient(rows, groups, update, config, dtype), expected) < TOLERANCE[dtype]


def test_clipping_and_masking_are_exercised() -> None:
    rows, model = batch(torch.float32), policy(torch.float32)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        drifts = [plain_logprobs(model, row.prompt, row.response, TEMPERATURE) - row.behavior for row in rows]
    ratio = torch.cat(drifts).exp()
    assert 0 < int(((ratio < 0.8) | (ratio > 1.2)).sum()) < len(ratio)
    assert not all(bool(row.mask.all()) for row in rows)
