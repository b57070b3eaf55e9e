"""`report.html`, the report page of one run."""

from pathlib import Path

from flows.report.alarms import find_alarms, verdict
from flows.report.page import write_page
from flows.report.panels import run_panels
from flows.report.record import RunRecord
from infra.storage import places
from infra.storage.runs import RunDirectory
from schemas.errors import RunError


def write_report(directory: RunDirectory, path: Path | None = None) -> str:
    """Write the report of a run with finished steps to `path`, or to its directory; return its path or URL.

    Raises:
        RunError: The run has no finished step, or its config is not one of this version of Sluice.
    """
    run = RunRecord.read(directory)
    if not run.steps:
        raise RunError(
            f"run {directory.run_id} has no finished steps to report; resume with: sluice resume {directory.argument}"
        )
    place = str(path) if path else places.join(directory.url, "report.html")
    return write_page(place, run.run_id, verdict(run), find_alarms(run), run_panels(run))
