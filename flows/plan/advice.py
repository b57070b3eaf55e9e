"""What to change if a run does not fit: a change that was planned too, and fits."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from operator import or_

from infra.models.load import max_positions
from infra.workers.layout import gpus_wanted
from rl_core.planning.hardware import Cluster
from rl_core.planning.memory import Phase
from schemas.config.load import override_config
from schemas.config.rollout import VllmRollout
from schemas.config.run import RunConfig
from schemas.errors import ConfigError

Changes = dict[str, str]

BUDGET_TOKENS = 64  # the largest token budget is found in these steps
SHARES = 100  # and the largest share of a GPU for an engine, in hundredths


def find_fix(config: RunConfig, cluster: Cluster, fits: Callable[[RunConfig], bool]) -> str:
    """Return advice: the first settings, each with those before it, with which the run fits.

    Args:
        config: A run that does not fit.
        cluster: The cluster that it is planned for.
        fits: Plans another config, and returns whether it fits the memory of the cluster.
    """
    for changes in accumulate(_candidates(config, cluster), or_):
        if fits(changed := _changed(config, changes)):
            if "packing.token_budget" in changes:
                changes |= largest_budget(config, changed, fits)
            return f"it fits with {' '.join(f'{name}={value}' for name, value in changes.items())}"
    return "no settings that Sluice tried make it fit: use GPUs with more memory, or more of them"


def largest_that_fits(
    config: RunConfig, phase: Phase, engine_share: float | None, fits: Callable[[RunConfig], bool]
) -> str:
    """Return the settings that make a run fit, each by itself and at its largest; empty if there is none.

    Args:
        config: A run whose GPU memory does not fit.
        phase: The phase that does not.
        engine_share: What its neighbors leave to the engine of the GPU, at most in any phase; None if the engine holds
            nothing in this one.
        fits: Plans another config, and returns whether it fits.
    """
    found: Changes = {}
    least = _changed(config, {"packing.token_budget": str(_longest(config))})
    if phase in ("scoring", "update") and _longest(config) < config.packing.token_budget and fits(least):
        found |= largest_budget(config, least, fits)
    if engine_share is not None and isinstance(config.rollout, VllmRollout):
        found |= _largest_share(config, engine_share, fits)
    return "".join(f"the largest {name} that fits is {value}; " for name, value in found.items())


def largest_budget(config: RunConfig, fitting: RunConfig, fits: Callable[[RunConfig], bool]) -> Changes:
    """Return the largest token budget that fits, between those of `fitting` and of `config`, which does not fit."""
    least, most = fitting.packing.token_budget, config.packing.token_budget
    steps = range(1, max(1, -(-(most - least) // BUDGET_TOKENS)))

    def is_too_large(step: int) -> bool:
        budget = fitting.packing.replace(token_budget=least + step * BUDGET_TOKENS)
        return not fits(fitting.replace(packing=budget))

    return {"packing.token_budget": str(least + bisect_left(steps, True, key=is_too_large) * BUDGET_TOKENS)}


def _largest_share(config: RunConfig, engine_share: float, fits: Callable[[RunConfig], bool]) -> Changes:
    changes = {"rollout.gpu_memory_utilization": f"{math.floor(SHARES * engine_share) / SHARES:g}"}
    try:
        return changes if fits(_changed(config, changes)) else {}
    except ConfigError:  # it is not above 0, or does not hold the engine's weights
        return {}


def _changed(config: RunConfig, changes: Changes) -> RunConfig:
    return override_config(config, [f"{name}={value}" for name, value in changes.items()], "plan")


def _longest(config: RunConfig) -> int:
    """Return the tokens of the longest row, the smallest token budget that there is."""
    return min(config.data.max_prompt_tokens + config.rollout.max_response_tokens, max_positions(config.model))


def _candidates(config: RunConfig, cluster: Cluster) -> Iterator[Changes]:
    """Yield changes, those that cost the least time first."""
    if not config.model.gradient_checkpointing:
        yield {"model.gradient_checkpointing": "true"}
    if config.runtime.num_policy_ranks > 1 and config.runtime.gradient_sync == "last_micro_batch":
        yield {"runtime.gradient_sync": "every_micro_batch"}
    spare = cluster.num_gpus - gpus_wanted(config)
    if spare > 0:
        yield {"runtime.num_policy_ranks": str(config.runtime.num_policy_ranks + spare)}
    if (longest := _longest(config)) < config.packing.token_budget:
        yield {"packing.token_budget": str(longest)}
    if config.rollout.kind == "transformers":
        one = config.rollout.replace(batch_prompts=1)
        if config.rollout.prompts_per_batch > one.prompts_per_batch:
            yield {"rollout.batch_prompts": "1"}
    if config.model.compute_dtype == "float32":
        yield {"model.compute_dtype": "bfloat16"}
    if not config.optim.offload and cluster.num_gpus:
        yield {"optim.offload": "true"}
