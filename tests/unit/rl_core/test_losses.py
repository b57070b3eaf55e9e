"""Policy losses and their aggregation, computed by hand."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rl_core.losses import LossInputs
from schemas.config.loss import (
    Aggregation,
    CispoLoss,
    ClipCovLoss,
    CrossEntropyLoss,
    DppoLoss,
    GmpoLoss,
    GspoLoss,
    KlCovLoss,
    LossConfig,
    SapoLoss,
)
from schemas.metrics import Max, Mean
from tests.unit.rl_core.loss_inputs import (
    assert_mean,
    floats,
    gradient_of,
    loss_of,
    row_inputs,
)


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
    # A = 3: r 2 is clipped to 1.4. A = -1: r 0.5 is clipped to 0.9.
    inputs = row_inputs([2.0, 0.5], [3.0, -1.0], [1, 1])
    loss, _ = loss_of(inputs, 2, 2, clip_low=0.1, clip_high=0.4)
    assert loss.item() == pytest.approx((-3 * 1.4 + 0.9) / 2)


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    # A = -1: r 5 would cost 5, but 3 is the most; r 2 costs 2. A = 1 is clipped at 1.2 as ever.
    inputs = row_inputs([5.0, 2.0, 5.0], [-1.0, 1.0], [2, 1])
    loss, metrics = loss_of(inputs, 3, 2, dual_clip=3.0)
    assert loss.item() == pytest.approx((3.0 + 2.0 - 1.2) / 3)
    assert gradient_of(inputs, loss) == pytest.approx([0.0, 2 / 3, 0.0])
    assert metrics["clip_fraction/dual"] == Mean(total=1.0, weight=3)
    assert metrics["clip_fraction"] == Mean(total=1.0, weight=3)
    assert "clip_fraction/dual" not in loss_of(inputs, 3, 2)[1]


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
    inputs = row_inputs([2.0, 2.0, 0.5], [3.0, -1.0], [2, 1])
    loss, metrics = loss_of(inputs, 3, 2, GspoLoss())
    assert loss.item() == pytest.approx((-3 * 1.0004 + 0.9997) / 2)
    assert gradient_of(inputs, loss) == [0.0, 0.0, 0.0]
    assert metrics["clip_fraction/high"] == Mean(total=2.0, weight=3)
    assert metrics["clip_fraction/low"] == Mean(total=1.0, weight=3)


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


def test_sapo_by_hand() -> None:
    # sigmoid(tau (r - 1)): of 1 and -0.5 with tau 1; of 1.05 and 0 with tau 1.05.
    inputs = row_inputs([2.0, 0.5, 2.0, 1.0], [1.0, -2.0], [2, 2])
    loss, metrics = loss_of(inputs, 4, 2, SapoLoss())
    gates = [1 / (1 + math.exp(-x)) for x in (1.0, -0.5, 1.05, 0.0)]
    means = [-4 * (gates[0] + gates[1]) / 2, 2 * 4 / 1.05 * (gates[2] + gates[3]) / 2]
    assert loss.item() == pytest.approx(sum(means) / 2)
    # d/dlogp = -A 4 g (1 - g) r, over 2 tokens and 2 sequences.
    slopes = [4 * gate * (1 - gate) for gate in gates]
    expected = [-slopes[0] * 2 / 4, -slopes[1] * 0.5 / 4, 2 * slopes[2] * 2 / 4, 2 * slopes[3] / 4]
    assert gradient_of(inputs, loss) == pytest.approx(expected)
    assert slopes[3] == 1.0  # on-policy, REINFORCE's
    assert "clip_fraction" not in metrics


def test_cross_entropy_by_hand() -> None:
    # Log-probs of 2 and 1/2; advantages and a token without a loss play no part.
    inputs = row_inputs([2.0, 0.5, 7.0], [5.0, -3.0], [2, 1], [True, True, False])
    loss, metrics = loss_of(inputs, 4, 2, CrossEntropyLoss())
    assert loss.item() == pytest.approx(0.0)  # -(log 2 + log 1/2) / 4 tokens of the update
    assert gradient_of(inputs, loss) == [-0.25, -0.25, 0.0]
    assert_mean(metrics["cross_entropy"], 0.0, 2)
    assert not {"ratio", "ratio_max", "approx_kl", "clip_fraction"} & metrics.keys()


def test_gmpo_in_numpy() -> None:
    # A = 1: log 2 is clipped to 0.4, log 0.5 is not. A = -2: log 0.5 is clipped to -0.3, log 3 is not.
    inputs = row_inputs([2.0, 0.5, 0.5, 3.0, 9.0], [1.0, -2.0], [2, 3], [True] * 4 + [False])
    loss, metrics = loss_of(inputs, 4, 2, GmpoLoss(clip_low=0.3, clip_high=0.4))
    means = np.exp([(0.4 + np.log(0.5)) / 2, (-0.3 + np.log(3.0)) / 2])
    assert loss.item() == pytest.approx((-means[0] + 2 * means[1]) / 2)
    # d s/d logp_t = s / |y| of a token that isn't clipped; over 2 sequences.
    assert gradient_of(inputs, loss) == pytest.approx([0.0, -means[0] / 4, 0.0, 2 * means[1] / 4, 0.0])
    assert_mean(metrics["ratio"], 2 * means.sum(), 4)
    assert metrics["clip_fraction/low"] == metrics["clip_fraction/high"] == Mean(total=1.0, weight=4)


@pytest.mark.parametrize(
    ("config", "masked"),
    [
        (DppoLoss(), [True, False, False, True, False, False]),
        (DppoLoss(divergence="kl", clip_low=0.05, clip_high=0.05), [True, False, True, True, False, False]),
        (DppoLoss(clip_low=0.25, clip_high=0.15), [True, False, False, False, False, False]),
    ],
)
def test_dppo_in_numpy(config: DppoLoss, masked: list[bool]) -> None:
    # Differences 0.2, 0.1, 0.09; -0.2, 0.2, -0.019. Binary KL 0.082, 0.020, 0.144; 0.087, 0.082, 0.043: a rare token
    # may become 20 times rarer. The fifth token moves against its advantage.
    policy, sampler = np.array([0.5, 0.5, 0.99, 0.3, 0.5, 0.001]), np.array([0.3, 0.4, 0.9, 0.5, 0.3, 0.02])
    behavior, advantages = 0.8 * sampler, np.repeat([1.5, -1.0], 3)
    inputs = LossInputs.from_rows(
        policy_logprobs=floats(np.log(policy)).requires_grad_(),
        behavior_logprobs=floats(np.log(behavior)),
        sampler_logprobs=floats(np.log(sampler)),
        advantages=floats(advantages),
        loss_mask=torch.ones(6, dtype=torch.bool),
        response_lengths=torch.tensor([3, 3]),
    )
    loss, metrics = loss_of(inputs, 6, 2, config)
    terms = np.where(masked, 0.0, -advantages * policy / behavior)
    assert loss.item() == pytest.approx(terms.mean())
    assert gradient_of(inputs, loss) == pytest.approx(terms / 6)
    assert metrics["clip_fraction/high"] == Mean(total=sum(masked[:3]), weight=6)
    assert metrics["clip_fraction/low"] == Mean(total=sum(masked[3:]), weight=6)


def test_dppo_of_a_sure_token_and_without_a_sampler() -> None:
    # Probabilities of 1 have a divergence of 0 from each other, and any other has an infinite KL from 1.
    for policy, sampler, expected in ((0.0, 0.0, -1.0), (-1e-9, 0.0, -1.0), (0.0, -0.01, 0.0)):
        inputs = LossInputs.from_rows(
            policy_logprobs=torch.tensor([policy], requires_grad=True),
            behavior_logprobs=torch.tensor([policy]),
            sampler_logprobs=torch.tensor([sampler]),
            advantages=torch.tensor([1.0]),
            loss_mask=torch.tensor([True]),
            response_lengths=torch.tensor([1]),
        )
        assert loss_of(inputs, 1, 1, DppoLoss(divergence="kl"))[0].item() == expected
    with pytest.raises(ValueError, match=r'loss\.kind is "dppo", but the inputs lack sampler_logprobs'):
        loss_of(row_inputs([1.0], [1.0], [1]), 1, 1, DppoLoss())


RATIOS, ADVANTAGES = np.array([2.0, 0.5, 1.1, 3.0, 0.9]), np.repeat([1.5, -1.0], [3, 2])
SELECTED = np.array([True, False, True, False, True])


def test_clip_cov_in_numpy() -> None:
    # A = 1.5: r 2 would be clipped to 1.3, but is masked, as 1.1 is; 0.5 is neither. A = -1: 3 is neither, 0.9 masked.
    inputs = row_inputs(RATIOS.tolist(), [1.5, -1.0], [3, 2], selected=SELECTED.tolist())
    loss, metrics = loss_of(inputs, 5, 2, ClipCovLoss(clip_low=0.2, clip_high=0.3))
    terms = np.where(SELECTED, 0.0, -ADVANTAGES * RATIOS)
    assert loss.item() == pytest.approx(terms.sum() / 5)
    assert gradient_of(inputs, loss) == pytest.approx(terms / 5)
    assert metrics["clip_fraction/cov"] == Mean(total=3.0, weight=5)
    assert metrics["clip_fraction/high"] == Mean(total=1.0, weight=5)  # of all tokens, also masked ones


def test_kl_cov_in_numpy() -> None:
    inputs = row_inputs(RATIOS.tolist(), [1.5, -1.0], [3, 2], selected=SELECTED.tolist())
    loss, metrics = loss_of(inputs, 5, 2, KlCovLoss(kl_coef=0.3))
    logs = np.log(RATIOS)
    assert loss.item() == pytest.approx((-ADVANTAGES * RATIOS + 0.3 * SELECTED * np.abs(logs)).sum() / 5)
    assert gradient_of(inputs, loss) == pytest.approx((-ADVANTAGES * RATIOS + 0.3 * SELECTED * np.sign(logs)) / 5)
    assert metrics["clip_fraction/cov"] == Mean(total=3.0, weight=5)
    assert "clip_fraction" not in metrics


@pytest.mark.parametrize("config", [ClipCovLoss(), KlCovLoss()], ids=lambda config: config.kind)
def test_a_loss_that_selects_needs_what_is_selected(config: LossConfig) -> None:
    inputs = dataclasses.replace(row_inputs([1.0], [1.0], [1]), selected=None)
    with pytest.raises(ValueError, match=rf'loss\.kind is "{config.kind}", but the inputs lack selected'):
        loss_of(inputs, 1, 1, config)


# With r = 1, a token's loss is -A.
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
