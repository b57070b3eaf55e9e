"""The losses by hand, and their independence of the micro-batch split."""

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_core.losses import LossInputs, policy_loss
from rl_core.losses.kl import kl_estimate, row_kl
from schemas.config.correction import CorrectionConfig, MaskedCorrection, NoCorrection, TruncatedCorrection
from schemas.config.kl import KlConfig, KlEstimator
from schemas.config.loss import Aggregation, CispoLoss, ClippedLoss, GspoLoss, LossConfig
from schemas.metrics import Max, Mean, Metrics, merge_metrics, values

LOSSES = [ClippedLoss(), ClippedLoss(dual_clip=3), GspoLoss(clip_low=0.1, clip_high=0.1), CispoLoss()]
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
NO_KL, NO_CORRECTION = KlConfig(), NoCorrection()
CORRECTIONS = [NO_CORRECTION, TruncatedCorrection(cap=1.2), MaskedCorrection(level="sequence", high=2)]


def row_inputs(
    ratios: Sequence[float],
    advantages: Sequence[float],
    lengths: Sequence[int],
    mask: Sequence[bool] | None = None,
    *,
    importance: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    entropy: Sequence[float] | None = None,
) -> LossInputs:
    """Inputs whose behavior log-probs are 0: the policy's are log(ratio), the sampler's -log(importance)."""
    policy = floats(ratios).log().requires_grad_()
    return LossInputs.from_rows(
        policy_logprobs=policy,
        behavior_logprobs=torch.zeros_like(policy),
        advantages=floats(advantages),
        loss_mask=torch.tensor(mask if mask is not None else [True] * len(ratios), dtype=torch.bool),
        response_lengths=torch.tensor(lengths),
        sampler_logprobs=None if importance is None else -floats(importance).log(),
        reference_logprobs=None if reference is None else floats(reference),
        entropy=None if entropy is None else floats(entropy).requires_grad_(),
    )


def floats(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def loss_of(
    inputs: LossInputs,
    num_tokens: int,
    num_sequences: int,
    loss: LossConfig | None = None,
    kl: KlConfig = NO_KL,
    correction: CorrectionConfig = NO_CORRECTION,
    **config: object,
) -> tuple[Tensor, Metrics]:
    return policy_loss(
        inputs,
        loss or ClippedLoss(**config),
        kl,
        correction,
        norm_tokens=10,
        num_loss_tokens=num_tokens,
        num_live_sequences=num_sequences,
    )


def gradient_of(inputs: LossInputs, loss: Tensor) -> list[float]:
    """d loss / d policy log-prob of each token."""
    loss.backward()
    assert inputs.policy_logprobs.grad is not None
    grad: list[float] = inputs.policy_logprobs.grad.tolist()
    return grad


def assert_mean(metric: object, total: float, weight: int) -> None:
    assert isinstance(metric, Mean)
    assert (metric.total, metric.weight) == (pytest.approx(total), weight)


# The clipped surrogate.


def test_clipping_by_hand() -> None:
    # A = 1: r 2.0 is clipped to 1.2, r 0.5 is not. A = -1: r 2.0 is not clipped, r 0.5 is clipped to 0.8.
    inputs = row_inputs([2.0, 0.5, 2.0, 0.5], [1.0, -1.0], [2, 2])
    loss, metrics = loss_of(inputs, 4, 2)
    assert loss.item() == pytest.approx((-1.2 - 0.5 + 2.0 + 0.8) / 4)
    # d(-A r)/dlogp = -A r where the plain branch wins, else 0; divided by the 4 tokens.
    assert gradient_of(inputs, loss) == pytest.approx([0.0, -0.125, 0.5, 0.0])
    assert metrics["ratio"] == Mean(total=5.0, weight=4)
    assert isinstance(metrics["ratio_max"], Max)
    assert metrics["ratio_max"].value == pytest.approx(2.0)
    assert metrics["clip_fraction"] == Mean(total=2.0, weight=4)
    assert metrics["clip_fraction/low"] == metrics["clip_fraction/high"] == Mean(total=1.0, weight=4)
    # k3 of r is r - 1 - log r; the logs of 2 and 1/2 cancel.
    assert metrics["approx_kl"].value == pytest.approx(1.0 / 4)
    assert metrics["loss"].value == pytest.approx(loss.item())


def test_clip_range_has_two_sides() -> None:
    inputs = row_inputs([2.0, 0.5], [1.0, -1.0], [1, 1])
    loss, _ = loss_of(inputs, 2, 2, clip_low=0.1, clip_high=0.4)
    assert loss.item() == pytest.approx((-1.4 + 0.9) / 2)


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    # A = -1: r 5 would cost 5, but 3 is the most; r 2 costs 2. A = 1 is clipped at 1.2 as ever.
    inputs = row_inputs([5.0, 2.0, 5.0], [-1.0, 1.0], [2, 1])
    loss, metrics = loss_of(inputs, 3, 2, dual_clip=3.0)
    assert loss.item() == pytest.approx((3.0 + 2.0 - 1.2) / 3)
    assert gradient_of(inputs, loss) == pytest.approx([0.0, 2 / 3, 0.0])
    assert metrics["clip_fraction/dual"] == Mean(total=1.0, weight=3)
    assert metrics["clip_fraction"] == Mean(total=1.0, weight=3)
    assert "clip_fraction/dual" not in loss_of(inputs, 3, 2)[1]


# GSPO.


def test_gspo_clips_whole_sequences() -> None:
    # Sequence ratios are geometric means over trained tokens: sqrt(2 * 0.5) = 1; of 4, 9 and an untrained 100, 6.
    ratios, mask = [2.0, 0.5, 4.0, 9.0, 100.0], [True] * 4 + [False]
    inputs = row_inputs(ratios, [1.0, -1.0], [2, 3], mask)
    loss, metrics = loss_of(inputs, 4, 2, GspoLoss(clip_low=0.2, clip_high=0.2))
    assert loss.item() == pytest.approx((-1.0 + 6.0) / 2)
    # d s/d logp_t = s / |y|: all tokens of a sequence alike, whatever their own ratios; over 2 sequences.
    assert gradient_of(inputs, loss) == pytest.approx([-1 / 4, -1 / 4, 6 / 4, 6 / 4, 0.0])
    assert_mean(metrics["ratio"], 14.0, 4)
    assert metrics["clip_fraction"] == Mean(total=0.0, weight=4)


def test_gspo_gives_clipped_sequences_no_gradient() -> None:
    inputs = row_inputs([2.0, 2.0, 0.5], [1.0, -1.0], [2, 1])
    loss, metrics = loss_of(inputs, 3, 2, GspoLoss())
    assert loss.item() == pytest.approx((-1.0004 + 0.9997) / 2)
    assert gradient_of(inputs, loss) == [0.0, 0.0, 0.0]
    assert metrics["clip_fraction/high"] == Mean(total=2.0, weight=3)
    assert metrics["clip_fraction/low"] == Mean(total=1.0, weight=3)


# CISPO.


def test_cispo_clips_weights_but_no_gradient() -> None:
    ratios = [2.0, 0.5, 2.0, 0.5]
    inputs = row_inputs(ratios, [1.0, -1.0], [2, 2])
    loss, metrics = loss_of(inputs, 4, 2, CispoLoss(clip_low=0.3, clip_high=0.2))
    # Weights 1.2 and 0.7 of either sign; the loss is -A w log r.
    assert loss.item() == pytest.approx((-1.2 * math.log(2) - 0.7 * math.log(0.5)) * (1 - 1) / 4)
    assert gradient_of(inputs, loss) == pytest.approx([-1.2 / 4, -0.7 / 4, 1.2 / 4, 0.7 / 4])
    assert metrics["clip_fraction/high"] == metrics["clip_fraction/low"] == Mean(total=2.0, weight=4)
    assert metrics["clip_fraction"] == Mean(total=4.0, weight=4)


def test_cispo_has_no_lower_bound_by_default() -> None:
    inputs = row_inputs([0.01, 1.0], [1.0], [2])
    loss, metrics = loss_of(inputs, 2, 1, CispoLoss())
    assert gradient_of(inputs, loss) == pytest.approx([-0.005, -0.5])
    assert metrics["clip_fraction"].value == 0.0


# Aggregation. With r = 1 a token's loss is -A.


@pytest.mark.parametrize("groups", [[[0], [1], [2]], [[0, 1], [2]], [[0], [1, 2]], [[0, 1, 2]]])
def test_token_mean_of_lengths_4_1_1_is_4(groups: list[list[int]]) -> None:
    # Losses 1, 10, 10 per token: (4 * 1 + 10 + 10) / 6 = 4; a mean of micro-batch means is 7 or 5.2.
    lengths, losses = [4, 1, 1], [1.0, 10.0, 10.0]
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        rows = [lengths[row] for row in group]
        inputs = row_inputs([1.0] * sum(rows), [-losses[row] for row in group], rows)
        total += loss_of(inputs, 6, 3)[0]
    assert total.item() == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("aggregation", "expected", "metric"),
    [
        ("token_mean", 24 / 6, Mean(total=24.0, weight=6)),
        ("seq_mean_token_mean", (1 + 10 + 10) / 3, Mean(total=21.0, weight=3)),
        ("seq_mean_token_sum", (4 + 10 + 10) / 3, Mean(total=24.0, weight=3)),
        ("seq_mean_token_sum_norm", (4 + 10 + 10) / 10 / 3, Mean(total=24.0, weight=30)),
    ],
)
def test_aggregations_by_hand(aggregation: Aggregation, expected: float, metric: Mean) -> None:
    # Three live sequences of 4, 1, 1 trained tokens; the fourth is fully masked and counts nowhere.
    inputs = row_inputs(
        [1.0] * 9, [-1.0, -10.0, -10.0, 5.0], [5, 1, 1, 2], [True] * 4 + [False, True, True] + [False] * 2
    )
    loss, metrics = loss_of(inputs, 6, 3, aggregation=aggregation)
    assert loss.item() == pytest.approx(expected)
    assert metrics["loss"] == metric
    assert metrics["loss"].value == pytest.approx(expected)


# The KL term.


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", -math.log(2), 1.0), ("k2", math.log(2) ** 2 / 2, -math.log(2)), ("k3", 1 - math.log(2), -1.0)],
)
def test_kl_terms_by_hand(estimator: KlEstimator, value: float, slope: float) -> None:
    # r = 1 and A = 0, so only the KL term is left; x = log 2 for the first token and 0 for the second.
    inputs = row_inputs([1.0, 1.0], [0.0], [2], reference=[math.log(2), 0.0])
    loss, metrics = loss_of(inputs, 2, 1, kl=KlConfig(coef=0.1, estimator=estimator))
    assert loss.item() == pytest.approx(0.1 * value / 2)
    assert metrics["kl"].value == pytest.approx(value / 2)
    # At x = 0 only k1 has a gradient: it pushes every log-prob down, wherever the reference is.
    assert gradient_of(inputs, loss) == pytest.approx([0.05 * slope, 0.05 if estimator == "k1" else 0.0])


def test_the_mean_gradient_is_zero_for_k1_and_that_of_a_kl_for_k2_and_k3() -> None:
    logits = floats([0.3, -0.2, 1.0]).requires_grad_()
    reference = torch.log_softmax(floats([1.0, 0.5, -1.0]), -1)
    logprobs = torch.log_softmax(logits, -1)
    policy = logprobs.exp().detach()

    def expected_gradient(estimator: KlEstimator) -> list[float]:
        """Of the estimate as a loss, over all tokens that the policy samples."""
        loss = (policy * kl_estimate(estimator, reference - logprobs)).sum()
        grad: list[float] = torch.autograd.grad(loss, logits, retain_graph=True)[0].tolist()
        return grad

    reverse = (logprobs.exp() * (logprobs - reference)).sum()
    forward = (reference.exp() * (reference - logprobs)).sum()
    assert expected_gradient("k1") == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)
    assert expected_gradient("k2") == pytest.approx(torch.autograd.grad(reverse, logits, retain_graph=True)[0].tolist())
    assert expected_gradient("k3") == pytest.approx(torch.autograd.grad(forward, logits, retain_graph=True)[0].tolist())


def test_kl_is_reported_without_a_term_and_the_term_needs_a_reference() -> None:
    for kl in (KlConfig(), KlConfig(coef=0.1, in_reward=True)):
        loss, metrics = loss_of(row_inputs([1.0], [0.0], [1], reference=[1.0]), 1, 1, kl=kl)
        assert loss.item() == 0.0
        assert metrics["kl"].value == pytest.approx(math.e - 2)
    with pytest.raises(ValueError, match=r"kl\.coef is 0\.1, but the inputs lack reference_logprobs"):
        loss_of(row_inputs([1.0], [0.0], [1]), 1, 1, kl=KlConfig(coef=0.1))
    assert "kl" not in loss_of(row_inputs([1.0], [0.0], [1]), 1, 1, kl=KlConfig(coef=0.1, in_reward=True))[1]


def test_row_kl_sums_over_trained_tokens() -> None:
    policy = np.array([-1.0, -2.0, -3.0, -4.0, np.nan], dtype=np.float32)
    reference = np.array([-1.5, -1.0, -3.0, -2.0, np.nan], dtype=np.float32)
    mask, lengths = np.array([True, True, False, True, False]), np.array([3, 0, 1, 1])
    assert row_kl("k1", policy, reference, mask, lengths).tolist() == [0.5 - 1.0, 0.0, -2.0, 0.0]
    assert row_kl("k2", policy, reference, mask, lengths).tolist() == [0.125 + 0.5, 0.0, 2.0, 0.0]
    k3 = [math.exp(-0.5) - 0.5 + math.e - 2, 0.0, math.exp(2) - 3, 0.0]
    assert row_kl("k3", policy, reference, mask, lengths).tolist() == pytest.approx(k3)


# The entropy bonus.


def test_the_entropy_bonus_is_subtracted_from_the_loss() -> None:
    inputs = row_inputs([1.0, 1.0, 1.0], [0.0], [3], [True, True, False], entropy=[1.0, 3.0, 50.0])
    loss, metrics = loss_of(inputs, 2, 1, entropy_coef=0.1)
    assert loss.item() == pytest.approx(-0.1 * 4.0 / 2)
    assert metrics["entropy"] == Mean(total=4.0, weight=2)
    loss.backward()
    assert inputs.entropy is not None
    assert inputs.entropy.grad is not None
    assert inputs.entropy.grad.tolist() == pytest.approx([-0.05, -0.05, 0.0])


def test_entropy_is_reported_without_a_bonus_and_required_for_one() -> None:
    loss, metrics = loss_of(row_inputs([1.0], [0.0], [1], entropy=[2.0]), 1, 1)
    assert (loss.item(), metrics["entropy"].value) == (0.0, 2.0)
    with pytest.raises(ValueError, match=r"loss\.entropy_coef is 0\.1, but the inputs lack entropy"):
        loss_of(row_inputs([1.0], [0.0], [1]), 1, 1, entropy_coef=0.1)


# The correction of the engine's mismatch. With r = 1 and A = -1, a token's loss is its weight.


def corrected(correction: CorrectionConfig) -> tuple[list[float], Metrics]:
    """The weights of two sequences, with w = 4, 0.5 and w = 0.25, 1 and an untrained 100; and the metrics."""
    importance, mask = [4.0, 0.5, 0.25, 1.0, 100.0], [True] * 4 + [False]
    inputs = row_inputs([1.0] * 5, [-1.0, -1.0], [2, 3], mask, importance=importance)
    loss, metrics = loss_of(inputs, 1, 1, correction=correction)
    return gradient_of(inputs, loss)[:4], metrics


def test_mismatch_is_reported_without_a_correction() -> None:
    weights, metrics = corrected(NoCorrection())
    assert weights == [1.0] * 4
    assert_mean(metrics["mismatch/weight"], 5.75, 4)
    assert_mean(metrics["mismatch/mean"], 5 * math.log(2), 4)
    assert metrics["mismatch/max"].value == pytest.approx(2 * math.log(2))
    assert not any(name.startswith("correction") for name in metrics)


def test_truncated_weights() -> None:
    weights, metrics = corrected(TruncatedCorrection(cap=2.0))
    assert weights == pytest.approx([2.0, 0.5, 0.25, 1.0])
    assert_mean(metrics["correction/weight"], 3.75, 4)
    assert metrics["correction/truncated"] == Mean(total=1.0, weight=4)
    # Products 2 and 0.25 over the sequences' trained tokens.
    weights, metrics = corrected(TruncatedCorrection(level="sequence", cap=1.5))
    assert weights == pytest.approx([1.5, 1.5, 0.25, 0.25])
    assert_mean(metrics["mismatch/weight"], 4.5, 4)
    assert metrics["correction/truncated"] == Mean(total=2.0, weight=4)


def test_masked_weights_outside_the_bounds_are_zero() -> None:
    weights, metrics = corrected(MaskedCorrection(low=0.4, high=3.0))
    assert weights == pytest.approx([0.0, 0.5, 0.0, 1.0])
    assert_mean(metrics["correction/weight"], 1.5, 4)
    assert metrics["correction/masked"] == Mean(total=2.0, weight=4)
    weights, metrics = corrected(MaskedCorrection(level="sequence", low=0.4, high=3.0))
    assert weights == pytest.approx([2.0, 2.0, 0.0, 0.0])
    assert metrics["correction/masked"] == Mean(total=2.0, weight=4)


def test_the_correction_weights_the_policy_term_only() -> None:
    inputs = row_inputs([1.0], [-1.0], [1], importance=[0.5], reference=[1.0], entropy=[3.0])
    loss, _ = loss_of(inputs, 1, 1, kl=KlConfig(coef=0.1), correction=TruncatedCorrection(), entropy_coef=0.01)
    assert loss.item() == pytest.approx(0.5 + 0.1 * (math.e - 2) - 0.03)


def test_a_correction_needs_sampler_logprobs() -> None:
    with pytest.raises(ValueError, match=r'correction\.kind is "masked", but the inputs lack sampler_logprobs'):
        loss_of(row_inputs([1.0], [0.0], [1]), 1, 1, correction=MaskedCorrection())
    assert "mismatch/mean" not in loss_of(row_inputs([1.0], [0.0], [1]), 1, 1)[1]


# Exactness under any split.


def random_inputs(lengths: list[int], seed: int) -> dict[str, Tensor]:
    """Columns whose ratios, importance weights and KL estimates are on all sides of their bounds."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    names = ("policy_logprobs", "behavior_logprobs", "sampler_logprobs", "reference_logprobs")
    columns = {name: -torch.rand(num_tokens, generator=generator, dtype=torch.float64) for name in names}
    columns["advantages"] = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    columns["loss_mask"] = torch.rand(num_tokens, generator=generator) < 0.7
    return columns


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
    loss=st.sampled_from(LOSSES),
    aggregation=st.sampled_from(AGGREGATIONS),
    correction=st.sampled_from(CORRECTIONS),
)
def test_sum_over_any_split_equals_the_whole(
    lengths: list[int], seed: int, loss: LossConfig, aggregation: Aggregation, correction: CorrectionConfig
) -> None:
    columns = random_inputs(lengths, seed)
    mask = columns["loss_mask"]
    num_live = max(1, sum(bool(part.any()) for part in torch.split(mask, lengths)))
    config = loss.replace(aggregation=aggregation, entropy_coef=0.02)

    def loss_and_grad(groups: list[int]) -> tuple[Tensor, Tensor, Metrics]:
        leaf = columns["policy_logprobs"].clone().requires_grad_()
        total, parts, row = torch.zeros((), dtype=torch.float64), [], 0
        for size in groups:
            start, stop = sum(lengths[:row]), sum(lengths[: row + size])
            tokens = {name: column[start:stop] for name, column in columns.items()}
            tokens["policy_logprobs"] = leaf[start:stop]
            tokens["advantages"] = columns["advantages"][row : row + size]
            # Some tensor that depends on the policy stands for the entropy.
            inputs = LossInputs.from_rows(
                **tokens, entropy=-leaf[start:stop] / 2, response_lengths=torch.tensor(lengths[row : row + size])
            )
            share, metrics = loss_of(inputs, max(1, int(mask.sum())), num_live, config, KlConfig(coef=0.05), correction)
            share.backward()
            total, row = total + share.detach(), row + size
            parts.append(metrics)
        assert leaf.grad is not None
        return total, leaf.grad, merge_metrics(parts)

    cuts = torch.rand(len(lengths) - 1, generator=torch.Generator().manual_seed(seed)) < 0.5
    whole, whole_grad, whole_metrics = loss_and_grad([len(lengths)])
    split, split_grad, split_metrics = loss_and_grad(_run_lengths([bool(cut) for cut in cuts]))
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(split_grad, whole_grad, rtol=1e-12, atol=1e-12)
    assert values(split_metrics) == pytest.approx(values(whole_metrics))
    if mask.any():
        assert whole_metrics["loss"].value == pytest.approx(whole.item())


def _run_lengths(cuts: list[bool]) -> list[int]:
    """Sizes of the groups that cutting after the marked items leaves."""
    sizes = [1]
    for cut in cuts:
        if cut:
            sizes.append(1)
        else:
            sizes[-1] += 1
    return sizes


# Edges.

every_loss = pytest.mark.parametrize("loss", LOSSES, ids=["clipped", "dual_clip", "gspo", "cispo"])


@every_loss
def test_without_trained_tokens_the_loss_is_zero_with_a_graph(loss: LossConfig) -> None:
    inputs = row_inputs([3.0, 1.0], [1.0], [2], [False, False], importance=[1.0, 2.0], entropy=[1.0, 1.0])
    share, metrics = loss_of(inputs, 10, 5, loss)
    assert share.item() == 0.0
    assert gradient_of(inputs, share) == [0.0, 0.0]
    assert metrics["ratio"] == metrics["mismatch/mean"] == metrics["entropy"] == Mean(total=0.0, weight=0)
    assert "ratio_max" not in metrics
    assert "mismatch/max" not in metrics


@every_loss
def test_a_micro_batch_without_sequences(loss: LossConfig) -> None:
    inputs = row_inputs([], [], [])
    assert loss_of(inputs, 10, 5, loss)[0].item() == 0.0


@every_loss
@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda correction: correction.kind)
def test_untrained_tokens_cannot_poison_the_gradient(loss: LossConfig, correction: CorrectionConfig) -> None:
    mask, nan = [True, False, False], math.nan
    inputs = row_inputs(
        [1.0, nan, 0.0],
        [1.0],
        [3],
        mask,
        importance=[1.0, nan, nan],
        reference=[0.0, nan, nan],
        entropy=[1.0, nan, nan],
    )
    share, metrics = loss_of(inputs, 1, 1, loss.replace(entropy_coef=0.5), KlConfig(coef=0.1), correction)
    grad = gradient_of(inputs, share)
    assert share.item() == (-0.5 if loss.kind == "cispo" else -1.5)
    assert grad == [-1.0, 0.0, 0.0]
    assert all(math.isfinite(value) for value in values(metrics).values())


@every_loss
@pytest.mark.parametrize("column", ["policy", "behavior", "sampler", "reference", "advantages"])
def test_a_non_finite_value_makes_the_loss_nan(loss: LossConfig, column: str) -> None:
    for value, correction in product((math.nan, math.inf, -math.inf), CORRECTIONS):
        columns = {name: torch.zeros(2) for name in ("policy", "behavior", "sampler", "reference", "advantages")}
        columns[column][1] = value
        inputs = LossInputs.from_rows(
            policy_logprobs=columns["policy"].requires_grad_(),
            behavior_logprobs=columns["behavior"],
            advantages=columns["advantages"],
            loss_mask=torch.tensor([True, True]),
            response_lengths=torch.tensor([1, 1]),
            sampler_logprobs=columns["sampler"],
            reference_logprobs=columns["reference"],
        )
        # The reference is only reported here, and without a correction so is the sampler.
        assert not torch.isfinite(loss_of(inputs, 2, 2, loss, correction=correction)[0])


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
    with pytest.raises(ValueError, match=r"advantages has shape \(2,\), but there are 1 sequences"):
        row_inputs([1.0] * 2, [1.0, 1.0], [2])
