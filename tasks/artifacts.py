"""What the Prefect UI shows of a run: one progress artifact and, now and then, a table of samples."""

import re
from uuid import UUID

from prefect.artifacts import (
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)

from schemas.rollout import RolloutHandle
from schemas.step import RunHandle

MAX_TEXT = 300


async def create_progress(run: RunHandle, percent: float) -> UUID:
    """Make the run's progress artifact; returns its id for `update_progress`."""
    return await acreate_progress_artifact(percent, key=_key(run, "progress"), description=f"steps of {run.run_id}")


async def update_progress(artifact: UUID, percent: float, line: str) -> None:
    """Move the progress artifact on and show the last step's line under it."""
    await aupdate_progress_artifact(artifact, percent, description=line)


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
    ]
    await acreate_table_artifact(rows, key=_key(run, "samples"), description=f"samples of step {rollout.step}")


def _key(run: RunHandle, name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{run.run_id}-{name}".lower())
