"""The schedules of a run's steps, from the recorded results of the steps before."""

from infra.storage.runs import RunDirectory
from rl_core.rollout.curriculum import plan_sources, recorded_steps
from schemas.errors import RunError
from schemas.rollout import SourceSchedule
from schemas.step import RunHandle


def find_schedules(run: RunHandle, step: int) -> dict[int, SourceSchedule]:
    """Return the schedules of the steps of which rows are sampled when those of `step` are; none without a curriculum.

    Raises:
        RunError: `metrics.jsonl` lacks the results of an earlier step.
    """
    if run.config.data.curriculum is None:
        return {}
    steps, metrics = run.config.sampled_steps(step), RunDirectory.of(run).metrics
    needed = recorded_steps(run.config, steps)
    reports = metrics.last_steps(needed.start) if needed else []
    recorded = {report.step: report.sources for report in reports if report.sources is not None}
    if missing := [each for each in needed if each not in recorded]:
        raise RunError(
            f"{metrics} has no curriculum results of step {missing[0]}: the file was edited by hand; restore it"
        )
    return plan_sources(run.config, steps, recorded)
