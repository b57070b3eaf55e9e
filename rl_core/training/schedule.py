"""The learning rate as a pure function of a run's progress, so that resuming needs no scheduler state."""

import math

from schemas.config.optim import OptimConfig


def learning_rate(config: OptimConfig, num_updates: int, step: int, part: int, num_steps: int) -> float:
    """Return the learning rate of update `part` (from 0) of step `step` (from 0) of a run of `num_steps` steps.

    It warms up linearly over the first `warmup_updates`, then is constant, or decays by a half cosine to 0 at the end
    of the run. The decay follows the steps, not the updates: a fork may have other `updates_per_step` than the steps
    that it took over, and a step with few rows has fewer updates than that. If the warm-up is as long as the run in the
    updates of such a fork, past it the rate is that of a decay over all steps.

    Args:
        config: The optimizer's config.
        num_updates: Updates before this one.
        step: The step.
        part: The update within the step.
        num_steps: The steps of the run.
    """
    if num_updates < config.warmup_updates:
        return config.lr * (num_updates + 1) / (config.warmup_updates + 1)
    if config.schedule == "constant":
        return config.lr
    total, done = num_steps * config.updates_per_step, step * config.updates_per_step + part
    start = config.warmup_updates if config.warmup_updates < total else 0
    progress = (done - start) / (total - start)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
