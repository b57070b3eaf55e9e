"""The clipped loss by hand, and its independence of the micro-batch split."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_core.losses import LossInputs, policy_loss
from rl_core.losses.base import aggregate
from schemas.config.loss import ClippedLoss
from schemas.metrics import Max, Mean, Metrics, merge_metrics, values


def row_inputs(
    ratios: list[float],
    advantages: list[float],
    lengths: list[int],
    mask: list[bool] | None = None,
    reference: list[float] | None = None,
) -> LossInputs:
    """Inputs whose behavior log-probs are 0, so that the policy's are log(ratio)."""
    policy = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    return LossInputs.from_rows(
        policy_logprobs=policy,
        behavior_logprobs=torch.zeros_like(policy),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.tensor(mask if mask is not None else [True] * len(ratios)),
        response_lengths=torch.tensor(lengths),
        reference_logprobs=None if reference is None else torch.tensor(reference, dtype=torch.float64),
    )


def loss_of(inputs: LossInputs, num_tokens: int, num_sequences: int, **config: object) -> tuple[Tensor, Metrics]:
    return policy_loss(inputs, ClippedLoss(**config), num_loss_tokens=num_tokens, num_live_sequences=num_sequences)


def test_clipping_by_hand() -> None:
    # A = 1: r 2.0 is clipped to 1.2, r 0.5 is not. A = -1: r 2.0 is not clipped, r 0.5 is clipped to 0.8.
    inputs = row_inputs([2.0, 0.5, 2.0, 0.5], [1.0, -1.0], [2, 2])
    loss, metrics = loss_of(inputs, 4, 2)
    assert loss.item() == pytest.approx((-1.2 - 0.5 + 2.0 + 0.8) / 4)
    loss.backward()
    # d(-A r)/dlogp = -A r where the plain branch wins, else 0; divided by the 4 tokens.
    assert inputs.policy_logprobs.grad is not None
    assert inputs.policy_logprobs.grad.tolist() == pytest.approx([0.0, -0.125, 0.5, 0.0])
    assert metrics["ratio"] == Mean(total=5.0, weight=4)
    assert isinstance(metrics["ratio_max"], Max)
    assert metrics["ratio_max"].value == pytest.approx(2.0)
    assert metrics["clip_fraction"] == Mean(total=2.0, weight=4)
    # k3 of r is r - 1 - log r; the logs of 2 and 1/2 cancel.
    assert metrics["approx_kl"].value == pytest.approx(1.0 / 4)
    assert metrics["loss"].value == pytest.approx(loss.item())


def test_clip_range_has_two_sides() -> None:
    inputs = row_inputs([2.0, 0.5], [1.0, -1.0], [1, 1])
    loss, _ = loss_of(inputs, 2, 2, clip_low=0.1, clip_high=0.4)
    assert loss.item() == pytest.approx((-1.4 + 0.9) / 2)


def test_kl_term_is_k3_of_reference_over_policy() -> None:
    # r = 1 and A = 0, so only the KL term is left; x = log 2 gives 2 - 1 - log 2.
    inputs = row_inputs([1.0, 1.0], [0.0], [2], reference=[math.log(2), 0.0])
    loss, metrics = loss_of(inputs, 2, 1, kl_coef=0.1)
    assert loss.item() == pytest.approx(0.1 * (1 - math.log(2)) / 2)
    assert metrics["kl"].value == pytest.approx((1 - math.log(2)) / 2)
    loss.backward()
    # d k3/dlogp = 1 - e^x = -1.
    assert inputs.policy_logprobs.grad is not None
    assert inputs.policy_logprobs.grad.tolist() == pytest.approx([-0.05, 0.0])


def test_kl_is_reported_without_a_coefficient_and_needs_a_reference_with_one() -> None:
    loss, metrics = loss_of(row_inputs([1.0], [0.0], [1], reference=[1.0]), 1, 1)
    assert loss.item() == 0.0
    assert metrics["kl"].value == pytest.approx(math.e - 2)
    with pytest.raises(ValueError, match=r"loss\.kl_coef is 0\.1, but there are no reference_logprobs"):
        loss_of(row_inputs([1.0], [0.0], [1]), 1, 1, kl_coef=0.1)


@pytest.mark.parametrize("groups", [[[0], [1], [2]], [[0, 1], [2]], [[0], [1, 2]], [[0, 1, 2]]])
def test_token_mean_of_lengths_4_1_1_is_4(groups: list[list[int]]) -> None:
    # Losses 1, 10, 10 per token: (4 * 1 + 10 + 10) / 6 = 4; a mean of micro-batch means is 7 or 5.2.
    lengths, losses = [4, 1, 1], [1.0, 10.0, 10.0]
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        rows = [lengths[row] for row in group]
        # With r = 1 a token's loss is -A.
        inputs = row_inputs([1.0] * sum(rows), [-losses[row] for row in group], rows)
        total += loss_of(inputs, 6, 3)[0]
    assert total.item() == pytest.approx(4.0)


def test_sequence_mean_weighs_sequences_alike() -> None:
    # Token means 1, 10, 10 over 3 live sequences; the fourth is fully masked and counts nowhere.
    inputs = row_inputs([1.0] * 8, [-1.0, -10.0, -10.0, 5.0], [4, 1, 1, 2], mask=[True] * 6 + [False] * 2)
    loss, metrics = loss_of(inputs, 6, 3, aggregation="sequence_mean")
    assert loss.item() == pytest.approx(7.0)
    assert metrics["loss"] == Mean(total=21.0, weight=3)


def test_sequence_mean_divides_by_loss_tokens_not_by_length() -> None:
    # Of three tokens one is trained: its sequence's token mean is its loss, 6.
    inputs = row_inputs([1.0] * 3, [-6.0], [3], mask=[False, True, False])
    assert aggregate(torch.tensor([6.0]), inputs.trained(), "sequence_mean").item() == 6.0
    assert loss_of(inputs, 1, 1, aggregation="sequence_mean")[0].item() == pytest.approx(6.0)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.integers(0, 2**31),
    st.sampled_from(["token_mean", "sequence_mean"]),
)
def test_sum_over_any_split_equals_the_whole(lengths: list[int], seed: int, aggregation: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    policy, behavior, reference = (-torch.rand(num_tokens, generator=generator, dtype=torch.float64) for _ in range(3))
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    mask = torch.rand(num_tokens, generator=generator) < 0.7
    cuts = torch.rand(len(lengths) - 1, generator=generator) < 0.5
    sizes = _run_lengths([bool(cut) for cut in cuts])
    sequence_mask = torch.split(mask, lengths)
    num_live = max(1, sum(bool(part.any()) for part in sequence_mask))

    def loss_and_grad(groups: list[int]) -> tuple[Tensor, Tensor, Metrics]:
        leaf = policy.clone().requires_grad_()
        total, parts, row = torch.zeros((), dtype=torch.float64), [], 0
        for size in groups:
            start, stop = sum(lengths[:row]), sum(lengths[: row + size])
            inputs = LossInputs.from_rows(
                policy_logprobs=leaf[start:stop],
                behavior_logprobs=behavior[start:stop],
                advantages=advantages[row : row + size],
                loss_mask=mask[start:stop],
                response_lengths=torch.tensor(lengths[row : row + size]),
                reference_logprobs=reference[start:stop],
            )
            loss, metrics = loss_of(inputs, max(1, int(mask.sum())), num_live, kl_coef=0.05, aggregation=aggregation)
            loss.backward()
            total, row = total + loss.detach(), row + size
            parts.append(metrics)
        assert leaf.grad is not None
        return total, leaf.grad, merge_metrics(parts)

    whole, whole_grad, whole_metrics = loss_and_grad([len(lengths)])
    split, split_grad, split_metrics = loss_and_grad(sizes)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(split_grad, whole_grad, rtol=1e-12, atol=1e-12)
    assert values(split_metrics) == pytest.approx(values(whole_metrics))


def _run_lengths(cuts: list[bool]) -> list[int]:
    """Sizes of the groups that cutting after the marked items leaves."""
    sizes = [1]
    for cut in cuts:
        if cut:
            sizes.append(1)
        else:
            sizes[-1] += 1
    return sizes


def test_nothing_trained_gives_a_zero_with_a_graph() -> None:
    inputs = row_inputs([3.0, 1.0], [1.0], [2], mask=[False, False])
    loss, metrics = loss_of(inputs, 10, 5)
    loss.backward()
    assert loss.item() == 0.0
    assert inputs.policy_logprobs.grad is not None
    assert inputs.policy_logprobs.grad.tolist() == [0.0, 0.0]
    assert metrics["ratio"] == Mean(total=0.0, weight=0)
    assert "ratio_max" not in metrics


def test_untrained_tokens_cannot_poison_the_gradient() -> None:
    inputs = row_inputs([1.0, 1e300, 0.0], [1.0], [3], mask=[True, False, False])
    loss, _ = loss_of(inputs, 1, 1)
    loss.backward()
    assert loss.item() == -1.0
    assert inputs.policy_logprobs.grad is not None
    assert inputs.policy_logprobs.grad.tolist() == [-1.0, 0.0, 0.0]


def test_a_huge_ratio_keeps_a_finite_gradient() -> None:
    policy = torch.tensor([200.0], requires_grad=True)
    inputs = LossInputs.from_rows(
        policy_logprobs=policy,
        behavior_logprobs=torch.tensor([0.0]),
        advantages=torch.tensor([1.0]),
        loss_mask=torch.tensor([True]),
        response_lengths=torch.tensor([1]),
    )
    loss, _ = loss_of(inputs, 1, 1)
    loss.backward()
    assert loss.item() == pytest.approx(-1.2)
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0]


def test_inputs_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match=r"policy_logprobs has shape \(3,\), but response_lengths add up to 2"):
        row_inputs([1.0] * 3, [1.0], [2])
    with pytest.raises(ValueError, match=r"advantages has shape \(2,\), but there are 1 sequences"):
        row_inputs([1.0] * 2, [1.0, 1.0], [2])
