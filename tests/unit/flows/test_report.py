"""Reports: what can't be reported, and the alarms; the pages in a browser: tests/services."""

import asyncio
from base64 import b64decode
from pathlib import Path
from shutil import copytree
from typing import get_args
from uuid import uuid4

import pytest

from flows.report.charts import MAX_LINE_POINTS, Line, line_chart
from flows.report.panels import metric_charts
from flows.report.record import RunRecord
from flows.report.run import find_alarms, verdict
from flows.ui.artifacts import ProgressArtifact
from infra.storage.runs import RunDirectory
from schemas.metric_catalog import METRICS, PanelName
from schemas.step import RunHandle
from tests.support.command import Command, assert_rejected, make_command
from tests.support.report_run import NUM_STEPS, evaluation, runs_dir, step_report

__all__ = ["runs_dir"]  # a fixture


@pytest.fixture
def sluice(runs_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that calls the command in the folder of the runs."""
    monkeypatch.chdir(runs_dir.parent)
    return make_command(monkeypatch, capsys)


def test_what_can_not_be_reported(runs_dir: Path, sluice: Command) -> None:
    assert_rejected(sluice("report", "absent"), "no run 'absent'")
    assert_rejected(sluice("report", "whole", "old"), "takes one run; to compare two: sluice diff whole old")


def test_a_page_that_can_not_be_written_keeps_no_figures_back(runs_dir: Path, sluice: Command, tmp_path: Path) -> None:
    blocked = runs_dir / "whole" / "report.html"
    blocked.mkdir()  # as in a run that one may only read
    try:
        result = sluice("report", "whole")
    finally:
        blocked.rmdir()
    assert_rejected(result, f"{blocked} can't be written: IsADirectoryError", "give another place: --out FILE")
    assert "reward" in result.out
    assert sluice("report", "whole", "--out", str(tmp_path / "page.html")).exit_code == 0


def with_steps(runs_dir: Path, **changes: float) -> RunRecord:
    """The run, with other metrics in its last ten steps."""
    record = RunRecord.read(RunDirectory(runs_dir / "whole"))
    steps = [
        step_report(step, metrics={**step_report(step).metrics, **(changes if step >= NUM_STEPS - 10 else {})})
        for step in range(NUM_STEPS)
    ]
    return RunRecord(record.directory, record.config, record.state, steps, [], [], None)


@pytest.mark.parametrize("panel", get_args(PanelName))
def test_a_metric_is_charted_in_the_panel_of_its_catalog_entry(runs_dir: Path, panel: PanelName) -> None:
    own = [spec for spec in METRICS.values() if "report" in spec.views and spec.panel == panel]
    names = [spec.name.replace("<", "").replace(">", "") for spec in own]  # a family's member is named by its part
    record = with_steps(runs_dir, **dict.fromkeys(names, 1.0), unknown=1.0)
    titles = " ".join(chart.title for chart in metric_charts(record, panel))
    assert own
    assert all(spec.name in titles for spec in own)
    assert "unknown" not in titles


@pytest.mark.parametrize(
    ("metric", "value", "alarm"),
    [
        ("groups/zero_variance", 0.9, "zero-variance groups: 90% over the last 10 steps"),
        ("reward/failed", 2.0, "failed rewards: 20 in 10 of 12 steps, first in step 3"),
        ("response/truncated", 0.5, "truncation: 50% of the responses"),
        ("entropy", 0.01, "entropy collapse: 0.01 nat"),
    ],
)
def test_alarms(runs_dir: Path, metric: str, value: float, alarm: str) -> None:
    assert find_alarms(with_steps(runs_dir)) == []
    (found,) = find_alarms(with_steps(runs_dir, **{metric: value}))
    assert found.startswith(alarm)


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([0.25], "reward 0.250 → 0.250 (first and last step)"),
        ([0.0, 0.5, 0.5, 1.0, 1.0], "reward 0.250 → 1.000 (mean of the first and last 2 steps)"),
    ],
)
def test_the_verdict_of_a_short_run_compares_different_steps(runs_dir: Path, rewards: list[float], said: str) -> None:
    record = RunRecord.read(RunDirectory(runs_dir / "whole"))
    steps = [step_report(step, metrics={"reward": reward}) for step, reward in enumerate(rewards)]
    assert said in verdict(RunRecord(record.directory, record.config, record.state, steps, [], [], None))


def test_evaluations_by_other_rows_are_not_in_the_same_curve(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = RunDirectory(copytree(runs_dir / "old", tmp_path / "run")).metrics
    for version, accuracy, measured in [(0, 0.90625, "hard"), (1, 0.125, "easy"), (2, 0.25, "easy")]:
        metrics.append_eval(evaluation(version).replace(accuracy=accuracy, measured=measured))
    record = RunRecord.read(RunDirectory(tmp_path / "run"))
    assert "held-out accuracy 0.125 → 0.250" in verdict(record)
    descriptions: list[str] = []

    async def update(*_: object, description: str) -> None:
        descriptions.append(b64decode(description.split("base64,")[1].split(")")[0]).decode())

    monkeypatch.setattr("flows.ui.artifacts.aupdate_progress_artifact", update)
    run = RunHandle(run_id="whole", identity="whole", directory="", config=record.config, store_incarnation="whole")
    artifact = ProgressArtifact(run, uuid4(), metrics)
    asyncio.run(artifact.show_evaluation(evaluation(3).replace(accuracy=0.75, measured="easy")))
    asyncio.run(artifact.show_evaluation(evaluation(4).replace(accuracy=0.5, measured="other")))
    assert [value in descriptions[0] for value in ("0.125", "0.75", "0.906")] == [True, True, False]
    assert "0.75" not in descriptions[1]


def test_a_long_line_is_drawn_with_some_of_its_points() -> None:
    steps = range(1, 3 * MAX_LINE_POINTS)
    (drawn,) = line_chart("reward", [Line("reward", steps, [step / 2 for step in steps])]).figure.data
    assert len(drawn.x) == len(drawn.y) == MAX_LINE_POINTS
    assert drawn.x[-1] == steps[-1]
    assert [y == x / 2 for x, y in zip(drawn.x, drawn.y, strict=True)] == [True] * MAX_LINE_POINTS


def test_a_jump_of_the_mismatch(runs_dir: Path) -> None:
    record = with_steps(runs_dir)
    jumped = step_report(5, metrics={**step_report(5).metrics, "mismatch/mean": 0.5})
    steps = [*record.steps[:5], jumped, *record.steps[6:]]
    (found,) = find_alarms(RunRecord(record.directory, record.config, record.state, steps, [], [], None))
    assert found.startswith("mismatch jump: engine and trainer differ by 0.5 nat per token in step 6")
