"""`report.html`, the report page of one run: its verdict, its alarms, and its panels."""

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from flows.report.page import write_page
from flows.report.panels import run_panels
from flows.report.record import WINDOW_STEPS, RunRecord
from infra.storage import places
from infra.storage.runs import RunDirectory
from schemas.errors import RunError, describe

MAX_ZERO_VARIANCE = 0.5  # fraction of the groups, over the last steps
MAX_TRUNCATED = 0.2  # fraction of the responses, over the last steps
MISMATCH_JUMP = 3.0  # times the run's median
MIN_MISMATCH = 0.01  # nats; less is rounding
MIN_ENTROPY = 0.1  # of that of the first steps

_LAST = f"over the last {WINDOW_STEPS} steps"


def write_report(directory: RunDirectory, path: Path | None = None) -> str:
    """Write the report of a run with finished steps to `path`, or to its directory; return its path or URL.

    Raises:
        RunError: The run has no finished step, its config is not one of this version of Sluice, or the page can't be
            written there.
    """
    run = RunRecord.read(directory)
    if not run.steps:
        raise RunError(
            f"run {directory.run_id} has no finished steps to report; resume with: sluice resume {directory.argument}"
        )
    place = str(path) if path else places.join(directory.url, "report.html")
    panels = run_panels(run)
    try:
        return write_page(place, run.run_id, verdict(run), find_alarms(run), panels)
    except OSError as error:
        raise RunError(f"{place} can't be written: {describe(error)}; give another place: --out FILE") from None


def verdict(run: RunRecord) -> str:
    """Return one line: the run's state, its reward or loss, and its held-out accuracy or loss."""
    parts = [f"{run.state}, {len(run.steps)} of {run.config.steps} steps"]
    for name in ("reward", "cross_entropy"):
        if (change := run.change(name)) is not None:
            count = run.num_compared
            compared = f"mean of the first and last {count} steps" if count > 1 else "first and last step"
            parts.append(f"{name} {change[0]:.3f} → {change[1]:.3f} ({compared})")
    for name in ("loss", "accuracy"):
        found = [getattr(report, name) for report in run.evals if getattr(report, name) is not None]
        if found:
            parts.append(
                f"held-out {name} " + " → ".join(f"{value:.3f}" for value in dict.fromkeys(found[:1] + found[-1:]))
            )
    return "; ".join(parts)


def find_alarms(run: RunRecord) -> list[str]:
    """Return a line per alarm, each with its figures; none if nothing stands out."""
    return [*_zero_variance(run), *_failed_rewards(run), *_mismatch_jump(run), *_truncation(run), *_entropy(run)]


def _zero_variance(run: RunRecord) -> Iterator[str]:
    fraction = run.latest("groups/zero_variance")
    if fraction is not None and fraction >= MAX_ZERO_VARIANCE:
        yield (
            f"zero-variance groups: {fraction:.0%} {_LAST}. Their rows have no advantage: use harder or easier "
            "prompts, or rollout.dynamic_sampling"
        )


def _failed_rewards(run: RunRecord) -> Iterator[str]:
    steps, counts = run.series("reward/failed")
    failing = [(step, count) for step, count in zip(steps, counts, strict=True) if count]
    if failing:
        total = sum(count for _, count in failing)
        yield f"failed rewards: {total:,.0f} in {len(failing)} of {len(steps)} steps, first in step {failing[0][0]}"


def _mismatch_jump(run: RunRecord) -> Iterator[str]:
    steps, values = run.series("mismatch/mean")
    if not values:
        return
    usual, worst = median(values), max(range(len(values)), key=values.__getitem__)
    if values[worst] > max(MISMATCH_JUMP * usual, MIN_MISMATCH):
        yield (
            f"mismatch jump: engine and trainer differ by {values[worst]:.3g} nat per token in step {steps[worst]}, "
            f"{usual:.3g} in the median step"
        )


def _truncation(run: RunRecord) -> Iterator[str]:
    fraction = run.latest("response/truncated")
    if fraction is not None and fraction >= MAX_TRUNCATED:
        limit = run.config.rollout.max_response_tokens
        yield f"truncation: {fraction:.0%} of the responses reach rollout.max_response_tokens = {limit} {_LAST}"


def _entropy(run: RunRecord) -> Iterator[str]:
    first, last = run.change("entropy") or (0.0, 0.0)
    if first > 0 and last < MIN_ENTROPY * first:
        yield (
            f"entropy collapse: {last:.3g} nat over the last {run.num_compared} steps, "
            f"{last / first:.0%} of the {first:.3g} nat of the first ones"
        )


if __name__ == "__main__":  # for drivers, which read no columns
    print(write_report(RunDirectory(sys.argv[1])))
