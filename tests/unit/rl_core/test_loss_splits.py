"""Independence of the loss from the micro-batch split, untrained tokens and non-finite values."""

import math
from dataclasses import fields
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_core.losses import LossInputs
from schemas.config.distillation import DistillationConfig
from schemas.config.loss import (
    Aggregation,
    ClippedLoss,
    CorrectionConfig,
    GspoLoss,
    KlConfig,
    LossConfig,
    TruncatedCorrection,
)
from schemas.metrics import Mean, Metrics, merge_metrics, values
from tests.unit.rl_core.loss_inputs import (
    AGGREGATIONS,
    CORRECTIONS,
    LOSSES,
    every_correction,
    every_loss,
    every_loss_of_samples,
    gradient_of,
    loss_of,
    row_inputs,
)


def random_inputs(lengths: list[int], seed: int) -> dict[str, Tensor]:
    """Create columns whose ratios, importance weights and KL estimates are within and beyond their bounds."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    names = ("policy_logprobs", "behavior_logprobs", "sampler_logprobs", "reference_logprobs")
    columns = {name: -torch.rand(num_tokens, generator=generator, dtype=torch.float64) for name in names}
    columns["advantages"] = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    columns["loss_mask"] = torch.rand(num_tokens, generator=generator) < 0.7
    columns["selected"] = torch.rand(num_tokens, generator=generator) < 0.4
    columns["teacher_logprobs"] = -torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    columns["teacher_top_logprobs"] = -2 - torch.rand(num_tokens, 3, generator=generator, dtype=torch.float64)
    return columns


@pytest.mark.parametrize("divergence", [None, "sampled", "reverse_kl", "js"])
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
    loss=st.sampled_from(list(LOSSES.values())),
    aggregation=st.sampled_from(AGGREGATIONS),
    correction=st.sampled_from(list(CORRECTIONS.values())),
)
def test_sum_over_any_split_equals_the_whole(
    divergence: str | None,
    lengths: list[int],
    seed: int,
    loss: LossConfig,
    aggregation: Aggregation,
    correction: CorrectionConfig,
) -> None:
    columns = random_inputs(lengths, seed)
    mask = columns["loss_mask"]
    num_live = max(1, sum(bool(part.any()) for part in torch.split(mask, lengths)))
    config = loss.replace(aggregation=aggregation, entropy_coef=0.02)
    taught = {"teachers": {"big": {"path": "teacher"}}, "divergence": divergence, "weight": 0.7, "reward_weight": 1.3}
    distillation = None if divergence is None else DistillationConfig.model_validate(taught)

    def loss_and_grad(groups: list[int]) -> tuple[Tensor, Tensor, Metrics]:
        leaf = columns["policy_logprobs"].clone().requires_grad_()
        total, parts, row = torch.zeros((), dtype=torch.float64), [], 0
        for size in groups:
            start, stop = sum(lengths[:row]), sum(lengths[: row + size])
            tokens = {name: column[start:stop] for name, column in columns.items()}
            tokens["policy_logprobs"] = leaf[start:stop]
            # In place of the entropy and of the likely tokens, any tensors that depend on the policy.
            inputs = LossInputs.from_rows(
                **tokens,
                policy_top_logprobs=leaf[start:stop, None] - torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64),
                entropy=-leaf[start:stop] / 2,
                response_lengths=torch.tensor(lengths[row : row + size]),
            )
            counts = max(1, int(mask.sum())), num_live
            part, metrics = loss_of(inputs, *counts, config, KlConfig(coef=0.05), correction, distillation)
            part.backward()
            total, row = total + part.detach(), row + size
            parts.append(metrics)
        assert leaf.grad is not None
        return total, leaf.grad, merge_metrics(parts)

    cuts = torch.rand(len(lengths) - 1, generator=torch.Generator().manual_seed(seed)) < 0.5
    whole, whole_grad, whole_metrics = loss_and_grad([len(lengths)])
    split, split_grad, split_metrics = loss_and_grad(_run_lengths([bool(cut) for cut in cuts]))
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(split_grad, whole_grad, rtol=1e-12, atol=1e-12)
    assert values(split_metrics) == pytest.approx(values(whole_metrics))
    assert ("teacher/kl" in whole_metrics) == (divergence is not None)
    if mask.any():
        assert whole_metrics["loss"].value == pytest.approx(whole.item())


def _run_lengths(cuts: list[bool]) -> list[int]:
    """Return the sizes of the groups after cutting behind the marked items."""
    sizes = [1]
    for cut in cuts:
        if cut:
            sizes.append(1)
        else:
            sizes[-1] += 1
    return sizes


@every_loss_of_samples
def test_without_trained_tokens_the_loss_is_zero_with_a_graph(loss: LossConfig) -> None:
    inputs = row_inputs([3.0, 1.0], [1.0], [2], [False, False], importance=[1.0, 2.0], entropy=[1.0, 1.0])
    loss_value, metrics = loss_of(inputs, 10, 5, loss)
    assert loss_value.item() == 0.0
    assert gradient_of(inputs, loss_value) == [0.0, 0.0]
    assert metrics["ratio"] == metrics["mismatch/mean"] == metrics["entropy"] == Mean(total=0.0, weight=0)
    assert "ratio_max" not in metrics
    assert "mismatch/max" not in metrics


@every_loss
def test_a_micro_batch_without_sequences(loss: LossConfig) -> None:
    inputs = row_inputs([], [], [], importance=[])
    assert loss_of(inputs, 10, 5, loss)[0].item() == 0.0


@every_loss
@every_correction
def test_untrained_tokens_cannot_poison_the_gradient(loss: LossConfig, correction: CorrectionConfig) -> None:
    def loss_and_metrics(ratios: list[float], others: list[float]) -> tuple[LossInputs, Tensor, Metrics]:
        """Compute the loss of these tokens, of which only the first is trained."""
        inputs = row_inputs(
            ratios,
            [1.0],
            [len(ratios)],
            [True] + [False] * len(others),
            importance=[1.0, *others],
            reference=[0.0, *others],
            entropy=[1.0, *others],
        )
        return inputs, *loss_of(inputs, 1, 1, loss.replace(entropy_coef=0.5), KlConfig(coef=0.1), correction)

    inputs, loss_value, metrics = loss_and_metrics([1.0, math.nan, 0.0], [math.nan, math.nan])
    _, alone, _ = loss_and_metrics([1.0], [])
    assert loss_value.item() == alone.item()
    assert gradient_of(inputs, loss_value) == pytest.approx([-1.0, 0.0, 0.0], rel=1e-12, abs=0)
    assert all(math.isfinite(value) for value in values(metrics).values())


# A new column that need not be finite is named here, and left out by `LossInputs.finite_columns`.
NOT_CHECKED = {"loss_mask", "sequence_index", "loss_tokens_per_sequence", "entropy", "selected"}
CHECKED = [field.name for field in fields(LossInputs) if field.name not in NOT_CHECKED]


@every_loss
@pytest.mark.parametrize("column", CHECKED)
def test_a_non_finite_value_makes_the_loss_nan(loss: LossConfig, column: str) -> None:
    for value, correction in product((math.nan, math.inf, -math.inf), CORRECTIONS.values()):
        columns = {name: torch.zeros(2, 3) if "_top_" in name else torch.zeros(2) for name in CHECKED}
        columns[column][1] = value
        columns["policy_logprobs"].requires_grad_()
        inputs = LossInputs.from_rows(
            **columns,
            loss_mask=torch.tensor([True, True]),
            response_lengths=torch.tensor([1, 1]),
            selected=torch.tensor([True, True]),
        )
        # Reference and teacher are only reported here, and without a correction so is the sampler.
        assert not torch.isfinite(loss_of(inputs, 2, 2, loss, correction=correction)[0])


@every_loss_of_samples
def test_a_ratio_beyond_overflow_keeps_a_finite_gradient(loss: LossConfig) -> None:
    for advantage in (1.0, -1.0):
        policy = torch.tensor([-0.1], requires_grad=True)
        inputs = LossInputs.from_rows(
            policy_logprobs=policy,
            behavior_logprobs=torch.tensor([-200.0]),  # exp of the difference overflows; that of `log_ratio` doesn't
            advantages=torch.tensor([advantage]),
            loss_mask=torch.tensor([True]),
            response_lengths=torch.tensor([1]),
            sampler_logprobs=torch.tensor([-0.1]),
            selected=torch.tensor([True]),
        )
        value, _ = loss_of(inputs, 1, 1, loss)
        assert math.isfinite(value.item())
        assert all(map(math.isfinite, gradient_of(inputs, value)))


def test_a_huge_ratio_keeps_a_finite_gradient() -> None:
    policy = torch.tensor([200.0], requires_grad=True)
    inputs = LossInputs.from_rows(
        policy_logprobs=policy,
        behavior_logprobs=torch.tensor([0.0]),
        advantages=torch.tensor([1.0]),
        loss_mask=torch.tensor([True]),
        response_lengths=torch.tensor([1]),
        sampler_logprobs=torch.tensor([-200.0]),
        reference_logprobs=torch.tensor([400.0]),
    )
    for config in (ClippedLoss(), GspoLoss(clip_high=0.2)):
        policy.grad = None
        loss, _ = loss_of(inputs, 1, 1, config)
        assert loss.item() == pytest.approx(-1.2)
        assert gradient_of(inputs, loss) == [0.0]
    loss, metrics = loss_of(inputs, 1, 1, kl=KlConfig(coef=1.0), correction=TruncatedCorrection())
    assert math.isfinite(loss.item())
    assert all(math.isfinite(value) for value in values(metrics).values())


def test_inconsistent_inputs_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"policy_logprobs has shape \(3,\), but response_lengths add up to 2"):
        row_inputs([1.0] * 3, [1.0], [2])
    with pytest.raises(ValueError, match=r"entropy has shape \(1,\), but response_lengths add up to 2"):
        row_inputs([1.0] * 2, [1.0], [2], entropy=[1.0])
    with pytest.raises(ValueError, match=r"sampler_logprobs has shape \(1,\), but response_lengths add up to 2"):
        row_inputs([1.0] * 2, [1.0], [2], importance=[1.0])
