"""The teacher's term in the advantages or the loss, against NumPy in float64."""

from typing import Any

import numpy as np
import pytest
import torch

from rl_core.losses import LossInputs, policy_loss
from rl_core.losses.distillation import divergence
from schemas.config.distillation import DistillationConfig
from schemas.config.loss import ClippedLoss, KlConfig, NoCorrection

LENGTHS = np.array([4, 1, 6])
NUM_TOKENS = int(LENGTHS.sum())
MASK = np.array([True] * 7 + [False] + [True] * 3)


def config_of(**fields: Any) -> DistillationConfig:
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


def divergences_of(kind: str, student: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """Return the divergence of each token over [T, V] probabilities, token by token."""

    def kl(left: np.ndarray, right: np.ndarray) -> float:
        return float(sum(p * np.log(p / q) for p, q in zip(left, right, strict=True)))

    found = []
    for p, q in zip(student, teacher, strict=True):
        middle = (p + q) / 2
        values = {"reverse_kl": kl(p, q), "forward_kl": kl(q, p), "js": (kl(p, middle) + kl(q, middle)) / 2}
        found.append(values[kind])
    return np.array(found)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "js"])
def test_divergences_over_the_top_tokens_and_the_rest_are_those_of_numpy(kind: str, aggregation: str) -> None:
    columns, generator = random_columns(), np.random.default_rng(4)
    student, teacher = (generator.dirichlet(np.ones(9), size=NUM_TOKENS) for _ in range(2))
    top = np.argsort(-teacher, -1)[:, :4]
    own, others = (np.take_along_axis(each, top, -1) for each in (student, teacher))
    inputs = inputs_of(columns | {"policy_top_logprobs": np.log(own), "teacher_top_logprobs": np.log(others)})
    config = config_of(divergence=kind, weight=0.7, reward_weight=0.5)
    counts = {"norm_tokens": 10, "num_loss_tokens": int(MASK.sum()), "num_live_sequences": len(LENGTHS)}
    losses = ClippedLoss(aggregation=aggregation), KlConfig(), NoCorrection()
    loss, metrics = policy_loss(inputs, *losses, **counts, distillation=config)
    alone, _ = policy_loss(inputs_of(columns), *losses, **counts)  # the reward's part is linear in the advantages

    merged = [np.column_stack([each, 1 - each.sum(-1)]) for each in (own, others)]
    expected = divergences_of(kind, *merged)
    assert (expected <= divergences_of(kind, student, teacher) + 1e-12).all()
    rows = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    weights = MASK / MASK.sum()
    if aggregation == "seq_mean_token_mean":
        weights = MASK / (np.bincount(rows, MASK)[rows] * len(LENGTHS))
    assert loss.item() == pytest.approx(0.5 * alone.item() + 0.7 * (weights * expected).sum(), rel=1e-12)
    assert metrics["teacher/divergence"].value == pytest.approx(expected[MASK].mean(), rel=1e-12)
    difference = columns["behavior_logprobs"] - columns["teacher_logprobs"]
    assert metrics["teacher/kl"].value == pytest.approx(difference[MASK].mean(), rel=1e-12)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "js"])
def test_over_all_tokens_a_divergence_and_its_gradient_are_exact(kind: str) -> None:
    logits = torch.tensor([[0.3, -0.2, 1.0, 0.1]], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([[1.0, 0.5, -1.0, 0.0]], dtype=torch.float64), -1)
    policy = torch.log_softmax(logits, -1)
    (ours,) = torch.autograd.grad(divergence(kind, policy, teacher).sum(), logits, retain_graph=True)
    p, q = policy.exp(), teacher.exp()
    middle = ((p + q) / 2).log()
    js = (p * (policy - middle) + q * (teacher - middle)) / 2
    terms = {"reverse_kl": p * (policy - teacher), "forward_kl": q * (teacher - policy), "js": js}
    (exact,) = torch.autograd.grad(terms[kind].sum(), logits)
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(divergence(kind, policy, teacher), terms[kind].sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "js"])
def test_a_teacher_that_is_the_policy_has_no_divergence_and_no_gradient(kind: str) -> None:
    for scale in (1.0, 30.0):  # one with, one without probability outside of the top tokens
        logits = (scale * torch.arange(9.0)).repeat(2, 1).requires_grad_()
        policy = torch.log_softmax(logits, -1)[:, -3:]
        terms = divergence(kind, policy, policy.detach())
        (gradient,) = torch.autograd.grad(terms.sum(), logits)
        torch.testing.assert_close(terms, torch.zeros(2), rtol=0, atol=1e-6)
        torch.testing.assert_close(gradient, torch.zeros(2, 9), rtol=0, atol=1e-6)


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
    with pytest.raises(ValueError, match="those of the top tokens"):
        loss_of(inputs_of(random_columns()), config_of(divergence="js"))
