"""The learning rate as a pure function of the update number, so that resuming needs no scheduler state."""

import math

from schemas.config.optim import OptimConfig


def learning_rate(config: OptimConfig, update: int, num_steps: int) -> float:
    """Return the learning rate of update number `update` (from 0) of a run of `num_steps` steps.

    It warms up linearly over `warmup_updates`, then is constant, or decays by a half cosine to 0 at the end of the run.
    """
    if update < config.warmup_updates:
        return config.lr * (update + 1) / (config.warmup_updates + 1)
    if config.schedule == "constant":
        return config.lr
    total = max(num_steps * config.updates_per_step - config.warmup_updates, 1)
    progress = min((update - config.warmup_updates) / total, 1.0)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
