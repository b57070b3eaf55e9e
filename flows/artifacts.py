"""A run's artifacts in the Prefect UI: its progress, sample completions and evaluations."""

import re
from uuid import UUID

from prefect.artifacts import (
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)

from schemas.rollout import RolloutHandle
from schemas.step import EvalReport, RunHandle

MAX_TEXT = 300
MAX_SAMPLES = 16


async def create_progress(run: RunHandle, percent: float) -> UUID:
    """Create the run's progress artifact and return its id, for `update_progress`."""
    return await acreate_progress_artifact(percent, key=_key(run, "progress"), description=f"steps of {run.run_id}")


async def update_progress(artifact: UUID, percent: float, description: str) -> None:
    """Update the progress artifact, with a Markdown description of the last step."""
    await aupdate_progress_artifact(artifact, percent, description=description)


async def show_samples(run: RunHandle, rollout: RolloutHandle) -> None:
    """Add a table of this step's sample completions."""
    rows = [
        {
            "step": rollout.step,
            "prompt": sample.prompt[-MAX_TEXT:],
            "response": sample.response[:MAX_TEXT],
            "answer": sample.answer[:MAX_TEXT],
            "reward": "failed" if sample.reward is None else round(sample.reward, 3),
        }
        for shard in rollout.shards
        for sample in shard.samples
    ][:MAX_SAMPLES]
    await acreate_table_artifact(rows, key=_key(run, "samples"), description=f"samples of step {rollout.step}")


async def show_evaluation(run: RunHandle, report: EvalReport) -> None:
    """Add a table of an evaluation, one row per data source."""
    n = report.samples_per_prompt
    rows = [
        {
            "source": source.data_source,
            "prompts": source.num_prompts,
            f"mean@{n}": _rounded(source.mean_at_n),
            f"best@{n}": _rounded(source.best_at_n),
            f"maj@{n}": _rounded(source.maj_at_n),
            "reward": _rounded(source.reward),
            "failed rewards": source.num_failed,
            "response tokens": round(source.response_tokens, 1),
            "truncated": round(source.truncated, 3),
        }
        for source in report.sources
    ]
    description = f"held-out accuracy {report.accuracy:.3f} of policy version {report.policy_version}"
    await acreate_table_artifact(rows, key=_key(run, "eval"), description=description)


def _rounded(value: float | None) -> float | str:
    return "failed" if value is None else round(value, 3)


def _key(run: RunHandle, name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{run.run_id}-{name}".lower())
