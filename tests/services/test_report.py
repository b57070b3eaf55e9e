"""The report pages, in a browser: every panel is drawn from a run's files, offline, and nothing of a model is run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.report.alarms import find_alarms
from flows.report.record import RunRecord
from infra.storage.profiles import write_trace
from infra.storage.runs import RunDirectory
from schemas.step import EvalReport, RunEvent, SourceReport, Span, StepReport
from schemas.store import StoreTraffic, StoreUsage
from schemas.summary import LengthHistogram
from schemas.weights import WeightsTransfer
from tests.support import small_run
from tests.support.browser import DESKTOP, PHONE, Page, open_browser
from tests.support.command import Command, assert_rejected, make_command
from tests.support.small_run import make_small_run
from tests.support.tiny import make_tiny_model

ATTACK = "</pre></script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'>"
PANELS = (
    *("Reward", "Evaluation", "Data", "Response length", "Stability", "Time", "Performance", "Store and weights"),
    *("Rows", "Starts and resumes", "Configuration"),
)
IS_DRAWN = """
    document.querySelector('.main-svg') !== null
    && [...document.querySelectorAll('[id^=chart-]')].every(chart => chart.querySelector('.main-svg'))
"""
NUM_STEPS = 12


def step_report(step: int, **changes: object) -> StepReport:
    """A step with every record that a report draws."""
    metrics = {
        "reward": step / 20,
        "reward/p10": 0.0,
        "reward/p90": 1.0,
        "reward_letters": 0.25,
        "reward/failed": 0.0,
        "groups/zero_variance": 0.25,
        "response/tokens": 6.0,
        "response/truncated": 0.1,
        "tokens": 500.0,
        "entropy": 1.0,
        "kl": 0.01,
        "approx_kl": 0.001,
        "clip_fraction": 0.1,
        "grad_norm": 0.5,
        "mismatch/mean": 0.001,
        "mismatch/max": 0.1,
        "mismatch/ess": 0.99,
        f"data/{ATTACK}/share": 0.5,
        f"data/{ATTACK}/success_rate": 0.25,
        "reuse/groups": 2.0,
        "reuse/age": 1.5,
    }
    return StepReport(
        step=step,
        policy_version=step + 1,
        metrics=metrics,
        seconds=3.0,
        seconds_by_phase={"rollout": 2.0, "update": 1.0},
        store=StoreUsage(num_chunks=4, num_rows=6, num_bytes=2**20, peak_bytes=2**21, capacity_bytes=2**30),
        traffic_by_stage={"put": StoreTraffic(num_puts=1, put_bytes=2**20)},
        plan="0123456789abcdef",
        publish=WeightsTransfer(
            transport="shared_memory",
            num_bytes=2**20,
            num_receivers=2,
            write_seconds=0.1,
            read_seconds=0.1,
            load_seconds=0.1,
        ),
        started_at=1000.0 + 4 * step,
        timeline=(Span(name="rollout", start=0.0, seconds=2.0), Span(name="update", start=2.0, seconds=1.0)),
        response_lengths=LengthHistogram(edges=(4, 6, 8), num_rows=(3, 3)),
        telemetry={"step/update_tokens_per_second": 100.0, "memory/policy-0_rss_bytes": 2.0**30, "packing/fill": 0.9},
    ).replace(**changes)


def evaluation(version: int) -> EvalReport:
    sources = tuple(
        SourceReport(
            data_source=name,
            num_prompts=2,
            mean_at_n=0.5,
            best_at_n=0.5,
            maj_at_n=0.5,
            reward=0.5,
            num_failed=0,
            response_tokens=5.0,
            truncated=0.0,
        )
        for name in ("words", ATTACK)
    )
    return EvalReport(
        policy_version=version, num_prompts=4, accuracy=0.5, reward=0.5, num_failed=0, seconds=1.0, sources=sources
    )


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with all records, whose data, model and worker attack the page; and one of an earlier version."""
    folder = tmp_path_factory.mktemp("reports")
    make_tiny_model(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_run, "PROMPTS", (ATTACK, ATTACK))
        samples = [(*sample[:1], ATTACK, *sample[2:]) for sample in small_run.SAMPLES]
        patch.setattr(small_run, "SAMPLES", samples)
        whole = make_small_run(folder, "whole")
    whole.write_config(whole.config().replace(steps=NUM_STEPS))
    old = make_small_run(folder, "old")
    whole.metrics.append_event(RunEvent(kind="start", step=0, time=1000.0, versions={"torch": "2.13.0"}))
    for step in range(NUM_STEPS):
        whole.metrics.append_step(step_report(step))
    whole.metrics.append_event(RunEvent(kind="restart", step=2, time=1010.0, reason=ATTACK))
    whole.metrics.append_eval(evaluation(0))
    whole.metrics.append_eval(evaluation(NUM_STEPS))
    write_trace(whole, 2, "policy-0", "update", b"")
    shutil.copytree(whole.path, whole.path.with_name("other"))
    other = RunDirectory(whole.path.with_name("other"))
    other.write_config(other.config().replace(seed=1))
    absent = {
        "store": None,
        "publish": None,
        "started_at": None,
        "timeline": (),
        "response_lengths": None,
        "telemetry": {},
    }
    old.metrics.append_step(step_report(0, metrics={"reward": 0.5, "tokens": 10.0}, **absent))
    return folder / "runs"


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


@pytest.mark.slow
def test_the_report_has_every_panel_and_shows_attacks_as_text(runs_dir: Path, sluice: Command, page: Page) -> None:
    code, out, _ = sluice("report", "whole")
    assert code == 0
    assert f"wrote {runs_dir / 'whole' / 'report.html'}" in out
    assert assert_drawn(page, runs_dir / "whole" / "report.html") == list(PANELS)
    text = page.text()
    for shown in (
        "stopped, 12 of 12 steps",
        "no alarms",
        "success rate by source",
        "share of responses by length",
        "timeline of the last steps",
    ):
        assert shown in text
    for shown in (
        "profile/step-000002/policy-0-update.json.gz",
        "peak memory by worker (MiB)",
        "mismatch/ess",
        "torch 2.13.0",
        "best reward",
        "--step 3 --row",
        "hash of",
    ):
        assert shown in text
    assert text.count("<script>window.attacked = 1") >= 4  # prompts, responses, a source, the restart's reason


@pytest.mark.slow
def test_a_panel_without_data_says_so(runs_dir: Path, sluice: Command, page: Page) -> None:
    assert sluice("report", "old", "--out", str(runs_dir / "pages" / "old.html"))[0] == 0
    assert assert_drawn(page, runs_dir / "pages" / "old.html") == list(PANELS)
    text = page.text()
    assert text.count("An earlier version of Sluice wrote this run") == 5
    assert "No step published weights" in text
    assert "data.eval_path is not set" in text
    assert "No step has shares of a curriculum, or stored groups" in text


@pytest.mark.slow
def test_runs_are_compared(runs_dir: Path, sluice: Command, page: Page) -> None:
    code, out, _ = sluice("report", "whole", "other")
    assert code == 0
    assert f"wrote {runs_dir / 'comparison.html'}" in out
    assert assert_drawn(page, runs_dir / "comparison.html") == ["Summary", "Curves", "Configuration"]
    assert "2 runs; config keys that differ: 1; equal metrics in every step" in page.text()
    assert page.evaluate("[...document.querySelectorAll('td')].map(cell => cell.innerText).slice(-3)") == [
        "seed",
        "0",
        "1",
    ]


def test_what_can_not_be_reported(runs_dir: Path, sluice: Command) -> None:
    assert_rejected(sluice("report", "absent"), "no run 'absent'")
    assert_rejected(sluice("report", "whole", "whole"), "runs to compare need different ids")


def with_steps(runs_dir: Path, **changes: float) -> RunRecord:
    """The run, with other metrics in its last ten steps."""
    record = RunRecord.read(RunDirectory(runs_dir / "whole"))
    steps = [
        step_report(step, metrics={**step_report(step).metrics, **(changes if step >= NUM_STEPS - 10 else {})})
        for step in range(NUM_STEPS)
    ]
    return RunRecord(record.directory, record.config, record.state, steps, [], [], None)


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


def test_a_jump_of_the_mismatch(runs_dir: Path) -> None:
    record = with_steps(runs_dir)
    jumped = step_report(5, metrics={**step_report(5).metrics, "mismatch/mean": 0.5})
    steps = [*record.steps[:5], jumped, *record.steps[6:]]
    (found,) = find_alarms(RunRecord(record.directory, record.config, record.state, steps, [], [], None))
    assert found.startswith("mismatch jump: engine and trainer differ by 0.5 nat per token in step 6")
