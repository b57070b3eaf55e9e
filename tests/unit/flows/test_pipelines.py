"""Plans of pipelines: what is refused before anything starts, the best run of a sweep, the gate, a changed file."""

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from math import nan
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.logging import disable_run_logger

from flows.deployments.entrypoints import _plan
from flows.pipeline import _accuracies, _failures, _find_best, _is_of_values, _run_stage, _train_all, run_stages
from flows.pipeline_plan import PipelinePlan, PlannedRun, _check_unchanged, load_pipeline, plan_pipeline
from flows.recovery import find_or_create_run
from infra.storage.driver_lock import file_lock
from infra.storage.runs import RunDirectory
from infra.workers.inputs import evaluation_digest
from schemas.config.run import RunConfig
from schemas.errors import (
    GpuMemoryError,
    NonFiniteError,
    PipelineError,
    PlanError,
    QueryError,
    RewardFailureError,
    RunError,
    ServerLostError,
)
from schemas.step import EvalReport, RunSummary, StepReport
from tests.support.command import assert_rejected, make_command
from tests.support.configs import config_toml
from tests.support.sft import MARKED, sft_toml, write_sums
from tests.support.sweeps import finish as finish_run
from tests.support.sweeps import sweep_plan
from tests.support.tiny import make_tiny_data, make_tiny_model

TWO_STAGES = """
[stages.sft]
config = "sft.toml"

[stages.grpo]
config = "tiny.toml"
model = "sft"
sweep = {"optim.lr" = [1e-2, 1e-3], seed = [0, 1]}

[gate]
min_accuracy = 0.5
"""
TWO_RUNS = 'name = "pipe"\ngate.min_accuracy = 0.5\n[stages.grpo]\nconfig = "tiny.toml"\nsweep = {seed = [0, 1]}\n'
PIPELINE = f'name = "pipe"\n{TWO_STAGES}'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the configs of two stages and their pipeline."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(config_toml(data={"eval_path": "eval.parquet"}))
    (tmp_path / "sft.toml").write_text(sft_toml())
    (tmp_path / "pipe.toml").write_text(PIPELINE)
    return tmp_path


def planned(*overrides: str, pipeline_id: str = "one") -> PipelinePlan:
    return plan_pipeline(load_pipeline("pipe.toml", overrides), pipeline_id)


def finish(
    directory: RunDirectory, plan: PipelinePlan, accuracies: tuple[float, float], measured: tuple[str, str] = ("", "")
) -> None:
    """Write what a finished run of the sweep leaves, as far as a pipeline reads it."""
    (run,) = (run for run in plan.runs["grpo"] if run.run_id == directory.run_id)
    RunDirectory.create(run.config, run.run_id)
    for version, accuracy, digest in zip((0, run.config.steps), accuracies, measured, strict=True):
        report = EvalReport(
            policy_version=version, num_prompts=4, accuracy=accuracy, reward=accuracy, num_failed=0, seconds=1.0
        )
        directory.metrics.append_eval(report.replace(measured=digest))
    directory.write_summary(
        RunSummary(
            run_id=run.run_id,
            steps=run.config.steps,
            reward_first=0.0,
            reward_last=0.0,
            accuracy_before=accuracies[0],
            accuracy_after=accuracies[1],
            seconds=1.0,
            tokens_per_second=1.0,
            seconds_by_phase={},
            store_bytes_at_end=0,
            prefect_ui="",
        )
    )


def test_a_plan_has_complete_configs_and_ids_of_its_runs(folder: Path) -> None:
    plan = planned(
        "set.optim.weight_decay=0.5", "stages.grpo.set.steps=7", "stages.grpo.set.data.eval_path=train.parquet"
    )
    assert list(plan.runs) == ["sft", "grpo"]
    assert [run.run_id for run in plan.runs["grpo"]] == [f"one-grpo-{number}" for number in (1, 2, 3, 4)]
    found = [(run.config.optim.lr, run.config.seed) for run in plan.runs["grpo"]]
    assert found == [(1e-2, 0), (1e-2, 1), (1e-3, 0), (1e-3, 1)]
    for run in plan.runs["grpo"]:
        assert run.config.model.path == "models/pipe/one/sft"
        assert (run.config.steps, run.config.data.eval_path) == (7, "train.parquet")
    (sft,) = plan.runs["sft"]
    assert (sft.run_id, sft.config.model.path, sft.config.steps) == ("one-sft", "model", 6)
    assert {run.config.optim.weight_decay for runs in plan.runs.values() for run in runs} == {0.5}
    unchecked = plan.runs["grpo"][0].config
    assert plan.untrained(unchecked, "grpo").model.path == "model"
    plan.model_of("sft").mkdir(parents=True)
    assert plan.untrained(unchecked, "grpo") == unchecked


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("stages.grpo.model=stf",), ("stage grpo uses the model of stf", "the stages are sft, grpo")),
        (("stages.sft.model=grpo",), ("stage sft uses the model of grpo", "doesn't come before it")),
        (("stages.grpo.model=grpo",), ("stage grpo uses the model of grpo", "none can use its own")),
        (("stages.grpo.modle=sft",), ("unknown key stages.grpo.modle", "did you mean 'model'")),
        (("gates.min_accuracy=1",), ("unknown key gates", "did you mean 'gate'")),
        (("stages.grpo.sweep.seed=[]",), ("stages.grpo", "seed = []", "give a list")),
        (("stages.grpo.sweep.seed=3",), ("stages.grpo", "seed = 3", "give a list")),
        (("stages.sft.max_runs=2",), ("stages.sft", "there is none")),
        (("stages.grpo.sweep.model.path=['a','b']",), ("model.path is the model of stage sft",)),
        (("stages.grpo.set.optim.lrr=1",), ("stage grpo: tiny.toml: unknown key optim.lrr",)),
        (("stages.grpo.config=absent.toml",), ("absent.toml does not exist",)),
        (("stages.1st.config=sft.toml",), ("stages.1st", "start with a letter")),
        (("stages={}",), ("stages", "at least 1")),
        (("gate.min_accuracy=1.5",), ("gate.min_accuracy = 1.5",)),
        (("gate={}",), ("gate", "it asks nothing")),
        (("gate.query=drop table runs",), ("gate.query: expected one query",)),
        (("stages.grpo.best=select",), ("stages.grpo.best: ",)),
        (("stages.grpo.set.data.eval_path=None",), ("stage grpo", "best run of a sweep", "data.eval_path")),
        (
            ("stages.grpo.set.data.eval_path=None", "stages.grpo.best=select 1"),
            ("stage grpo: the gate asks for its held-out accuracy",),
        ),
        (
            ("stages.sft.sweep={'sft.loss_on'=['assistant','all']}", "stages.sft.set.data.eval_path=rows.jsonl"),
            ("stage sft: ", "differ in sft.loss_on, on", "stages.sft.best"),
        ),
        (
            ("stages.sft.sweep={'model.path'=['model','other']}", "stages.sft.set.data.eval_path=rows.jsonl"),
            ("stage sft: ", "differ in model.path, on"),
        ),
        (
            ("stages.grpo.sweep={'reward.kind'=['exact','numeric'],seed=[0,1]}",),
            ("stage grpo: ", "differ in reward.absolute_tolerance, reward.kind,", "stages.grpo.best"),
        ),
        (("stages.grpo.sweep={'rollout.max_response_tokens'=[8,9]}",), ("or eval.max_response_tokens",)),
        (("stages.grpo.set.services.dir=other",), ("the same services", "services.dir")),
        (("stages.grpo.max_runs=2", "set.runtime.tracing=true"), ("stage grpo: max_runs = 2", "runtime.tracing")),
        (("gate.data_path=absent.jsonl",), ("gate.data_path: ", "absent.jsonl")),
        (("gate={query='select true',data_path='eval.parquet'}",), ("gate", "data_path is for min_accuracy")),
        (("export.folder=s3://bucket/models",), ("export.folder", "is a URL")),
        (("export.dtype=int8",), ("export.dtype", "bfloat16")),
        (("stages.grpo.set.data.train_path=absent.jsonl",), ("stage grpo: ", "absent.jsonl")),
        (("--id", "current"), ("can't have the id current", "choose another --id")),
        (("--id", "a/b"), ("'a/b-sft' is not a safe name",)),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    parts: tuple[str, ...],
) -> None:
    for name in ("model", "other"):
        make_tiny_model(folder / name)
    (folder / "other/chat_template.jinja").write_text(MARKED)
    make_tiny_data(folder / "train.parquet", 4)
    make_tiny_data(folder / "eval.parquet", 4)
    write_sums(folder)
    assert_rejected(make_command(monkeypatch, capsys)("pipeline", "pipe.toml", *overrides), *parts)
    assert not Path(".sluice").exists()
    assert not Path("models").exists()


def test_the_link_to_the_promoted_model_replaces_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "models/pipe/current").mkdir(parents=True)
    assert_rejected(make_command(monkeypatch, capsys)("pipeline", "pipe.toml"), "models/pipe/current", "is no link")


def test_the_best_run_is_that_of_the_best_evaluation_at_the_end_or_of_the_query(folder: Path) -> None:
    plan = planned()
    runs, stage = plan.runs["grpo"], plan.config.stages["grpo"]
    with pytest.raises(PipelineError, match="no run of the sweep is finished, of one-grpo-1"):
        _find_best(stage, runs)
    for run, accuracies in zip(runs, ((0.9, 0.3), (0.1, 0.7), (0.0, 0.7)), strict=False):  # the fourth has diverged
        finish(run.directory, plan, accuracies)
    assert _find_best(stage, runs) == runs[1]
    for run, loss in zip(runs, (nan, 2.5, 1.5), strict=False):
        report = run.last_evaluation()
        assert report is not None
        run.directory.metrics.append_eval(report.replace(loss=loss))
    assert _find_best(stage, runs) == runs[2]
    worst = "select run_id from evals where policy_version > 0 order by accuracy limit 1"
    assert _find_best(stage.replace(best=worst), runs) == runs[0]
    with pytest.raises(QueryError, match="expected the run_id of a finished run"):
        _find_best(stage.replace(best="select 'one-grpo-4'"), runs)
    with pytest.raises(QueryError, match="expected one value, got 3 rows of 1 columns"):
        _find_best(stage.replace(best="select run_id from runs"), runs)


@pytest.mark.parametrize("is_of_turn", [False, True])
def test_after_an_error_of_the_surroundings_no_further_run_of_a_sweep_begins(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_of_turn: bool
) -> None:
    plan = planned("stages.grpo.sweep={seed=[0,1,2]}", "stages.grpo.max_runs=2")
    plan.folder.mkdir(parents=True)
    runs, trained, lost = plan.runs["grpo"], list[str](), asyncio.Event()

    def lose() -> None:
        lost.set()
        raise ServerLostError("Prefect is away")

    @asynccontextmanager
    async def turn(config: RunConfig, **_: object) -> AsyncIterator[None]:
        if is_of_turn and config == runs[1].config:
            lose()
        yield

    def train_flow(run: PlannedRun, **_: object) -> Callable[..., Coroutine[None, None, None]]:
        async def train(*_: object) -> None:
            if run == runs[1]:
                lose()
            await lost.wait()
            await asyncio.sleep(0)  # in which it would be cancelled
            trained.append(run.run_id)

        return train

    monkeypatch.setattr("flows.pipeline._train_flow", train_flow)
    monkeypatch.setattr("flows.pipeline.get_run_logger", logging.getLogger)
    with pytest.raises(ServerLostError):
        asyncio.run(_train_all(plan, "grpo", turn))
    assert trained == [runs[0].run_id]


def test_a_run_that_has_a_step_fits_its_gpu(folder: Path) -> None:
    (run, *_) = planned("stages.grpo.sweep={seed=[0,1]}").runs["grpo"]
    assert _is_of_values(GpuMemoryError("full"), run)
    directory = RunDirectory.create(run.config, run.run_id)
    directory.metrics.append_step(
        StepReport(step=0, policy_version=1, metrics={"reward": 0.5}, seconds=1.0, seconds_by_phase={})
    )
    assert not _is_of_values(GpuMemoryError("full"), run)
    assert _is_of_values(PlanError("nothing to train on"), run)


@pytest.mark.parametrize(
    ("error", "is_left_out"),
    [
        (PlanError("nothing to train on"), True),
        (GpuMemoryError("too little"), True),
        (NonFiniteError("the loss"), True),
        (RewardFailureError("the judge is away"), False),
    ],
)
def test_a_run_of_a_sweep_that_stops_leaves_the_others_to_their_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: PipelineError, is_left_out: bool
) -> None:
    plan = planned("stages.grpo.sweep={seed=[0,1,2]}", "stages.grpo.max_runs=2")
    plan.folder.mkdir(parents=True)
    runs, trained, has_failed = plan.runs["grpo"], list[str](), asyncio.Event()

    def train_flow(run: PlannedRun, **_: object) -> Callable[..., Coroutine[None, None, None]]:
        async def train(*_: object) -> None:
            if run == runs[0]:
                has_failed.set()
                raise error
            await has_failed.wait()
            await asyncio.sleep(0)  # in which it would be cancelled
            trained.append(run.run_id)
            finish(run.directory, plan, (0.1, 0.7))

        return train

    monkeypatch.setattr("flows.pipeline._train_flow", train_flow)
    monkeypatch.setattr("flows.pipeline.get_run_logger", logging.getLogger)
    train_all = partial(_train_all, plan, "grpo", lambda _, **__: nullcontext())
    diverged = plan.folder / "one-grpo-1.diverged"
    for _ in range(2):
        with nullcontext() if is_left_out else pytest.raises(type(error), match=str(error)):
            asyncio.run(train_all())
        assert trained == ["one-grpo-2", "one-grpo-3"]
        assert diverged.exists() == is_left_out
    if not is_left_out:
        diverged.write_text("by hand")
    asyncio.run(train_all())
    assert _find_best(plan.config.stages["grpo"], runs) == runs[1]


def test_a_stage_s_model_stays_that_of_the_run_it_was_written_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("stages.grpo.sweep={seed=[0,1]}")
    runs = plan.runs["grpo"]
    for run, accuracy in zip(runs, (0.7, 0.3), strict=True):
        finish(run.directory, plan, (0.1, accuracy))
    plan.folder.mkdir(parents=True)

    async def export(directory: RunDirectory, out: Path, **_: object) -> None:
        assert directory.run_id == runs[0].run_id
        out.mkdir()

    monkeypatch.setattr("flows.export.export_as_asset", export)
    monkeypatch.setattr("flows.pipeline.get_run_logger", logging.getLogger)
    run_stage = partial(_run_stage, plan, "grpo", lambda _: nullcontext())
    assert asyncio.run(run_stage()) == runs[0]
    last = runs[1].last_evaluation()
    assert last is not None
    runs[1].directory.metrics.append_eval(last.replace(accuracy=0.9))  # as of a run that is trained further by hand
    assert asyncio.run(run_stage()) == runs[0]
    shutil.rmtree("runs")
    assert asyncio.run(run_stage()) == runs[0]
    (plan.folder / "grpo.best").unlink()  # as in a pipeline of an earlier version of Sluice
    with pytest.raises(PipelineError, match="no run of the sweep is finished, of one-grpo-1"):
        asyncio.run(run_stage())


@pytest.mark.parametrize(
    ("gate", "failure"),
    [
        ({"min_accuracy": 0.7, "min_gain": 0.6}, None),
        ({"min_accuracy": 0.8}, "accuracy 0.7000 is less than gate.min_accuracy = 0.8"),
        ({"min_gain": 0.61}, "gain 0.6000 is less than gate.min_gain = 0.61"),
        ({"query": "select accuracy > 0.5 from evals where run_id = $grpo and policy_version > 0"}, None),
        ({"query": "select accuracy > 0.7 from evals where run_id = $grpo and policy_version > 0"}, "is false"),
        ({"query": "select max(accuracy) > 0.5 from evals where run_id = 'x'"}, "is null"),
    ],
)
def test_a_gate_says_what_is_missing(folder: Path, gate: dict[str, object], failure: str | None) -> None:
    plan = planned("stages.grpo.sweep={}", "gate={min_accuracy=0.0}")
    plan = plan.replace(config=plan.config.replace(gate=gate))
    (run,) = plan.runs["grpo"]
    finish(run.directory, plan, (0.1, 0.7))
    failed = _failures(plan, {"sft": plan.runs["sft"][0], "grpo": run}, accuracy=0.7, gain=0.6)
    assert len(failed) == (failure is not None)
    assert failure is None or failure in failed[0]


@pytest.mark.parametrize(
    ("work", "is_exported", "named"),
    [
        ("flows.export.export_run", False, "the export to models/pipe/one/grpo"),
        ("flows.evaluate.evaluate_model", True, "the gate's evaluation"),
    ],
)
def test_a_pipeline_that_is_cancelled_keeps_its_lock_until_its_thread_ends(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    work: str,
    is_exported: bool,
    named: str,
) -> None:
    make_tiny_data(folder / "eval.parquet", 4)
    plan = planned("stages.grpo.sweep={}", "gate={min_accuracy=0.0,data_path='eval.parquet'}")
    for name in ("sft", "grpo")[: 1 + is_exported]:
        plan.model_of(name).mkdir(parents=True)
    finish(plan.runs["grpo"][0].directory, plan, (0.1, 0.7))
    lock = partial(file_lock, plan.folder / "driver.lock", "pipeline one", "wait")
    is_begun, is_cancelled, refused = threading.Event(), threading.Event(), list[str]()

    async def cancel() -> None:
        def block(*_: object, **__: object) -> None:
            is_begun.set()
            is_cancelled.wait()
            for _ in range(10):  # turns of the event loop, in the first of which it would have ended
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
            with pytest.raises(RunError) as error, lock():
                pass
            refused.append(str(error.value))

        monkeypatch.setattr(work, block)
        loop, pipeline = asyncio.get_running_loop(), asyncio.ensure_future(run_stages(plan))
        await asyncio.to_thread(is_begun.wait)
        for _ in range(2):  # as by the UI, and by Ctrl-C after that
            pipeline.cancel()
            await asyncio.sleep(0)
        is_cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await pipeline

    in_place = SimpleNamespace(materializing=lambda *_: in_place.work)  # of a task of Prefect's
    monkeypatch.setattr("flows.export.operation", lambda _: lambda work: setattr(in_place, "work", work) or in_place)
    for module in ("pipeline", "lifecycle.cancellation"):
        monkeypatch.setattr(f"flows.{module}.get_run_logger", logging.getLogger)
    asyncio.run(cancel())
    assert ["is being driven by process" in each for each in refused] == [True]
    assert f"waiting for the end of {named}; kill -9 {os.getpid()} ends it at once" in caplog.text
    with lock():
        pass


def test_a_gain_is_over_the_model_that_the_run_started_from(folder: Path) -> None:
    """Its path may be that of the promoted model: this one, after a kill right after the promotion."""
    write_sums(folder)
    for name, seed in (("first", 3), ("models/pipe/one/sft", 0)):  # of 0.012 and 0.0
        make_tiny_model(folder / name, seed=seed)
    link = folder / "models/pipe/current"
    link.symlink_to(folder / "first")
    one = ("stages={sft={config='sft.toml'}}", f"set.model.path={link}")
    plan = planned(*one, "gate={min_gain=0.0,data_path='rows.jsonl'}")
    (run,) = plan.runs["sft"]
    find_or_create_run(run.config, run.run_id)
    with disable_run_logger():
        expected = _accuracies(plan, run)
        link.unlink()
        link.symlink_to(Path("one", "sft"))
        assert _accuracies(plan, run) == expected
    assert expected[0] != expected[1]


def test_a_gain_of_exactly_the_least_one_is_enough(folder: Path) -> None:
    plan = planned("stages.grpo.sweep={}", "gate={min_gain=0.1}")
    assert 0.6 - 0.5 < 0.1  # of floats
    assert not _failures(plan, {"grpo": plan.runs["grpo"][0]}, 0.6, 0.6 - 0.5)


def test_a_gate_s_own_file_is_measured_on_all_of_its_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_sums(folder)
    make_tiny_model(folder / "models/pipe/one/sft")
    gate = "gate={min_accuracy=0.0,data_path='rows.jsonl'}"
    stage = ("stages={sft={config='sft.toml'}}", "set.eval.num_prompts=2")
    plan = planned(*stage, gate)
    (run,) = plan.runs["sft"]
    monkeypatch.setattr("flows.pipeline.get_run_logger", lambda: logging.getLogger("gate"))
    with caplog.at_level(logging.INFO, "gate"):
        found = _accuracies(plan, run)
    assert f"({len((folder / 'rows.jsonl').read_text().splitlines())} rows)" in caplog.text
    monkeypatch.delattr("flows.evaluate._score_held_out")
    assert _accuracies(planned(*stage, gate.replace("0.0", "0.5")), run) == found  # without another evaluation
    (folder / "rows.jsonl").write_text("".join((folder / "rows.jsonl").read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(NameError, match="_score_held_out"):
        _accuracies(plan, run)


def test_a_pipeline_shows_no_queue_while_a_run_of_it_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sweep whose pool has one slot, the second run asks for it while the first has it."""
    shown, slots = dict[str, bool](), asyncio.Semaphore(0)

    @asynccontextmanager
    async def turn(config: RunConfig, *, shows_queue: bool) -> AsyncIterator[None]:
        shown[f"run-{config.seed}"] = shows_queue
        if len(shown) == 1:
            asyncio.get_running_loop().call_soon(slots.release)
        async with slots:
            yield

    def of_run(run: PlannedRun, **_: object) -> object:
        async def train(config: RunConfig, run_id: str) -> RunSummary:
            while len(shown) == 1:  # until the second waits, or for good if it doesn't ask
                await asyncio.sleep(0)
            return finish_run(config, run_id)

        return train

    monkeypatch.setattr("flows.pipeline._train_flow", of_run)
    monkeypatch.setattr("flows.pipeline.get_run_logger", logging.getLogger)
    asyncio.run(_train_all(sweep_plan(folder, num_runs=3, max_runs=2), "grpo", turn))
    assert shown == {"run-0": True, "run-1": False, "run-2": True}


def test_a_retry_trains_what_was_begun_and_asks_the_gate_of_the_file(folder: Path) -> None:
    begun = planned(pipeline_id="own")
    begun.folder.mkdir(parents=True)
    (begun.folder / "pipeline.json").write_text(begun.model_dump_json())
    changed = load_pipeline("pipe.toml", ("gate.min_accuracy=0.1", "stages.sft.set.optim.lr=0.5"))
    retried = _plan(changed, "own", None)
    assert retried.config.gate == changed.gate != begun.config.gate
    assert retried.runs == begun.runs != plan_pipeline(changed, "own").runs
    assert _plan(changed, "own", "own") == plan_pipeline(changed, "own")


@pytest.mark.parametrize("key", ["min_accuracy", "min_gain"])
def test_a_gate_doesn_t_pass_what_was_not_evaluated(folder: Path, key: str) -> None:
    plan = planned("stages.grpo.sweep={}", f"gate={{{key}=0.0}}")
    (failed,) = _failures(plan, {"grpo": plan.runs["grpo"][0]}, None, None)
    assert "is unknown" in failed
    assert "set gate.data_path" in failed


def test_a_gain_is_between_evaluations_by_the_same_rows(folder: Path) -> None:
    plan = planned("stages.grpo.sweep={seed=[0,1]}")
    for run, measured in zip(plan.runs["grpo"], (("a", "a"), ("a", "b")), strict=True):
        finish(run.directory, plan, (0.1, 0.7), measured)
    assert [_accuracies(plan, run) for run in plan.runs["grpo"]] == [(0.7, 0.1), (0.7, None)]


def write_two_runs(folder: Path) -> None:
    """Write a pipeline with a sweep, its model and its data."""
    make_tiny_model(folder / "model")
    for name in ("train.parquet", "eval.parquet"):
        make_tiny_data(folder / name, 4)
    (folder / "pipe.toml").write_text(TWO_RUNS)


def test_a_sweep_whose_runs_are_evaluated_otherwise_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_two_runs(folder)
    plan = planned()
    for number, run in enumerate(plan.runs["grpo"]):
        digest = evaluation_digest(run.config)
        finish(run.directory, plan, (0.1, 0.7), (digest, digest))
        command = make_command(monkeypatch, capsys)
        changed = command("pipeline", "pipe.toml", "--id", "one", "set.eval.num_prompts=2", "gate.data_path=absent")
        refused = "runs one-grpo-1 and one-grpo-2 can't be compared" if number == 0 else "absent: no such file"
        assert_rejected(changed, refused)


def test_a_sweep_over_what_is_measured_has_a_query_or_was_begun_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_two_runs(folder)
    command, swept = make_command(monkeypatch, capsys), "stages.grpo.sweep={reward={kind=['exact','numeric']}}"
    passed = "gate.data_path: absent: no such file"  # the next thing that is checked
    overrides = (swept, "gate.data_path=absent")
    assert_rejected(command("pipeline", "pipe.toml", *overrides), "reward.kind, on which the figures")
    assert_rejected(command("pipeline", "pipe.toml", *overrides, "stages.grpo.best=select run_id from runs"), passed)
    begun = planned(swept)
    begun.folder.mkdir(parents=True)
    (begun.folder / "pipeline.json").write_text(begun.model_dump_json())
    assert_rejected(command("pipeline", "pipe.toml", "--id", "one", *overrides), passed)


def test_a_gate_s_query_must_be_true_or_false(folder: Path) -> None:
    plan = planned("stages.grpo.sweep={}", "gate={query='select 0.7'}")
    (run,) = plan.runs["grpo"]
    finish(run.directory, plan, (0.1, 0.7))
    with pytest.raises(QueryError, match=r"expected true or false, got Decimal\('0.7'\)"):
        _failures(plan, {"grpo": run}, None, None)


@pytest.mark.parametrize(
    ("overrides", "change"),
    [
        (("stages.sft.set.optim.lr=0.5",), "optim.lr of stage sft"),
        (("stages.grpo.set.steps=9",), "steps of stage grpo"),
        (("stages.grpo.sweep.seed=[0,2]",), "stages.grpo.sweep"),
        (("stages.grpo.best=select 1",), "stages.grpo.best"),
        (("stages.more={config='tiny.toml'}",), "stages"),
        (("gate.min_accuracy=0.1", "set.runtime.num_threads=2", "stages.grpo.max_runs=3"), None),
    ],
)
def test_what_may_change_when_a_pipeline_goes_on(folder: Path, overrides: tuple[str, ...], change: str | None) -> None:
    before = planned()
    before.folder.mkdir(parents=True)
    (before.folder / "pipeline.json").write_text(before.model_dump_json())
    expected = pytest.raises(RunError, match=f"pipeline one can't go on with a different {change}:")
    with nullcontext() if change is None else expected:
        _check_unchanged(planned(*overrides))
    _check_unchanged(planned(*overrides, pipeline_id="two"))


def test_the_dtype_of_a_model_that_is_written_may_not_change(folder: Path) -> None:
    before = planned()
    before.folder.mkdir(parents=True)
    (before.folder / "pipeline.json").write_text(before.model_dump_json())
    _check_unchanged(planned("export.dtype=bfloat16"))
    before.model_of("grpo").mkdir()
    with pytest.raises(RunError, match=r"can't go on with a different export\.dtype:"):
        _check_unchanged(planned("export.dtype=bfloat16"))
