"""The teacher's term in the advantages, against NumPy in float64."""

import numpy as np
import pytest
import torch

from rl_core.losses import LossInputs, policy_loss
from schemas.config.distillation import DistillationConfig
from schemas.config.loss import ClippedLoss, KlConfig, NoCorrection

LENGTHS = np.array([4, 1, 6])
NUM_TOKENS = int(LENGTHS.sum())
MASK = np.array([True] * 7 + [False] + [True] * 3)


def config_of(**fields: float) -> DistillationConfig:
    return DistillationConfig.model_validate({"teachers": {"big": {"path": "teacher"}}, **fields})


def random_columns() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    behavior = -generator.exponential(size=NUM_TOKENS)
    return {
        "policy_logprobs": behavior + 0.3 * generator.standard_normal(NUM_TOKENS),
        "behavior_logprobs": behavior,
        "teacher_logprobs": -generator.exponential(size=NUM_TOKENS),
        "advantages": np.repeat(generator.standard_normal(len(LENGTHS)), LENGTHS),
    }


def inputs_of(columns: dict[str, np.ndarray]) -> LossInputs:
    tensors = {name: torch.from_numpy(values.copy()) for name, values in columns.items()}
    tensors["policy_logprobs"].requires_grad_()
    return LossInputs.from_rows(**tensors, loss_mask=torch.from_numpy(MASK), response_lengths=torch.from_numpy(LENGTHS))


def loss_of(inputs: LossInputs, config: DistillationConfig | None) -> tuple[torch.Tensor, dict[str, float]]:
    counts = {"norm_tokens": 10, "num_loss_tokens": int(MASK.sum()), "num_live_sequences": len(LENGTHS)}
    loss, metrics = policy_loss(inputs, ClippedLoss(), KlConfig(), NoCorrection(), **counts, distillation=config)
    loss.backward()
    return loss, {name: metric.value for name, metric in metrics.items()}


@pytest.mark.parametrize(("weight", "reward_weight"), [(1.0, 0.0), (0.3, 1.0), (2.0, 0.5)])
def test_loss_gradient_and_kl_are_those_of_numpy(weight: float, reward_weight: float) -> None:
    columns = random_columns()
    inputs = inputs_of(columns)
    loss, metrics = loss_of(inputs, config_of(weight=weight, reward_weight=reward_weight))

    policy, behavior, teacher, advantages = (columns[name][MASK] for name in columns)
    difference = behavior - teacher
    expected = reward_weight * advantages - weight * difference
    ratio = np.exp(policy - behavior)
    clipped = np.clip(ratio, 0.8, 1.2)
    losses = np.maximum(-expected * ratio, -expected * clipped)
    has_gradient = -expected * ratio >= -expected * clipped
    assert loss.item() == pytest.approx(losses.mean(), rel=1e-12)
    gradient = np.zeros(NUM_TOKENS)
    gradient[MASK] = np.where(has_gradient, -expected * ratio, 0) / MASK.sum()
    assert inputs.policy_logprobs.grad is not None
    np.testing.assert_allclose(inputs.policy_logprobs.grad.numpy(), gradient, rtol=1e-12, atol=0)
    assert metrics["teacher/kl"] == pytest.approx(difference.mean(), rel=1e-12)


def test_the_mean_gradient_on_policy_is_that_of_the_reverse_kl() -> None:
    logits = torch.tensor([0.3, -0.2, 1.0, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([1.0, 0.5, -1.0, 0.0], dtype=torch.float64), -1)
    policy = torch.log_softmax(logits, -1)
    one = torch.ones(4, dtype=torch.int64)
    inputs = LossInputs.from_rows(
        policy_logprobs=policy,
        behavior_logprobs=policy.detach(),
        teacher_logprobs=teacher,
        advantages=torch.zeros(4, dtype=torch.float64),
        loss_mask=one.bool(),
        response_lengths=one,
    )
    grads = []
    for token in range(4):  # each token alone, as if it was sampled
        chosen = LossInputs.from_rows(
            **{
                name: getattr(inputs, name)[token : token + 1]
                for name in ("policy_logprobs", "behavior_logprobs", "teacher_logprobs", "advantages", "loss_mask")
            },
            response_lengths=one[:1],
        )
        counts = {"norm_tokens": 1, "num_loss_tokens": 1, "num_live_sequences": 1}
        loss, _ = policy_loss(chosen, ClippedLoss(), KlConfig(), NoCorrection(), **counts, distillation=config_of())
        grads.append(torch.autograd.grad(loss, logits, retain_graph=True)[0])
    expected = (policy.detach().exp()[:, None] * torch.stack(grads)).sum(0)
    (reverse,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits)
    torch.testing.assert_close(expected, reverse, rtol=1e-12, atol=1e-12)


def test_without_distillation_the_teachers_column_changes_nothing() -> None:
    columns = random_columns()
    with_teacher, metrics = loss_of(inputs_of(columns), None)
    del columns["teacher_logprobs"]
    without, _ = loss_of(inputs_of(columns), None)
    assert with_teacher.item() == without.item()
    assert "teacher/kl" not in metrics


def test_a_missing_column_is_refused_and_one_that_is_not_finite_stops_the_update() -> None:
    columns = random_columns()
    columns["teacher_logprobs"][2] = -np.inf
    assert np.isnan(loss_of(inputs_of(columns), config_of())[0].item())
    columns["teacher_logprobs"][[2, 7]] = -1.0, np.nan  # the last one isn't trained
    assert np.isfinite(loss_of(inputs_of(columns), config_of())[0].item())
    del columns["teacher_logprobs"]
    with pytest.raises(ValueError, match="distillation is configured, but the inputs lack teacher_logprobs"):
        loss_of(inputs_of(columns), config_of())
