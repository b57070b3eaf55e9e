"""On-policy distillation: advantages of tokens from a teacher's log-probs. T trained tokens, with log-probs in nats."""

from dataclasses import replace

import torch
from torch import Tensor

from rl_core.losses.base import LossInputs
from schemas.config.distillation import DistillationConfig


@torch.no_grad()
def distill(trained: LossInputs, config: DistillationConfig | None) -> tuple[LossInputs, dict[str, Tensor]]:
    """Add the teacher's term to the advantages: A = reward_weight A_reward - weight (log-prob - teacher's log-prob).

    Over tokens that the policy sampled, the mean of log-prob - teacher's log-prob is the reverse KL(policy, teacher) of
    the next token, and the policy gradient with this advantage is that KL's for the given prefixes: no token answers
    for later ones (Lu et al. 2025, "On-Policy Distillation", Thinking Machines; MiniLLM, arXiv:2306.08543, equation 2,
    sums over later tokens). The log-prob is that of the weights before the step's updates, a constant.

    Args:
        trained: The trained tokens.
        config: The weights; None: no distillation.

    Returns:
        The inputs with the new advantages, and [T] values of the metric `teacher/kl`.

    Raises:
        ValueError: The inputs lack the teacher's log-probs.
    """
    if config is None:
        return trained, {}
    if trained.teacher_logprobs is None:
        raise ValueError("distillation is configured, but the inputs lack teacher_logprobs; add them or leave it out")
    difference = trained.behavior_logprobs.detach() - trained.teacher_logprobs
    advantages = config.reward_weight * trained.advantages - config.weight * difference
    return replace(trained, advantages=advantages), {"teacher/kl": difference}
