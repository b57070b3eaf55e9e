"""An update's gradient and metrics equal those of a plain reference for every budget, rank count and row order.

Every loss and every aggregation is tested, with a KL term, an entropy bonus and a correction of the mismatch.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_core.losses import LossInputs, policy_loss
from rl_core.planning import plan_step
from rl_core.scoring import pack_row, packed_scores, use_packed_attention
from schemas.metrics import Metrics, merge_metrics, values
from schemas.plan import UpdatePlan
from tests.unit.rl_core.loss_inputs import Row
from tests.unit.rl_core.reference_updates import (
    ALGORITHMS,
    DEFAULTS,
    LENGTHS,
    NORM_TOKENS,
    TEMPERATURE,
    Algorithm,
    batch,
    entropy_of,
    gradient,
    policy,
    reference_update,
)

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
# Token budget, ranks, seed of the row order. The longest row has 16 tokens; of 12 ranks, some have dummies only.
SPLITS = [(16, 1, 0), (24, 2, 1), (30, 4, 2), (10_000, 1, 3), (10_000, 12, 4)]


def packed_update(
    rows: Sequence[Row],
    groups: Sequence[Sequence[int]],
    update: UpdatePlan,
    algorithm: Algorithm,
    dtype: torch.dtype,
) -> tuple[Tensor, float, Metrics]:
    """Sum the gradients, losses and metrics of all micro-batches, each packed."""
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
        logprobs = packed_scores(model, packed, temperature=TEMPERATURE, chunk_tokens=5).logprobs
        inputs = LossInputs.from_rows(
            policy_logprobs=logprobs,
            behavior_logprobs=_concat([row.behavior for row in members], dtype),
            sampler_logprobs=_concat([row.sampler for row in members], dtype),
            reference_logprobs=_concat([row.reference for row in members], dtype),
            entropy=entropy_of(logprobs),
            advantages=_concat([row.advantage.reshape(1) for row in members], dtype).repeat_interleave(
                response_lengths
            ),
            loss_mask=_concat([row.mask for row in members], torch.bool),
            response_lengths=response_lengths,
            selected=_concat([row.selected for row in members], torch.bool),
        )
        loss, metrics = policy_loss(
            inputs,
            algorithm.loss,
            algorithm.kl,
            algorithm.correction,
            norm_tokens=NORM_TOKENS,
            num_loss_tokens=update.num_loss_tokens,
            num_live_sequences=update.num_live_sequences,
            num_observation_tokens=update.num_observation_tokens,
        )
        loss.backward()
        total += loss.item()
        parts.append(metrics)
    return gradient(model), total, merge_metrics(parts)


def _concat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate any number of parts, also none: a dummy micro-batch has no rows."""
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
    """Return the reference's gradient and loss, and the metrics of a single micro-batch of all rows."""
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
    observed = ALGORITHMS[name].loss.observation_coef * metrics["observation_cross_entropy"].value
    close = {"rel": 10 * TOLERANCE[dtype], "abs": TOLERANCE[dtype]}  # terms of about 1 may cancel
    assert loss == pytest.approx(expected_loss, **close)
    assert metrics["loss"].value + observed == pytest.approx(expected_loss, **close)
    assert values(metrics) == pytest.approx(expected_metrics, rel=10 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_exact(name: str, dtype: torch.dtype) -> None:
    rows = batch(dtype)
    (update,) = plan_updates(rows, token_budget=30, num_ranks=2)
    assert_exact(rows, micro_batches(update), update, name, dtype)


@pytest.mark.parametrize("name", DEFAULTS.values(), ids=DEFAULTS)
@pytest.mark.parametrize(("token_budget", "num_ranks", "seed"), SPLITS)
def test_every_budget_rank_count_and_order_is_exact(token_budget: int, num_ranks: int, seed: int, name: str) -> None:
    order = np.random.default_rng(seed).permutation(len(LENGTHS))
    rows = [batch(torch.float32)[row] for row in order]
    (update,) = plan_updates(rows, token_budget=token_budget, num_ranks=num_ranks)
    assert_exact(rows, micro_batches(update), update, name, torch.float32)


@pytest.mark.parametrize("name", DEFAULTS.values(), ids=DEFAULTS)
def test_one_row_per_micro_batch_is_exact(name: str) -> None:
    rows = batch(torch.float64)
    (update,) = plan_updates(rows, token_budget=64)
    # Rows without a loss token are included; they change nothing.
    groups: list[Sequence[int]] = [[row] for row in range(len(rows))]
    assert_exact(rows, groups, update, name, torch.float64)


def test_each_update_has_its_own_denominators() -> None:
    rows, algorithm, dtype = batch(torch.float64), ALGORITHMS["clipped-token_mean"], torch.float64
    updates = plan_updates(rows, token_budget=24, num_updates=2)
    assert len(updates) == 2
    for update in updates:
        grad, loss, _ = packed_update(rows, micro_batches(update), update, algorithm, dtype)
        expected_grad, expected_loss = reference_update(update.rows, algorithm, dtype)
        assert relative_error(grad, expected_grad) < TOLERANCE[dtype]
        assert loss == pytest.approx(expected_loss, rel=1e-11)


def test_every_bound_is_exercised() -> None:
    bounds = ("clip_fraction", "correction/truncated", "correction/masked")
    fractions = {
        (algorithm, name): value
        for algorithm in DEFAULTS.values()
        for name, value in expected_update(algorithm, torch.float32)[2].items()
        if name.startswith(bounds)
    }
    assert {name.split("/")[-1] for _, name in fractions} >= {"low", "high", "dual", "cov", "truncated", "masked"}
    assert all(0 < fraction < 1 for fraction in fractions.values()), fractions
    assert not all(bool(row.mask.all()) for row in batch(torch.float32))
