"""The report pages, in a browser: every panel is drawn from a run's files, offline, and nothing of a model is run."""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from flows.report.run import write_report
from schemas.metric_catalog import PanelName
from tests.support.browser import DESKTOP, PHONE, Page, open_browser
from tests.support.command import Command, make_command
from tests.support.report_run import runs_dir
from tests.support.view_run import make_view_run

__all__ = ["runs_dir"]  # a fixture

PANELS = (
    *get_args(PanelName),
    *("Rows", "Starts and resumes", "Configuration"),
)
IS_DRAWN = """
    document.querySelector('.main-svg') !== null
    && [...document.querySelectorAll('[id^=chart-]')].every(chart => chart.querySelector('.main-svg'))
"""


@pytest.fixture
def sluice(runs_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that calls the command in the folder of the runs."""
    monkeypatch.chdir(runs_dir.parent)
    return make_command(monkeypatch, capsys)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


def assert_drawn(page: Page, path: Path) -> list[str]:
    """Assert that a page works offline, fits on a desktop and on a phone, and runs no text; return its headings."""
    for width in (DESKTOP, PHONE):
        page.requests.clear()
        page.open(path.resolve().as_uri(), width)
        page.wait_for(IS_DRAWN)
        assert page.overflow() <= 0
        assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
        assert page.errors == []
        assert page.evaluate("window.attacked") is None
        assert page.evaluate("document.querySelectorAll('img[src=x], h3 script, pre script').length") == 0
    return list(page.evaluate("[...document.querySelectorAll('h2')].map(heading => heading.innerText)"))


def test_the_report_has_every_panel_and_shows_attacks_as_text(runs_dir: Path, sluice: Command, page: Page) -> None:
    code, out, _ = sluice("report", "whole")
    assert code == 0
    assert f"wrote {runs_dir / 'whole' / 'report.html'}" in out
    assert assert_drawn(page, runs_dir / "whole" / "report.html") == list(PANELS)
    text = page.text()
    for shown in (
        "stopped, 12 of 12 steps",
        "no alarms",
        "data/<source>/share, data/<source>/success_rate",
        "share of responses by length",
        "timeline of the last steps",
    ):
        assert shown in text
    for shown in (
        "profile/step-000002/policy-0-update.json.gz",
        "memory/<worker>_rss_bytes (MiB)",
        "mismatch/ess",
        "torch 2.13.0",
        "best reward",
        "--step 3 --row",
        "hash of",
    ):
        assert shown in text
    assert text.count("<script>window.attacked = 1") >= 4  # prompts, responses, a source, the restart's reason


def test_a_trajectory_is_shown_as_a_tree(tmp_path: Path, page: Page) -> None:
    assert_drawn(page, Path(write_report(make_view_run(tmp_path))))
    trees = page.evaluate("[...document.querySelectorAll('pre.tree')].map(tree => tree.innerText.split('\\n'))")
    assert len(trees) == 2  # of the best and the worst row
    assert [line.partition(":")[0] for line in trees[0][:3]] == ["prompt", "turn 1", "turn 2"]
    assert [line.partition(":")[0] for line in trees[1][:3]] == ["prompt", "├─ turn 1", "└─ turn 2"]
    assert "2 turns, ended: turn_length" in page.text()


def test_a_panel_without_data_says_so(runs_dir: Path, sluice: Command, page: Page) -> None:
    assert sluice("report", "old", "--out", str(runs_dir / "pages" / "old.html"))[0] == 0
    assert assert_drawn(page, runs_dir / "pages" / "old.html") == list(PANELS)
    text = page.text()
    assert text.count("An earlier version of Sluice wrote this run") == 4
    assert "No step published weights" in text
    assert "data.eval_path is not set" in text
    assert text.count("No step has metrics of this panel") == 4  # data, rollout, stability, GPUs
