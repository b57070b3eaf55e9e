"""Monitors: what a row holds, how rows are delivered to a sink that fails, and what is checked before a run."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from infra.monitors import open_monitors, require_monitors
from infra.monitors.delivery import Delivery
from infra.monitors.files import JsonlSink, TensorBoardSink
from infra.monitors.mlflow import metric_key
from infra.monitors.prometheus import PrometheusSeries
from infra.monitors.rows import Position, Row, evaluation_row, recorded_rows, step_row
from infra.storage.runs import RunDirectory
from schemas.batch import StoreTraffic, StoreUsage
from schemas.config.monitor import MonitorConfig
from schemas.errors import ConfigError
from schemas.metric_catalog import find_metric
from schemas.step import EvalReport, SourceReport, StepReport
from schemas.weights import WeightsTransfer
from tests.support.configs import kinds_of, run_config
from tests.support.progress import wait_until
from tests.support.tracker_files import jsonl_history, tensorboard_history

STEP = StepReport(
    step=6,
    policy_version=7,
    metrics={"loss": 0.25, "reward": 0.5, "tokens": 300.0},
    seconds=3.0,
    seconds_by_phase={"rollout": 2.0},
    store=StoreUsage(num_chunks=1, num_rows=8, num_bytes=100, peak_bytes=300, capacity_bytes=1000),
    traffic_by_stage={"put": StoreTraffic(put_bytes=100, read_bytes=40)},
    publish=WeightsTransfer(
        transport="shared_memory",
        num_bytes=64,
        num_receivers=1,
        write_seconds=0.25,
        read_seconds=0.5,
        load_seconds=0.75,
    ),
    telemetry={"step/update_mfu": 0.5, "memory/policy-0_allocated_bytes": 128.0},
)
SOURCE = SourceReport(
    data_source="sums/easy",
    num_prompts=4,
    mean_at_n=0.5,
    best_at_n=0.75,
    maj_at_n=None,
    reward=0.5,
    num_failed=0,
    response_tokens=9.0,
    truncated=0.25,
)
EVALUATION = EvalReport(
    policy_version=7, num_prompts=4, accuracy=0.5, reward=0.625, num_failed=1, seconds=1.0, sources=(SOURCE,)
)
REQUIRED = {
    "tensorboard": {},
    "wandb": {"project": "p"},
    "mlflow": {"tracking_uri": "sqlite:///x.db", "experiment": "e"},
    "trackio": {"project": "p"},
}


def row(step: int, axis: str = "step") -> Row:
    return Row(axis, step, {"reward": step / 2, axis: step})  # type: ignore[arg-type]


def held_by(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


class Unreliable(JsonlSink):
    """A sink that raises while its `is_down` says so."""

    def __init__(self, path: Path, is_down: Callable[[], bool]) -> None:
        super().__init__(path)
        self._is_down = is_down

    def log(self, row: Row) -> None:
        if self._is_down():
            raise ConnectionError("no route\nto the host")
        super().log(row)


def test_a_row_has_every_figure_of_a_step() -> None:
    assert step_row(STEP) == (
        "step",
        6,
        {
            "loss": 0.25,
            "reward": 0.5,
            "tokens": 300.0,
            "tokens_per_second": 100.0,
            "step/seconds": 3.0,
            "step/rollout_seconds": 2.0,
            "store/peak_bytes": 300,
            "store/capacity_bytes": 1000,
            "store/put_put_bytes": 100,
            "store/put_read_bytes": 40,
            "step/update_mfu": 0.5,
            "memory/policy-0_allocated_bytes": 128.0,
            "publish/bytes": 64,
            "publish/write_seconds": 0.25,
            "publish/read_seconds": 0.5,
            "publish/load_seconds": 0.75,
            "step": 6,
        },
    )


def test_a_row_has_every_figure_of_an_evaluation() -> None:
    assert evaluation_row(EVALUATION) == (
        "eval/step",
        7,
        {
            "eval/accuracy": 0.5,
            "eval/reward": 0.625,
            "eval/failed": 1,
            "eval/seconds": 1.0,
            "eval/sums/easy/mean_at_n": 0.5,
            "eval/sums/easy/best_at_n": 0.75,
            "eval/sums/easy/reward": 0.5,
            "eval/sums/easy/response_tokens": 9.0,
            "eval/sums/easy/truncated": 0.25,
            "eval/step": 7,
        },
    )


@pytest.mark.parametrize(("made", "stages"), [(step_row(STEP), {"step"}), (evaluation_row(EVALUATION), {"evaluation"})])
def test_every_figure_is_in_the_catalog(made: Row, stages: set[str]) -> None:
    own = [name for name in made.values if name not in STEP.metrics]
    assert {find_metric(name)[0].stage for name in own} == stages


def test_recorded_rows_are_in_order(tmp_path: Path) -> None:
    metrics = RunDirectory(tmp_path).metrics
    for step in range(3):
        metrics.append_step(STEP.replace(step=step))
    metrics.append_eval(EVALUATION.replace(policy_version=2))
    found = [(each.axis, each.step) for each in recorded_rows(metrics)]
    assert found == [("step", 0), ("step", 1), ("eval/step", 2), ("step", 2)]


def test_json_lines_continue_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    sink = JsonlSink(path)
    assert sink.position() == Position()
    for each in (row(0, "eval/step"), row(0), row(1)):
        sink.log(each)
    sink.close(succeeded=False)
    path.write_bytes(path.read_bytes() + b'{"step": 2, "rewa')
    again = JsonlSink(path)
    assert again.position() == Position(step=1, evaluation=0)
    again.log(row(2))
    again.close(succeeded=True)
    assert held_by(path) == [0, 0, 1, 2]
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 2, "reward": 1.0}


def test_a_sink_that_fails_gets_every_row_once_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    down, path = True, tmp_path / "run.jsonl"
    delivery = Delivery("lines", lambda: Unreliable(path, lambda: down), list, logging.getLogger("test"))
    for step in range(3):
        delivery.put(row(step))
    wait_until(lambda: "lines failed" in caplog.text)
    down = False
    for step in (1, 2, 3):  # two of them again, as after a restart
        delivery.put(row(step))
    delivery.end(succeeded=True)
    delivery.join(time.monotonic() + 3600)
    assert held_by(path) == [0, 1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "monitor lines failed, and is tried again after each step: ConnectionError: no route to the host"
    ]


def test_a_sink_that_loses_what_it_took_gets_it_again(tmp_path: Path) -> None:
    path, rows, closed = tmp_path / "run.jsonl", [row(step) for step in range(4)], []

    class Losing(JsonlSink):
        def log(self, row: Row) -> None:
            if row.step == 2 and not closed:
                raise ConnectionError("its service has ended")
            super().log(row)

        def close(self, succeeded: bool) -> None:
            super().close(succeeded)
            closed.append(succeeded)
            if not succeeded:
                path.unlink()

    delivery = Delivery("lines", lambda: Losing(path), lambda: rows, logging.getLogger("test"))
    for each in rows[:3]:
        delivery.put(each)
    wait_until(lambda: bool(closed))
    delivery.put(rows[3])
    delivery.end(succeeded=True)
    delivery.join(time.monotonic() + 3600)
    assert held_by(path) == [0, 1, 2, 3]
    assert closed == [False, True]


def test_a_sink_that_blocks_blocks_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    delivery = Delivery("lines", partial(time.sleep, 3600), list, logging.getLogger("test"))  # type: ignore[arg-type]
    delivery.put(row(0))
    delivery.end(succeeded=True)
    delivery.join(time.monotonic())
    assert "monitor lines did not finish in time" in caplog.text


def test_a_config_may_list_several_of_a_kind(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    config = run_config(monitors=[{"kind": "jsonl", "folder": str(folder)} for folder in folders])
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.metrics.append_step(STEP)

    async def run() -> None:
        async with open_monitors(directory, config, logging.getLogger("test")) as monitors:
            monitors.log_recorded(directory.metrics)

    asyncio.run(run())
    assert [held_by(folder / "run.jsonl") for folder in folders] == [[6], [6]]


def test_other_runs_go_on_while_a_monitor_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(monitors=[{"kind": "jsonl", "folder": str(tmp_path)}])
    directory, other_ran = RunDirectory(tmp_path / "run"), threading.Event()

    def open_slowly(path: Path) -> JsonlSink:
        other_ran.wait()
        return JsonlSink(path)

    async def other_run() -> None:
        other_ran.set()

    async def run() -> None:
        async with open_monitors(directory, config, logging.getLogger("test")) as monitors:
            monitors.log_step(STEP)
            other = asyncio.create_task(other_run())  # it gets its turn when this one waits
        await other

    monkeypatch.setattr("infra.monitors.open.JsonlSink", open_slowly)
    asyncio.run(run())
    assert held_by(tmp_path / "run.jsonl") == [6]
    assert not caplog.records  # it was not given up


NAMES = [
    "数学题",
    "naïve",
    "हिन्दी",
    "😀",
    "a+b",
    "a-b",
    "a\nb",
    "a\\b",
    'a"b',
    "a b",
    "a//b",
    "/a",
    "..",
    "x" * 300,
    "数" * 300,
]


def wild_row() -> Row:
    values = {f"eval/{name}/reward": float(number) for number, name in enumerate(NAMES)}
    return Row("step", 0, {**values, "reward_长度": 2.5, "data/数学/share": 0.5, "environment/提示": 1.0, "step": 0})


def test_a_series_is_labeled_by_any_name(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found = []

    class Recorded:
        def set(self, value: float, tags: dict[str, str]) -> None:
            labels = {key: text.encode("ascii").decode() for key, text in tags.items()}  # as Ray does
            if value == 1.0 and "source" in labels:
                raise OSError("no agent")
            found.append((value, labels))

    monkeypatch.setattr("infra.monitors.prometheus._gauge", lambda spec, parts: Recorded())
    series = PrometheusSeries("r")
    series.show(wild_row())
    series.close()
    expected = [(float(n), {"run_id": "r", "source": name}) for n, name in enumerate(NAMES) if n != 1]
    assert found[: len(expected)] == expected
    assert found[len(expected)] == (2.5, {"run_id": "r", "part": "长度"})
    assert [record.getMessage() for record in caplog.records] == [
        "metric 'eval/naïve/reward' has no Prometheus series: OSError: no agent"  # and the run goes on
    ]


def test_a_key_of_mlflow_is_valid_and_no_other_metrics() -> None:
    validation = pytest.importorskip("mlflow.utils.validation")
    keys = [metric_key(name) for name in wild_row().values]
    assert len(set(keys)) == len(keys)
    for key in keys:
        validation._validate_metric(key, 1.0, 0, 0)
    assert keys[0] == "eval/数学题/reward"
    assert metric_key("eval/a+b//c/reward") == "eval/a_2b_b/_/c/reward"


def test_tensorboard_and_json_lines_have_any_name(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    made = wild_row()
    for sink in (JsonlSink(tmp_path / "lines.jsonl"), TensorBoardSink(tmp_path / "events")):
        sink.log(made)
        sink.close(succeeded=True)
    expected = {name: [(0, value)] for name, value in made.values.items()}
    assert jsonl_history(tmp_path / "lines.jsonl") == expected
    assert tensorboard_history(tmp_path / "events") == expected


def test_none_is_needed() -> None:
    require_monitors(run_config())
    require_monitors(run_config(monitors=[{"kind": "jsonl", "folder": "lines"}]))
    assert {*REQUIRED, "jsonl"} == {*kinds_of(MonitorConfig)}


@pytest.mark.parametrize("kind", REQUIRED)
def test_a_missing_package_is_reported_before_the_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.monitors.open.find_spec", lambda name: None)
    config = run_config(monitors=[{"kind": "jsonl", "folder": "x"}, {"kind": kind, **REQUIRED[kind]}])
    with pytest.raises(ConfigError, match=rf"monitors.1.kind = '{kind}', but .* pip install 'sluice-rl\[{kind}\]'"):
        require_monitors(config)


def test_weights_and_biases_without_a_key_is_reported_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    require_monitors(run_config(monitors=[{"kind": "wandb", "project": "p", "mode": "offline"}]))
    with pytest.raises(ConfigError, match=r'has no API key; run `wandb login`, .* mode = "offline"'):
        require_monitors(run_config(monitors=[{"kind": "wandb", "project": "p"}]))
