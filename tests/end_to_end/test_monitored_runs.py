"""What other tools get of a run: all trackers at once, across a kill; Prometheus series; spans; and `sluice ps`."""

import importlib.util
import json
import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.monitors.rows import recorded_rows
from infra.services.local import PROMETHEUS_TARGETS
from infra.storage.runs import find_traces
from tests.support.otlp import ReceivedSpan, collecting
from tests.support.progress import wait_until
from tests.support.tracker_files import (
    History,
    jsonl_history,
    mlflow_history,
    tensorboard_history,
    trackio_history,
    wandb_history,
)
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

PACKAGES = ("tensorboard", "wandb", "mlflow", "trackio", "opentelemetry.exporter.otlp.proto.http")
RUN_ID = "watched"
STEPS = 3
SETTINGS = (
    f"steps={STEPS}",
    "eval.every_steps=2",
    "kl.coef=0.01",
    "runtime.tracing=true",
    "runtime.profile_steps=[1]",
    "approval.queries=queries",
    'reward={kind="weighted", num_processes=0, timeout_seconds=inf, '
    'parts={short={reward={kind="function", path="held_rewards:short"}}}}',
    'monitors=[{kind="jsonl", folder="lines"}, {kind="tensorboard"}, {kind="wandb", project="p", mode="offline"}, '
    '{kind="mlflow", tracking_uri="sqlite:///mlflow.db", experiment="e"}, {kind="trackio", project="p"}]',
)
# The evaluation at the start scores 4 samples and the first step 16; the second step waits as long as there is `hold`.
REWARD = """
import pathlib, time
import tiny_rewards

calls = 0

def short(prompt, completion, answer, info):
    global calls
    calls += 1
    while calls > 20 and pathlib.Path("hold").exists():
        time.sleep(0.05)
    return tiny_rewards.short(prompt, completion, answer, info)
"""
TRAINED = "select step, count(*) as n from tokens where step = $step group by step"
# Series of GPUs, reused groups, curricula, environments, shaped rewards, the dual clip and corrections.
OF_OTHER_RUNS = re.compile(
    r"_mfu$|_(allocated|reserved)_bytes$|sluice_(reuse|data|requests)_|sluice_turns$|_reward_(kl|shaped)$|_dual$|_mismatch_ess$"
)
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "sluice.json"


@pytest.fixture(scope="module")
def watched(workplace: Workplace) -> Iterator[SimpleNamespace]:
    """A run with all monitors, whose driver is killed after the first step's metrics are exported.

    What the driver has left is stopped, and the run is resumed.
    """
    for package in PACKAGES:
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            pytest.skip(f"{package} is not installed")
    (workplace.folder / "held_rewards.py").write_text(REWARD)
    (workplace.folder / "queries").mkdir()
    (workplace.folder / "queries" / "trained.sql").write_text(TRAINED)
    (workplace.folder / "queries" / "ungraded.sql").write_text("select row from rows where reward is null")
    run, hold = workplace.run(RUN_ID), workplace.folder / "hold"
    hold.touch()
    with collecting() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        patch.setenv("TRACKIO_DIR", str(workplace.folder / "trackio"))
        driver = workplace.start("train", "tiny.toml", *SETTINGS, "--run-id", RUN_ID)
        driver.wait_for(lambda: run.metrics.steps())
        exported: dict[str, float] = {}

        def shows_all() -> bool:
            exported.clear()
            exported.update(export(workplace))
            return dashboard_series() <= names_of(exported)

        wait_until(shows_all)
        wait_until(lambda: {"rl.loop", "rl.train", "rl.sync"} <= {span.name for span in collector.spans})
        printed = driver.kill()
        left = [workplace.sluice(*command) for command in (("ps", "--json"), ("stop", RUN_ID), ("stop", RUN_ID))]
        workplace.wait_for_no_workers()
        hold.unlink()
        printed += workplace.sluice("resume", RUN_ID)
        yield SimpleNamespace(
            place=workplace, run=run, spans=collector.spans, printed=printed, exported=exported, left=left
        )


def export(workplace: Workplace) -> dict[str, float]:
    """Scrape Ray's metrics as Prometheus does; return this run's series, without the labels that Ray adds."""
    (group,) = json.loads((workplace.services.directory / PROMETHEUS_TARGETS).read_text())
    (target,) = group["targets"]
    try:
        with urllib.request.urlopen(f"http://{target}/metrics") as response:
            lines = response.read().decode().splitlines()
    except OSError:  # Ray's agent is not up yet
        return {}
    found = {}
    for line in lines:
        if f'run_id="{RUN_ID}"' in line:
            name, labels, value = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line).groups()  # type: ignore[union-attr]
            own = re.findall(r'(?<!\w)((?:phase|part|source|stage)="[^"]*")', labels)
            found[f"{name}{{{','.join(own)}}}" if own else name] = float(value)
    return found


def names_of(series: dict[str, float]) -> set[str]:
    return {name.partition("{")[0] for name in series}


def dashboard_series() -> set[str]:
    """Return the series that the Grafana dashboard shows, without those of other runs."""
    return {name for name in re.findall(r"ray_sluice_\w+", DASHBOARD.read_text()) if not OF_OTHER_RUNS.search(name)}


def history_of(watched: SimpleNamespace, kind: str) -> History:
    place, own = watched.place, watched.run.path
    if kind == "jsonl":
        return jsonl_history(place.folder / "lines" / f"{RUN_ID}.jsonl")
    if kind == "tensorboard":
        return tensorboard_history(own / "tensorboard")
    if kind == "wandb":
        return wandb_history(own / "wandb", RUN_ID)
    if kind == "mlflow":
        history, status = mlflow_history(f"sqlite:///{place.folder}/mlflow.db", RUN_ID)
        assert status == "FINISHED"
        return history
    return trackio_history("p", RUN_ID)


@pytest.mark.parametrize("kind", ["jsonl", "tensorboard", "wandb", "mlflow", "trackio"])
def test_a_tracker_has_each_value_of_a_killed_and_resumed_run_once(watched: SimpleNamespace, kind: str) -> None:
    expected: History = defaultdict(list)
    for row in recorded_rows(watched.run.metrics):
        for name, value in row.values.items():
            expected[name].append((row.step, pytest.approx(value)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(watched.place.folder / "trackio"))
        found = history_of(watched, kind)
    assert [step for step, _ in found["reward"]] == list(range(STEPS))
    assert [step for step, _ in found["eval/accuracy"]] == [0, 2, STEPS]
    numbers = {"step"}  # trackio keeps it by itself, and each of the JSON lines has it
    assert {name: found[name] for name in found.keys() - numbers} == {
        name: expected[name] for name in expected.keys() - numbers
    }


def test_what_a_killed_driver_left_is_listed_and_stopped(watched: SimpleNamespace) -> None:
    listed, stopped, stopped_again = watched.left
    assert [run["run_id"] for run in json.loads(listed)] == [RUN_ID]
    assert stopped == f"stopped {RUN_ID}; resume with: sluice resume {RUN_ID}\n"
    assert stopped_again.startswith(f"nothing of {RUN_ID} is running")


def test_a_saved_query_that_returns_rows_is_logged_and_an_event(watched: SimpleNamespace) -> None:
    tokens = [report.metrics["response/tokens"] * 16 for report in watched.run.metrics.steps()]
    rows = [f'{{"step": {step}, "n": {round(count)}}}' for step, count in enumerate(tokens)]
    for step, row in enumerate(rows[1:], 1):  # the first one's warning may be lost with the driver
        assert f"step {step + 1}: query trained: 1 row, such as {row}" in watched.printed
    assert "query ungraded" not in watched.printed
    sent = {"filter": {"event": {"name": ["sluice.query.failed"]}}}

    def found() -> dict[int, list[str]]:
        answer = watched.place.ask(lambda client: client.request("POST", "/events/filter", json=sent))
        payloads = [event["payload"] for event in answer.json()["events"]]
        return {payload["step"]: payload["rows"] for payload in payloads if payload["step"] > 1}

    wait_until(lambda: len(found()) == STEPS - 1)  # the server records them with a delay
    assert found() == {2: [rows[1]], 3: [rows[2]]}


def test_no_monitor_failed(watched: SimpleNamespace) -> None:
    assert "warning: monitor" not in watched.printed


def test_ray_exports_what_the_dashboard_shows(watched: SimpleNamespace) -> None:
    exported, first = watched.exported, watched.run.metrics.steps()[0]
    assert dashboard_series() <= names_of(exported)
    assert exported["ray_sluice_eval_accuracy"] == watched.run.metrics.evals()[0].accuracy
    assert exported['ray_sluice_reward_part{part="short"}'] == pytest.approx(exported["ray_sluice_reward"])
    assert exported["ray_sluice_store_capacity_bytes"] == first.store.capacity_bytes
    assert exported["ray_sluice_reward_failed"] == 0
    step = watched.run.metrics.steps()[int(exported["ray_sluice_step"])]
    assert exported["ray_sluice_tokens_per_second"] == pytest.approx(step.tokens_per_second)
    assert exported['ray_sluice_step_phase_seconds{phase="update"}'] == pytest.approx(step.seconds_by_phase["update"])


def test_each_worker_writes_traces_of_a_profiled_step(watched: SimpleNamespace) -> None:
    phases = {"policy-0": ("update",), "reference-0": ("reference",), "rollout-0": ("rollout",)}
    expected = [f"profile/step-000001/{worker}-{phase}.json.gz" for worker in phases for phase in phases[worker]]
    assert find_traces(watched.run) == expected


def test_a_steps_spans_are_one_trace_through_driver_and_workers(watched: SimpleNamespace) -> None:
    traces = defaultdict[bytes, list[ReceivedSpan]](list)
    for span in watched.spans:
        traces[span.trace].append(span)
    finished = [spans for spans in traces.values() if any(span.name == "rl.loop" for span in spans)]
    assert [loop_of(spans).attributes["rl.loop.step"] for spans in finished] == list(range(STEPS))
    for spans in finished:
        loop = loop_of(spans)
        assert not loop.parent
        parts = [span for span in spans if span is not loop]
        workers = {(span.name, span.resource["service.instance.id"]) for span in parts}
        assert workers >= {
            ("rl.train", "PolicyWorker-0"),
            ("rl.sync", "PolicyWorker-0"),
            ("rl.sync", "RolloutWorker-0"),
        }
        assert {span.parent for span in parts} == {loop.id}
        assert all(0 < span.seconds < loop.seconds for span in parts)
    sampled = [span for spans in traces.values() for span in spans if span.name in ("rl.sample", "rl.reward")]
    assert len(sampled) >= 2 * STEPS  # those of the step that was killed are of a trace whose end was never sent
    for span in watched.spans:
        assert (
            span.resource.items()
            >= {"rl.run.id": RUN_ID, "rl.algorithm": "grpo", "rl.loss": "clipped", "service.name": "sluice"}.items()
        )


def loop_of(spans: list[ReceivedSpan]) -> ReceivedSpan:
    (loop,) = (span for span in spans if span.name == "rl.loop")
    return loop
