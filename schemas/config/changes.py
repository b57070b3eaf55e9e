"""Which settings may differ when a run is resumed, and digests of the settings that a stage's result depends on."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache

from schemas.base import digest_of
from schemas.config.load import changed_keys, flat_values
from schemas.config.run import RunConfig

# Where, how long and within which limits a run trains, and what it reports; a section's name is for all of its keys.
CHANGEABLE = (
    "steps",
    "note",
    "monitors",
    "eval",
    "data.eval_path",
    "checkpoint",
    "store",
    "packing",
    "runtime",
    "services",
    "timeouts",
    "weights",
    "approval",
    "model.gradient_checkpointing",
    "optim.offload",
    "reward.max_failure_fraction",
    "reward.num_processes",
    "reward.timeout_seconds",
    "reward.num_workers",
    "environment.journal",
    "environment.python",
    "environment.num_processes",
    "environment.memory_bytes",
    "environment.reset_timeout_seconds",
    "environment.step_timeout_seconds",
    "environment.trajectory_timeout_seconds",
    "reward.url",
    "reward.api_key_variable",
    "reward.max_retries",
    "reward.concurrency",
    "rollout.num_workers",
    "rollout.batch_prompts",
    "rollout.max_cache_bytes",
    "rollout.max_num_seqs",
    "rollout.python",
    "rollout.program",
    "rollout.cache_bytes",
    "rollout.gpu_memory_utilization",
    "rollout.enforce_eager",
    "rollout.tensor_parallel",
    "rollout.prefix_cache",
)
# Of a reward model in a sum, of a teacher, and of a container.
OF_PARTS = re.compile(
    r"reward\.parts\.\w+\.reward\.(num_workers|url|api_key_variable|max_retries|concurrency)"
    r"|distillation\.teachers\.\w+\.(num_ranks|max_prompt_tokens)"
    r"|environment\.sandbox\.program"
)
FIXED = ("runtime.max_staleness",)
# On what an evaluation's figures depend besides `eval`, the held-out rows and the weights: of samples, and of rows.
MEASURING = ("reward", "environment", "rollout.stop", "rollout.stop_token_ids", "data.chat_template_kwargs")
MEASURING_ROWS = ("sft.loss_on", "sft.tools", "data.chat_template_kwargs")
# Those of them on which log-probs and plans depend: who computes them, and in which micro-batches.
SCORING = ("packing", "runtime.device", "runtime.num_policy_ranks")


def is_changeable(key: str) -> bool:
    """Return whether the value of a dotted key may differ when a run is resumed."""
    return (_is_in(key, CHANGEABLE) or OF_PARTS.fullmatch(key) is not None) and not _is_in(key, FIXED)


def rejected_changes(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the dotted keys in which two configs differ although that would be another run, sorted."""
    return [key for key in changed_keys(before, after) if not is_changeable(key)]


def measuring_changes(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the dotted keys, sorted, by which evaluations of two configs differ for the same weights.

    Those of `eval` and the held-out rows are not among them: reports of evaluations say by which they were made.
    """
    if (before.sft is None) != (after.sft is None):
        return ["sft"]
    pair, drops = (before, after), "drop" in (before.data.overlong, after.data.overlong)
    if before.sft is not None:
        names = (*MEASURING_ROWS, *(["sft.max_tokens"] if drops else []))
    else:
        limit, other_limit = (each.eval.max_response_tokens or each.rollout.max_response_tokens for each in pair)
        given, other = (
            {source.label: source.environment for source in each.data.sources if source.environment} for each in pair
        )
        names = (
            *MEASURING,
            *(["data.max_prompt_tokens"] if drops else []),
            *(["rollout.max_response_tokens"] if limit != other_limit else []),
            *(["data.sources"] if given != other else []),
        )
    return [key for key in rejected_changes(before, after) if _is_in(key, names)]


def keep_batches(before: RunConfig, after: RunConfig) -> RunConfig:
    """Return `after` with the batches of `before`, unless it sets `rollout.batch_prompts` itself.

    Otherwise another number of workers would decode other prompts together, and so change samples.
    """
    size = before.rollout.prompts_per_batch
    if after.rollout.batch_prompts is not None or after.rollout.prompts_per_batch == size:
        return after
    return after.replace(rollout=after.rollout.replace(batch_prompts=size))


def keep_date(before: RunConfig, after: RunConfig) -> RunConfig:
    """Return `after` with the date that the chat templates of `before` take for today, unless it sets it itself."""
    if before.data.date is None or after.data.date is not None:
        return after
    return after.replace(data=after.data.with_date(before.data.date))


def sampling_digest(config: RunConfig) -> str:
    """Return a digest of what a run trains, the same for as long as it may be resumed: stored rows depend on it."""
    return _digest(config.model_dump_json(), ())


def scoring_digest(config: RunConfig) -> str:
    """Return a digest of what a run trains and how it scores and plans: log-probs and plans depend on it."""
    return _digest(config.model_dump_json(), SCORING)


@lru_cache  # asked for several times in each step
def _digest(config: str, included: tuple[str, ...]) -> str:
    values = {
        key: value
        for key, value in flat_values(RunConfig.model_validate_json(config)).items()
        if _is_in(key, included) or not is_changeable(key)
    }
    return digest_of(json.dumps(values, sort_keys=True))


def _is_in(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
