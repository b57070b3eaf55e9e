"""The summary of a finished run."""

from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from infra.storage.runs import RunDirectory, resumed_config
from schemas.config.run import RunConfig
from schemas.step import RunSummary, averaged_steps, comparable, mean_of


def summarize(directory: RunDirectory, store_bytes: int) -> RunSummary:
    """Summarize a run whose steps are all finished.

    Args:
        directory: The run.
        store_bytes: The bytes that its column store holds at the end.
    """
    steps, evals = directory.metrics.steps(), comparable(directory.metrics.evals())
    before, after = (
        next((each for each in reversed(evals) if each.policy_version == version), None) for version in (0, len(steps))
    )
    seconds = sum(report.seconds for report in steps)
    window = averaged_steps(len(steps))
    phases = {name for report in steps for name in report.seconds_by_phase}
    return RunSummary(
        run_id=directory.run_id,
        steps=len(steps),
        reward_first=mean_of(steps[:window], "reward"),
        reward_last=mean_of(steps[-window:], "reward"),
        loss_first=mean_of(steps[:window], "cross_entropy"),
        loss_last=mean_of(steps[-window:], "cross_entropy"),
        held_out_loss_before=before.loss if before else None,
        held_out_loss_after=after.loss if after else None,
        accuracy_before=before.accuracy if before else None,
        accuracy_after=after.accuracy if after else None,
        seconds=seconds + sum(report.seconds for report in evals),
        tokens_per_second=sum(report.metrics["tokens"] for report in steps) / seconds,
        seconds_by_phase={
            name: sum(report.seconds_by_phase.get(name, 0.0) for report in steps) for name in sorted(phases)
        },
        store_bytes_at_end=store_bytes,
        prefect_ui=flow_run_url(),
    )


def finished_summary(config: RunConfig, run_id: str) -> RunSummary | None:
    """Return the summary of a run that has done all of the config's steps; None if there is none, or steps are left.

    Raises:
        RunError: The run trained something else than `config`, or `run_id` can't be a run's.
    """
    directory = RunDirectory.at(config, run_id)
    summary = directory.summary()
    if summary is None or summary.steps < config.steps:
        return None
    resumed_config(directory, config)
    return summary


def flow_run_url() -> str:
    """Return the URL of the current flow run in the Prefect UI; empty if the server has none."""
    return url_for("flow-run", flow_run.id) or ""
