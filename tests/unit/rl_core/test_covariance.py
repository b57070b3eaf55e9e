"""Tokens that a loss selects by their covariance over the whole update, and the updates that it makes with them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray

from rl_core.columns.jagged import flat_values, jagged, row_lengths, split_rows
from rl_core.planning import plan_step
from rl_core.training import RankRows, ScoringModule, Trainer
from rl_core.training.rows import SELECTED_COLUMN, with_selected
from schemas.errors import NonFiniteError
from schemas.metrics import values
from schemas.plan import UpdatePlan
from tests.support.configs import run_config
from tests.support.measured_memory import packed_rows
from tests.support.packed import tiny_qwen3

PROMPTS, RESPONSES = [3, 5, 2, 4, 3, 6], [12, 5, 14, 9, 18, 10]
TWO_UPDATES = {"optim": {"updates_per_step": 2, "max_grad_norm": 1e9}}
CLIP_COV = {"kind": "clip_cov", "share": 0.25, "cov_low": 0.02, "cov_high": 0.3}
KL_COV = {"kind": "kl_cov", "share": 0.25}


def masked_rows() -> RankRows:
    """Return rows some of whose tokens are not trained, and have log-probs that would be selected first."""
    rows = packed_rows(PROMPTS, RESPONSES)
    lengths = row_lengths(rows.columns["response_ids"])
    mask = np.random.default_rng(3).random(lengths.sum()) < 0.7
    logprobs = np.where(mask, flat_values(rows.columns["behavior_logprobs"]), np.float32(50))
    return with_columns(rows, loss_mask=jagged(mask, lengths), behavior_logprobs=jagged(logprobs, lengths))


def with_columns(rows: RankRows, **changed: pa.Array) -> RankRows:
    columns = {name: rows.columns[name] for name in rows.columns.schema.names} | changed
    return RankRows(rows.rows, pa.record_batch(columns))


def plans(rows: RankRows, num_updates: int = 2, token_budget: int = 96) -> Sequence[UpdatePlan]:
    trained = [int(part.sum()) for part in split_rows(rows.columns["loss_mask"])]
    sizes = {"num_ranks": 1, "token_budget": token_budget}
    return plan_step(PROMPTS, RESPONSES, trained, num_updates=num_updates, seed=1, **sizes).updates


def selected(
    rows: RankRows, update: UpdatePlan, loss: dict[str, Any], step: int = 0, **sections: Any
) -> NDArray[np.bool_]:
    """Return which tokens of all rows are selected."""
    config = run_config(loss=loss, **(TWO_UPDATES | sections))
    return flat_values(with_selected(rows, update, 0, config, step, None).columns[SELECTED_COLUMN])


def covariances(rows: RankRows, update: UpdatePlan) -> NDArray[np.float64]:
    """Return the covariance of each trained token of an update, and NaN of all others, of all rows."""
    mask, logprobs = (split_rows(rows.columns[name]) for name in ("loss_mask", "behavior_logprobs"))
    advantages, members = flat_values(rows.columns["advantages"]).astype(np.float64), sorted(update.rows)
    all_logprobs = np.concatenate([logprobs[row][mask[row]] for row in members]).astype(np.float64)
    all_advantages = np.concatenate([np.repeat(advantages[row], mask[row].sum()) for row in members])
    found = [np.full(length, np.nan) for length in RESPONSES]
    for row in members:
        centered = logprobs[row].astype(np.float64) - all_logprobs.mean()
        found[row][mask[row]] = (centered * (advantages[row] - all_advantages.mean()))[mask[row]]
    return np.concatenate(found)


def test_kl_cov_selects_the_largest_of_each_update_in_numpy() -> None:
    rows = masked_rows()
    for update in plans(rows):
        found = covariances(rows, update)
        count = int(0.25 * update.num_loss_tokens)
        assert 1 < count < update.num_loss_tokens
        largest = np.argsort(np.where(np.isnan(found), -np.inf, found))[-count:]
        assert np.flatnonzero(selected(rows, update, KL_COV)).tolist() == sorted(largest)


def test_clip_cov_draws_among_those_within_the_bounds() -> None:
    rows = masked_rows()
    for update in plans(rows):
        found = covariances(rows, update)
        within = (found > CLIP_COV["cov_low"]) & (found < CLIP_COV["cov_high"])
        count = int(0.25 * update.num_loss_tokens)
        assert count < within.sum() < update.num_loss_tokens
        drawn = [selected(rows, update, CLIP_COV, step) for step in range(60)]
        assert {int(each.sum()) for each in drawn} == {count}
        np.testing.assert_array_equal(np.any(drawn, axis=0), within)
        again, other = (selected(rows, update, CLIP_COV, seed=seed) for seed in (0, 1))
        np.testing.assert_array_equal(again, drawn[0])
        assert not np.array_equal(other, drawn[0])


def test_all_are_selected_if_fewer_are_within_the_bounds() -> None:
    rows, (update,) = masked_rows(), plans(masked_rows(), num_updates=1)
    found = covariances(rows, update)
    narrow = {**CLIP_COV, "cov_low": 0.1, "cov_high": 0.13, "share": 0.9}
    np.testing.assert_array_equal(selected(rows, update, narrow), (found > 0.1) & (found < 0.13))
    assert selected(rows, update, {**KL_COV, "share": 1e-9}).sum() == 1  # at least one
    np.testing.assert_array_equal(selected(rows, update, {**KL_COV, "share": 1.0}), found > 0)


def test_ties_go_to_the_first_row_and_none_is_selected_without_a_covariance() -> None:
    rows = masked_rows()
    (update,) = plans(rows, num_updates=1)
    trained, lengths = flat_values(rows.columns["loss_mask"]), row_lengths(rows.columns["response_ids"])
    high = np.repeat(np.arange(len(lengths)) % 2, lengths)  # of every second row, by as much as its advantage
    alike = with_columns(
        rows,
        behavior_logprobs=jagged((high - 2).astype(np.float32), lengths),
        advantages=pa.array(np.arange(len(lengths)) % 2, pa.float32()),
    )
    values = (high - high[trained].mean()) ** 2
    of_most = np.flatnonzero(trained & (values == values[trained].max()))
    count = int(0.25 * update.num_loss_tokens)
    assert len(of_most) >= count
    assert np.flatnonzero(selected(alike, update, KL_COV)).tolist() == of_most[:count].tolist()
    same = with_columns(rows, advantages=pa.array(np.ones(len(PROMPTS)), pa.float32()))
    assert not selected(same, update, KL_COV).any()


def test_the_advantages_are_those_with_a_teacher() -> None:
    rows = masked_rows()
    (update,) = plans(rows, num_updates=1)
    lengths = row_lengths(rows.columns["response_ids"])
    teacher = np.random.default_rng(5).normal(-5.5, 0.3, lengths.sum()).astype(np.float32)
    taught = with_columns(rows, teacher_logprobs=jagged(teacher, lengths))
    distillation = {"teachers": {"big": {"path": "teacher"}}, "weight": 0.7, "reward_weight": 0.0}
    mask, behavior = (flat_values(rows.columns[name]) for name in ("loss_mask", "behavior_logprobs"))
    advantages, logprobs = -0.7 * (behavior - teacher).astype(np.float64)[mask], behavior[mask].astype(np.float64)
    found = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    largest = np.flatnonzero(mask)[np.argsort(found)[-int(0.25 * mask.sum()) :]]
    assert np.flatnonzero(selected(taught, update, KL_COV, distillation=distillation)).tolist() == sorted(largest)


@pytest.mark.parametrize("loss", [CLIP_COV, KL_COV], ids=["clip_cov", "kl_cov"])
def test_a_step_has_the_same_updates_for_every_budget(loss: dict[str, Any]) -> None:
    rows = masked_rows()
    wide, narrow = (step_gradients(rows, loss, token_budget) for token_budget in (96, 22))
    for first, second in zip(wide, narrow, strict=True):
        for name, gradient in first.items():
            torch.testing.assert_close(gradient, second[name], rtol=1e-4, atol=1e-6)


def test_only_later_updates_of_a_step_are_penalized_and_differ_from_behavior() -> None:
    rows = masked_rows()
    first, second = plans(rows)
    config = run_config(loss=KL_COV, model={"path": "unused"}, **TWO_UPDATES)
    trainer = Trainer(ScoringModule(tiny_qwen3(num_hidden_layers=1, vocab_size=256), config.packing, 1.0), config)
    metrics = [values(trainer.update(rows, update, part=part)) for part, update in enumerate((first, second))]
    assert metrics[0]["ratio"] == metrics[0]["ratio_max"] == 1
    assert metrics[1]["ratio_max"] > 1.01
    shares = [int(0.25 * update.num_loss_tokens) / update.num_loss_tokens for update in (first, second)]
    assert [each["clip_fraction/cov"] for each in metrics] == pytest.approx(shares)


@pytest.mark.parametrize("part", [0, 1])
def test_what_is_not_finite_is_reported(part: int) -> None:
    rows = masked_rows()
    (update,) = plans(rows, num_updates=1)
    lengths = row_lengths(rows.columns["response_ids"])
    logprobs = flat_values(rows.columns["behavior_logprobs"]).copy()
    logprobs[np.flatnonzero(flat_values(rows.columns["loss_mask"]))[[0, -1]]] = np.inf, -np.inf
    broken = with_columns(rows, behavior_logprobs=jagged(logprobs, lengths))
    config = run_config(loss=KL_COV, model={"path": "unused"}, **TWO_UPDATES)
    trainer = Trainer(ScoringModule(tiny_qwen3(num_hidden_layers=1, vocab_size=256), config.packing, 1.0), config)
    with pytest.raises(NonFiniteError, match=r"rows \[0, 5\] .* whose behavior_logprobs are not finite"):
        trainer.update(broken, update, part=part)
    lacking = replace(rows, columns=rows.columns.drop_columns(["sampler_logprobs"]))
    with pytest.raises(KeyError, match="sampler_logprobs"):
        trainer.update(lacking, update, part=part)


def step_gradients(rows: RankRows, loss: dict[str, Any], token_budget: int) -> list[dict[str, torch.Tensor]]:
    """Return the gradient of each of a step's two updates."""
    config = run_config(loss=loss, model={"path": "unused"}, **TWO_UPDATES)
    trainer = Trainer(ScoringModule(tiny_qwen3(num_hidden_layers=1, vocab_size=256), config.packing, 1.0), config)
    found: list[dict[str, torch.Tensor]] = []

    def keep(*_: object) -> None:
        found.append({name: weight.grad.clone() for name, weight in trainer.named_parameters().items()})

    trainer.optimizer.register_step_pre_hook(keep)
    for part, update in enumerate(plans(rows, token_budget=token_budget)):
        trainer.update(rows, update, part=part)
    return found
