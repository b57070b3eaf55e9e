"""Monitors: what TensorBoard is given, and what is checked before a run."""

import importlib.util
from pathlib import Path

import pytest

from infra.monitors import open_monitors, require_monitors
from infra.monitors.tensorboard import TensorBoardMonitor
from infra.storage.runs import RunDirectory
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.step import EvalReport, SourceReport, StepReport
from schemas.store import StoreTraffic, StoreUsage
from tests.configs import run_config

STEP = StepReport(
    step=6,
    policy_version=7,
    metrics={"loss": 0.25, "reward": 0.5},
    seconds=3.0,
    seconds_by_phase={"rollout": 2.0},
    store=StoreUsage(num_chunks=1, num_rows=8, num_bytes=100, peak_bytes=300, capacity_bytes=1000),
    traffic_by_stage={"put": StoreTraffic(put_bytes=100, read_bytes=40)},
)
SOURCE = SourceReport(
    data_source="sums",
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
    policy_version=7, num_prompts=4, accuracy=0.5, reward=0.625, num_failed=0, seconds=1.0, sources=(SOURCE,)
)


def config_of(tensorboard: bool) -> RunConfig:
    return run_config(runtime={"tensorboard": tensorboard})


@pytest.fixture
def run_directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def test_none_is_opened_by_default(run_directory: RunDirectory) -> None:
    assert open_monitors(run_directory, config_of(False)) == []
    require_monitors(config_of(False))


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_gets_every_metric(run_directory: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (monitor,) = open_monitors(run_directory, config_of(True))
    monitor.log_step(STEP)
    monitor.log_evaluation(EVALUATION)
    monitor.close()
    events = EventAccumulator(str(run_directory.path / "tensorboard")).Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert found == {
        "loss": [(6, 0.25)],
        "reward": [(6, 0.5)],
        "seconds/rollout": [(6, 2.0)],
        "store/put_put_bytes": [(6, 100.0)],
        "store/put_read_bytes": [(6, 40.0)],
        "store/peak_bytes": [(6, 300.0)],
        "eval/accuracy": [(7, 0.5)],
        "eval/reward": [(7, 0.625)],
        "eval/sums/mean_at_n": [(7, 0.5)],
        "eval/sums/best_at_n": [(7, 0.75)],
        "eval/sums/reward": [(7, 0.5)],
        "eval/sums/response_tokens": [(7, 9.0)],
        "eval/sums/truncated": [(7, 0.25)],
    }


def test_a_missing_package_is_reported_before_the_run(
    run_directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.monitors.tensorboard.find_spec", lambda name: None)
    for check in (
        lambda: require_monitors(config_of(True)),
        lambda: open_monitors(run_directory, config_of(True)),
        TensorBoardMonitor.require,
    ):
        with pytest.raises(ConfigError, match=r"pip install 'sluice-rl\[tensorboard\]'"):
            check()
