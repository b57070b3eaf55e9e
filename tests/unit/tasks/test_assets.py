"""What a run's checkpoints and a promoted model are made of, as Prefect is told."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.assets import Asset

from flows.pipeline import PipelineResult, _promote
from infra.storage.runs import RunDirectory
from infra.workers.inputs import record_inputs
from schemas.step import EvalReport
from tasks.assets import evaluated, model_at, trained_on
from tests.support.configs import run_config
from tests.support.sweeps import finish, sweep_plan
from tests.support.tiny import make_tiny_data, make_tiny_model


def test_checkpoints_are_made_of_the_models_that_the_run_was_given(tmp_path: Path) -> None:
    for name in ("first", "second", "teacher"):
        make_tiny_model(tmp_path / name)
    make_tiny_data(tmp_path / "train.parquet", 4)
    link = tmp_path / "current"
    link.symlink_to("first")
    hub = {"path": "org/Model-0.6B", "data_sources": ["sums"]}
    teachers = {"large": {"path": str(tmp_path / "teacher")}, "hub": hub}
    config = run_config(tmp_path, model={"path": str(link)}, distillation={"teachers": teachers})
    directory = RunDirectory.create(config, "demo")
    record_inputs(directory, config)
    link.unlink()
    link.symlink_to("second")  # as a later promotion does
    expected = [f"file://{tmp_path}/first", f"file://{tmp_path}/teacher", "huggingface://org/Model-0.6B"]
    assert [asset.key for asset in trained_on(directory, config)] == [*expected, f"file://{tmp_path}/train.parquet"]
    assert [asset.key for asset in evaluated(directory, config, 0, None)] == expected[:1]


def test_a_name_is_of_the_hub_unless_there_is_such_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/model").mkdir(parents=True)
    names = ("org/model", "org/other", "gpt2", "/gone/model", "a/b/c", "./gone")
    keys = [f"file://{tmp_path}/org/model", "huggingface://org/other", "huggingface://gpt2", "file:///gone/model"]
    assert [model_at(name).key for name in names] == [*keys, f"file://{tmp_path}/a/b/c", f"file://{tmp_path}/gone"]


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_a_promotion_is_made_of_an_evaluation_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_evaluated: bool
) -> None:
    plan = sweep_plan(tmp_path, num_runs=1)
    (run,) = plan.all_runs
    finish(run.config, run.run_id)
    if is_evaluated:
        counts = {"num_prompts": 4, "num_failed": 0, "accuracy": 0.5, "reward": 0.5, "seconds": 1.0}
        run.directory.metrics.append_eval(EvalReport.model_validate({"policy_version": run.config.steps, **counts}))
    made_of = list[str]()

    def materializing(_: Asset, inputs: list[Asset]) -> Any:
        made_of.extend(asset.key for asset in inputs)
        return work[0]

    work = list[Any]()
    task = SimpleNamespace(materializing=materializing)
    monkeypatch.setattr("flows.pipeline.operation", lambda _: lambda function: work.append(function) or task)
    result = PipelineResult(pipeline_id="one", best={}, model=str(tmp_path / "one/grpo"), accuracy=None, gain=None)
    (tmp_path / "one/grpo").mkdir(parents=True)
    asyncio.run(_promote(plan, result, run))
    evaluation = f"file://{tmp_path}/runs/run-0/evaluation"
    assert made_of == [f"file://{tmp_path}/one/grpo", *([evaluation] if is_evaluated else [])]
