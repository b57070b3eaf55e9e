"""On-policy distillation from a teacher's log-probs. T trained tokens, K of a teacher's tokens each, in nats."""

from dataclasses import replace

import torch
from torch import Tensor

from rl_core.losses.base import LossInputs
from schemas.config.distillation import DistillationConfig

# The least probability of all tokens but K: what float32 log-probs of K tokens leave of 1 is off by about as much.
MIN_REST = 1e-6


def distill(
    trained: LossInputs, config: DistillationConfig | None
) -> tuple[LossInputs, Tensor | float, dict[str, Tensor]]:
    """Weigh the reward's advantages, and add the divergence from the teacher to them or to the loss.

    `sampled`: A = reward_weight A_reward - weight (log-prob - teacher's log-prob). Over tokens that the policy sampled,
    the mean of this difference is the reverse KL(policy, teacher) of the next token, and the policy gradient with this
    advantage is that KL's for the given prefixes: no token answers for later ones (Lu et al. 2025, "On-Policy
    Distillation", Thinking Machines; MiniLLM, arXiv:2306.08543, equation 2, sums over later tokens). The log-prob is
    that of the weights before the step's updates, a constant.

    Others: see `divergence`; it is differentiated for the same prefixes, without the noise of the sampled token.

    Args:
        trained: The trained tokens.
        config: The weights; None: no distillation.

    Returns:
        The inputs with the new advantages, [T] terms to add to the tokens' losses, and [T] values of metrics.

    Raises:
        ValueError: The inputs lack the teacher's log-probs.
    """
    if config is None:
        return trained, 0.0, {}
    policy, teacher = trained.policy_top_logprobs, trained.teacher_top_logprobs
    if trained.teacher_logprobs is None or (config.reads_top and (policy is None or teacher is None)):
        raise ValueError(
            "distillation is configured, but the inputs lack teacher_logprobs or, for this divergence, those of the "
            "top tokens; add them or leave it out"
        )
    difference = trained.behavior_logprobs.detach() - trained.teacher_logprobs
    distilled = replace(trained, advantages=distilled_advantages(config, trained.advantages, difference))
    metrics = {"teacher/kl": difference}
    if policy is None or teacher is None or not config.reads_top:
        return distilled, 0.0, metrics
    terms = divergence(config.divergence, policy, teacher)
    return distilled, config.weight * terms, metrics | {"teacher/divergence": terms.detach()}


def distilled_advantages(config: DistillationConfig, advantages: Tensor, difference: Tensor) -> Tensor:
    """Return the advantages with a teacher, [T], from those of the reward and behavior - teacher's log-prob, [T]."""
    weighted = config.reward_weight * advantages
    return weighted if config.reads_top else weighted - config.weight * difference


def divergence(kind: str, policy: Tensor, teacher: Tensor) -> Tensor:
    """Compute a divergence of distributions over K tokens and all others as one: [T], with gradient.

    Merging tokens makes a divergence smaller, never larger, so that it is a lower bound of that over all tokens.

    Args:
        kind: `reverse_kl` is KL(policy, teacher), `forward_kl` KL(teacher, policy), and `js` the Jensen-Shannon
            divergence, the mean of the KLs of both from their mean (GKD, Agarwal et al. 2023, arXiv:2306.13649).
        policy: [T, K] log-probs, with gradient.
        teacher: [T, K] log-probs of the same tokens.
    """
    policy, teacher = _with_rest(policy), _with_rest(teacher)
    if kind == "reverse_kl":
        return _kl(policy, teacher)
    if kind == "forward_kl":
        return _kl(teacher, policy)
    mean = torch.logaddexp(policy, teacher) - torch.log(policy.new_tensor(2.0))
    return (_kl(policy, mean) + _kl(teacher, mean)) / 2


def _kl(left: Tensor, right: Tensor) -> Tensor:
    return (left.exp() * (left - right)).sum(-1)


def _with_rest(logprobs: Tensor) -> Tensor:
    """Append the log-prob of all other tokens: [T, K + 1]."""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=MIN_REST)
    return torch.cat([logprobs, rest.log()], -1)
