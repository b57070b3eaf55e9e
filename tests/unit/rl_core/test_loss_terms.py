"""The KL term, the entropy bonus, observations and the importance correction, computed by hand."""

import math

import numpy as np
import pytest
import torch

from rl_core.losses import policy_loss
from rl_core.losses.base import Surrogate
from rl_core.losses.kl import kl_estimate, row_kl
from rl_core.losses.report import report
from schemas.config.loss import (
    ClippedLoss,
    CorrectionConfig,
    KlConfig,
    KlEstimator,
    MaskedCorrection,
    NoCorrection,
    RejectedCorrection,
    TruncatedCorrection,
)
from schemas.metrics import Mean, Metrics
from tests.unit.rl_core.loss_inputs import (
    NO_CORRECTION,
    NO_KL,
    assert_mean,
    floats,
    gradient_of,
    loss_of,
    row_inputs,
)


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


def test_a_loss_may_clip_on_both_sides_on_one_or_not_at_all() -> None:
    inputs, values = row_inputs([1.0, 1.0], [0.0], [2]), torch.zeros(2)
    low, high = torch.tensor([True, False]), torch.tensor([False, False])
    for clipped, fractions in (
        ({}, {}),
        ({"low": low}, {"clip_fraction": 0.5, "clip_fraction/low": 0.5}),
        ({"low": low, "high": high}, {"clip_fraction": 0.5, "clip_fraction/low": 0.5, "clip_fraction/high": 0.0}),
    ):
        metrics = report(inputs, Surrogate(values, values, clipped), {}, values.sum(), 1.0)
        assert {name: each.value for name, each in metrics.items() if name.startswith("clip")} == fractions


def test_the_mean_gradient_is_zero_for_k1_and_that_of_a_kl_for_k2_and_k3() -> None:
    logits = floats([0.3, -0.2, 1.0]).requires_grad_()
    reference = torch.log_softmax(floats([1.0, 0.5, -1.0]), -1)
    logprobs = torch.log_softmax(logits, -1)
    policy = logprobs.exp().detach()

    def expected_gradient(estimator: KlEstimator) -> list[float]:
        """Return the gradient of the estimate as a loss, in expectation over tokens sampled from the policy."""
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


def corrected(correction: CorrectionConfig) -> tuple[list[float], Metrics]:
    """Return the weights of two sequences, with w = 4, 0.5 and w = 0.25, 1 and an untrained 100; and the metrics."""
    # With r = 1 and A = -1, a token's loss is its weight.
    importance, mask = [4.0, 0.5, 0.25, 1.0, 100.0], [True] * 4 + [False]
    inputs = row_inputs([1.0] * 5, [-1.0, -1.0], [2, 3], mask, importance=importance)
    loss, metrics = loss_of(inputs, 1, 1, correction=correction)
    return gradient_of(inputs, loss)[:4], metrics


def test_mismatch_is_reported_without_a_correction() -> None:
    weights, metrics = corrected(NoCorrection())
    assert weights == [1.0] * 4
    assert_mean(metrics["mismatch/weight"], 5.75, 4)
    # (4 + 0.5 + 0.25 + 1)^2 / (4 * (16 + 0.25 + 0.0625 + 1)).
    assert metrics["mismatch/ess"].value == pytest.approx(33.0625 / 69.25)
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


def test_rejected_tokens_and_responses() -> None:
    # Geometric means sqrt(4 * 0.5) and sqrt(0.25 * 1).
    weights, metrics = corrected(RejectedCorrection(low=0.9, high=1.5))
    assert weights == [1.0, 1.0, 0.0, 0.0]
    assert_mean(metrics["mismatch/weight"], 2 * np.sqrt(2) + 2 * 0.5, 4)
    assert metrics["correction/weight"] == metrics["correction/masked"] == Mean(total=2.0, weight=4)
    assert "correction/truncated" not in metrics
    weights, metrics = corrected(RejectedCorrection(low=0.9, high=1.5, cap=2.5))
    assert weights == pytest.approx([2.5, 0.5, 0.0, 0.0])
    assert metrics["correction/truncated"] == Mean(total=1.0, weight=4)
    assert corrected(RejectedCorrection(level="token", low=0.4, high=3.0))[0] == [0.0, 1.0, 0.0, 1.0]
    assert corrected(RejectedCorrection(level="sequence", low=0.4, high=3.0))[0] == [1.0, 1.0, 0.0, 0.0]


def test_observations_add_their_mean_cross_entropy() -> None:
    inputs = row_inputs([1.0, 0.5, 0.25, 0.125], [1.0, 1.0], [3, 1], [True, False, False, False])
    counts = {"norm_tokens": 10, "num_loss_tokens": 1, "num_live_sequences": 1, "num_observation_tokens": 4}
    loss, metrics = policy_loss(inputs, ClippedLoss(observation_coef=0.1), NO_KL, NO_CORRECTION, **counts)
    total = math.log(2) + math.log(4)  # not of the row without a loss token; 2 of the update's 4
    assert_mean(metrics["observation_cross_entropy"], total, 2)
    assert loss.item() == pytest.approx(-1 + 0.1 * total / 4)
    assert gradient_of(inputs, loss) == pytest.approx([-1, -0.025, -0.025, 0])


def test_observations_that_the_plan_does_not_count_are_refused() -> None:
    inputs = row_inputs([1.0, 0.5], [1.0], [2], [True, False])
    with pytest.raises(ValueError, match="1 tokens have no loss, but the plan counts 0 of the update"):
        loss_of(inputs, 1, 1, observation_coef=0.1)


def test_the_correction_weights_the_policy_term_only() -> None:
    inputs = row_inputs([1.0], [-1.0], [1], importance=[0.5], reference=[1.0], entropy=[3.0])
    loss, _ = loss_of(inputs, 1, 1, kl=KlConfig(coef=0.1), correction=TruncatedCorrection(), entropy_coef=0.01)
    assert loss.item() == pytest.approx(0.5 + 0.1 * (math.e - 2) - 0.03)


def test_a_correction_needs_sampler_logprobs() -> None:
    with pytest.raises(ValueError, match=r'correction\.kind is "masked", but the inputs lack sampler_logprobs'):
        loss_of(row_inputs([1.0], [0.0], [1]), 1, 1, correction=MaskedCorrection())
    assert "mismatch/mean" not in loss_of(row_inputs([1.0], [0.0], [1]), 1, 1)[1]
