"""A run's artifacts in the Prefect UI: its progress, sample completions, evaluations and summary."""

import asyncio
import re
import sys
import time
from asyncio.subprocess import PIPE
from base64 import b64encode
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from typing import Self
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)

from flows.lifecycle.outages import shown_in_ui
from flows.ui.progress import progress_table, summary_rows
from infra.storage import places
from infra.storage.run_files import MetricsFile
from infra.storage.runs import RunDirectory
from schemas.placement import WorkerPlace
from schemas.rollout import RolloutHandle
from schemas.step import EvalReport, PolicyHandle, RunHandle, RunSummary, StepReport, comparable

Curve = Sequence[tuple[int, float]]  # step and value

WIDTH, HEIGHT = 320, 130  # of one curve, pixels
LEFT, TOP, BOTTOM = 44, 26, 18  # margins
CHART_COLUMNS = 2
MAX_CHART_POINTS = 120
MAX_SAMPLES = 16
CURVES = ("reward", "cross_entropy", "held-out loss", "held-out accuracy", "response/tokens", "entropy")
PACE_STEPS = 10  # the last steps, by which the time left is estimated


def draw_curves(curves: Mapping[str, Curve]) -> str:
    """Return a data URI with one small chart per curve, side by side; the curves have at least one point each."""
    charts = [_chart(number, title, _thinned(points)) for number, (title, points) in enumerate(curves.items())]
    rows = -(-len(charts) // CHART_COLUMNS)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {CHART_COLUMNS * WIDTH} {rows * HEIGHT}" '
        f'width="{CHART_COLUMNS * WIDTH}" height="{rows * HEIGHT}" font-family="sans-serif" font-size="11" '
        'fill="#57606a">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(charts)}</svg>'
    )
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"


def _chart(number: int, title: str, points: Curve) -> str:
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    first, last = min(steps), max(steps)
    across, up = (WIDTH - LEFT - 10) / ((last - first) or 1), (HEIGHT - TOP - BOTTOM) / ((high - low) or 1.0)
    base = HEIGHT - BOTTOM
    places = [(LEFT + (step - first) * across, base - (value - low) * up) for step, value in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    x, y = places[-1]
    return (
        f'<g transform="translate({number % CHART_COLUMNS * WIDTH} {number // CHART_COLUMNS * HEIGHT})">'
        f'<text x="{LEFT}" y="16" fill="#1b1f24" font-weight="bold">{escape(title)} {values[-1]:.4g}</text>'
        f'<text x="{LEFT - 5}" y="{TOP + 4}" text-anchor="end">{high:.3g}</text>'
        f'<text x="{LEFT - 5}" y="{base + 3}" text-anchor="end">{low:.3g}</text>'
        f'<path d="M{LEFT} {TOP}V{base}H{WIDTH - 10}" fill="none" stroke="#d0d7de"/>'
        f'<text x="{LEFT}" y="{HEIGHT - 4}">{first}</text>'
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 4}" text-anchor="end">step {last}</text>'
        f'<polyline points="{line}" fill="none" stroke="#0969da" stroke-width="1.5"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#0969da"/></g>'
    )


def _thinned(points: Curve) -> Curve:
    """Return at most about `MAX_CHART_POINTS` points at even distances, the last one included."""
    stride = -(-len(points) // MAX_CHART_POINTS)
    return [points[at] for at in range((len(points) - 1) % stride, len(points), stride)]


class ProgressArtifact:
    """The run's progress artifact: step, time left, curves, and the last step's metrics.

    Args:
        run: The run.
        artifact: The artifact's id; None if it could not be created.
        metrics: The run's finished steps and evaluations.
    """

    def __init__(self, run: RunHandle, artifact: UUID | None, metrics: MetricsFile) -> None:
        self._num_steps, self._id = run.config.steps, artifact
        self._table = ""  # of the last step of this driver
        self._curves: dict[str, list[tuple[int, float]]] = {}
        self._evals: list[EvalReport] = []
        self._recent: deque[StepReport] = deque(maxlen=PACE_STEPS)  # of this driver
        for step in metrics.steps():
            self._add_step(step)
        for report in metrics.evals():
            self._add_evaluation(report)

    @classmethod
    async def create(cls, run: RunHandle, policy: PolicyHandle, metrics: MetricsFile) -> Self:
        """Create the artifact."""
        percent, key = 100 * policy.step / run.config.steps, _key(run.run_id, "progress")
        description = f"step {policy.step} of {run.config.steps}"
        create = shown_in_ui(acreate_progress_artifact)
        return cls(run, await create(percent, key=key, description=description), metrics)

    async def show_step(self, report: StepReport) -> None:
        """Show one more finished step."""
        self._recent.append(report)
        self._add_step(report)
        self._table = progress_table(report)
        await self._update(report.step + 1)

    async def show_evaluation(self, report: EvalReport) -> None:
        """Show one more evaluation."""
        self._add_evaluation(report)
        await self._update(report.policy_version)

    @shown_in_ui
    async def _update(self, done: int) -> None:
        if self._id is None:
            return
        curves = {name: self._curves[name] for name in CURVES if name in self._curves}
        values = ", ".join(f"{name} {points[-1][1]:.4g}" for name, points in curves.items())
        picture = f"![Curves by step; the last values: {values}]({draw_curves(curves)})"
        description = "\n\n".join((self._position(done), picture, self._table))
        await aupdate_progress_artifact(self._id, 100 * done / self._num_steps, description=description)

    def _add_evaluation(self, report: EvalReport) -> None:
        self._evals = comparable([*self._evals, report])
        for name in ("held-out accuracy", "held-out loss"):
            self._curves.pop(name, None)
        for each in self._evals:
            self._add("held-out accuracy", each.policy_version, each.accuracy)
            if each.loss is not None:
                self._add("held-out loss", each.policy_version, each.loss)

    def _add_step(self, report: StepReport) -> None:
        for name in CURVES:
            if name in report.metrics:
                self._add(name, report.step + 1, report.metrics[name])

    def _add(self, name: str, step: int, value: float) -> None:
        curve = self._curves.setdefault(name, [])
        while curve and curve[-1][0] >= step:  # the steps after a restart are run again
            curve.pop()
        curve.append((step, value))

    def _position(self, done: int) -> str:
        """Return the number of finished steps and, by the pace of the last ones, the time left."""
        position = f"**{done} of {self._num_steps} steps**"
        if not self._recent or done == self._num_steps:
            return position
        now = time.time()
        pace = (now - (self._recent[0].started_at or now)) / len(self._recent)
        left = timedelta(seconds=round(pace * (self._num_steps - done)))
        end = datetime.fromtimestamp(now, UTC) + left
        return f"{position}; {left} left at {pace:.1f} s per step, until {end:%b %d %H:%M} UTC"


@shown_in_ui
async def show_samples(run: RunHandle, rollout: RolloutHandle) -> None:
    """Add a table of this step's sample completions."""
    rows = [
        {
            "step": rollout.step,
            "prompt": sample.prompt,
            "response": sample.response,
            "answer": sample.answer,
            "reward": "failed" if sample.reward is None else round(sample.reward, 3),
        }
        for shard in rollout.shards
        for sample in shard.samples
    ][:MAX_SAMPLES]
    await acreate_table_artifact(rows, key=_key(run.run_id, "samples"), description=f"samples of step {rollout.step}")
    if trees := draw_trees(rollout):
        key, description = _key(run.run_id, "trajectories"), f"trajectories of step {rollout.step}"
        await acreate_markdown_artifact(trees, key=key, description=description)


def draw_trees(rollout: RolloutHandle) -> str:
    """Return the trees of a step's sample trajectories in Markdown; empty if no environment answers.

    What a model wrote in them is a block of code by its indentation, which no text can end.
    """
    found = [sample for shard in rollout.shards for sample in shard.samples if sample.tree][:MAX_SAMPLES]
    parts = []
    for number, sample in enumerate(found, start=1):
        reward = "failed" if sample.reward is None else f"{sample.reward:.4g}"
        parts += [f"### {number}: reward {reward}", "\n".join(f"    {line}" for line in sample.tree.splitlines())]
    return "\n\n".join(parts)


@shown_in_ui
async def show_placement(run_id: str, places: Sequence[WorkerPlace]) -> None:
    """Add a table of where the workers compute."""
    rows = [place.model_dump() for place in places]
    await acreate_table_artifact(rows, key=_key(run_id, "workers"), description="where the workers compute")


@shown_in_ui
async def show_evaluation(run_id: str, report: EvalReport) -> None:
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
    description = f"held-out {report} of policy version {report.policy_version}"
    await acreate_table_artifact(rows, key=_key(run_id, "eval"), description=description)


@shown_in_ui
async def report_run(run: RunHandle, directory: RunDirectory, summary: RunSummary) -> None:
    """Write the report page of a finished run, and add a summary that says where it is."""
    page = await _write_report(directory)
    figures = [f"- **{name}**: {value}" for name, value in summary_rows(summary)]  # a table would not wrap on a phone
    place = _report_place(page) if page else "The report could not be written."
    markdown = "\n".join([f"# {summary.run_id}", "", *figures, "", place])
    key, description = _key(run.run_id, "summary"), "summary of the finished run"
    await acreate_markdown_artifact(markdown, key=key, description=description)


async def _write_report(directory: RunDirectory) -> str | None:
    """Write the report in a process of its own, since it reads columns; warn and return None if that fails."""
    command = (sys.executable, "-P", "-m", "flows.report.run", directory.url)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    try:
        out, errors = await process.communicate()
    finally:
        if process.returncode is None:  # the flow was cancelled
            process.kill()
    if process.returncode:
        reason = errors.decode().strip().rpartition("\n")[2]
        get_run_logger().warning("the report of %s could not be written: %s", directory.run_id, reason)
        return None
    return out.decode().strip()


def _report_place(page: str) -> str:
    """Return where the report is: no link to a file, which a browser doesn't follow from a server's page."""
    if places.is_url(page):
        return f"Report: {page}"
    return f"Report: `{page}`, on the driver's machine"


def _rounded(value: float | None) -> float | str:
    return "failed" if value is None else round(value, 3)


def _key(run_id: str, name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{run_id}-{name}".lower())
