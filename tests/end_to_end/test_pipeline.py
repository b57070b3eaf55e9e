"""Pipelines: an undisturbed one, one that is killed in its second stage and that its gate refuses, sweeps, serving."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Scheduled

from tests.services.test_assets import made_of, materialized, wait_for
from tests.support.sft import sft_toml, write_sums
from tests.support.workplace import Command, Workplace

pytestmark = pytest.mark.extended

PIPELINE = """
name = "pipe"

[set]
steps = 3

[stages.sft]
config = "sft.toml"

[stages.taught]
config = "tiny.toml"
model = "sft"
teachers = {before = "sft"}
set = {"distillation.reward_weight" = 0.5, "distillation.teachers.before.max_prompt_tokens" = 40}

[gate]
query = "select count(*) = 3 from steps where run_id = $taught"
"""
IN_PYTHON = """
from flows import run_pipeline

result = run_pipeline("pipe.toml", pipeline_id="killed")
print(result.pipeline_id, result.model, result.best["taught"])
"""
SWEEP = """
name = "sweep"
set = {steps = 2, "checkpoint.every_steps" = 1}

[stages.grpo]
config = "tiny.toml"
sweep = {"optim.lr" = [1e-2, 1e-3, 1e-4]}
max_runs = 2
best = "select run_id from metrics where name = 'learning_rate' order by value, step limit 1"

[gate]
min_gain = -1.0
data_path = "eval.parquet"

[export]
folder = "swept"
dtype = "bfloat16"
"""
# The judge is away once a run that has a teacher has finished a step, until the file is gone.
JUDGED = """
from pathlib import Path
from tiny_rewards import short

def score(prompt, completion, answer, info):
    lines = "".join(file.read_text() for file in Path("runs").glob("retried-*-taught/metrics.jsonl"))
    if Path("away").exists() and '"kind": "step"' in lines:
        raise RuntimeError("the judge is away")
    return short(prompt, completion, answer, info)
"""


@pytest.fixture(scope="module")
def place(workplace: Workplace) -> Workplace:
    write_sums(workplace.folder)
    (workplace.folder / "sft.toml").write_text(sft_toml())
    (workplace.folder / "pipe.toml").write_text(PIPELINE)
    (workplace.folder / "sweep.toml").write_text(SWEEP)
    return workplace


@pytest.fixture(scope="module")
def whole(place: Workplace) -> Path:
    """The files of an undisturbed pipeline."""
    printed = place.sluice("pipeline", "pipe.toml", "--id", "whole")
    assert "pipeline whole promoted models/pipe/whole/taught" in printed
    return place.folder / "models/pipe/whole"


@pytest.fixture(scope="module")
def killed(place: Workplace, whole: Path) -> Path:
    """The files of one that was killed in its second stage, and brought to the end of that by another process."""
    driver, run = place.start("pipeline", "pipe.toml", "--id", "killed"), place.run("killed-taught")
    driver.wait_standing(lambda: run.passed(1, "teacher"))
    second = place.sluice("pipeline", "pipe.toml", "--id", "killed", exit_code=2)
    assert f"pipeline killed is being driven by process {driver.processes[0].pid} on " in second
    driver.kill()
    files = whole.with_name("killed")
    trained = (files / "sft/config.json").stat()
    (files / ".taught-x").mkdir()  # as of an export that was killed
    printed = place.sluice("pipeline", "pipe.toml", "--id", "killed", "gate.query=select false", exit_code=1)
    assert "GateError: killed-taught doesn't pass the gate of pipeline killed: gate.query is false" in printed
    assert "to promote it all the same, change what refused it, e.g. gate.min_accuracy=0.5: sluice" in printed
    assert "sluice pipeline pipe.toml 'gate.query=select false' --id killed" in printed
    assert (files / "sft/config.json").stat() == trained
    return files


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def children(place: Workplace, pipeline_id: str) -> dict[str, FlowRun]:
    """Return the flow runs of a pipeline's runs, by name."""

    async def ask(client: PrefectClient) -> list[FlowRun]:
        named = FlowRunFilter(name={"any_": [pipeline_id]})  # as runs of other files may be
        (parent,) = await client.read_flow_runs(
            flow_filter=FlowFilter(name={"any_": ["pipeline"]}), flow_run_filter=named
        )
        of_parent = FlowRunFilterParentFlowRunId(any_=[parent.id])
        return await client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=of_parent))

    return {run.name: run for run in place.ask(ask)}


def test_the_last_model_is_promoted(place: Workplace, whole: Path, killed: Path) -> None:
    current = whole.parent / "current"
    assert current.is_symlink()
    assert current.resolve() == whole / "taught"  # not that of the killed one, which its gate refused
    assert weights(whole / "taught") != weights(whole / "sft") != weights(place.folder / "model")
    assert {name: run.state_name for name, run in children(place, "whole").items()} == {
        "whole-sft": "Completed",
        "whole-taught": "Completed",
    }


def test_assets_lead_from_the_data_to_the_promoted_model(place: Workplace, whole: Path) -> None:
    root, runs = f"file://{place.folder}", f"file://{place.folder}/runs"
    models = f"file://{whole}"
    upstream = {
        f"{runs}/whole-sft/policy": {f"{root}/model", f"{root}/rows.jsonl"},
        f"{models}/sft": {f"{runs}/whole-sft/policy"},
        f"{runs}/whole-taught/policy": {f"{models}/sft", f"{root}/train.parquet"},
        f"{models}/taught": {f"{runs}/whole-taught/policy"},
        f"file://{whole.parent}": {f"{models}/taught", f"{runs}/whole-taught/evaluation"},
    }
    for key, expected in upstream.items():
        assert made_of(wait_for(place, key, 3)[0]) == expected
    (promoted,) = materialized(place)[f"file://{whole.parent}"]
    accuracy = place.run("whole-taught").metrics.evals()[-1].accuracy
    assert promoted["payload"] == {"run_id": "whole-taught", "pipeline_id": "whole", "accuracy": accuracy}


def test_a_killed_pipeline_ends_in_the_same_weights(place: Workplace, whole: Path, killed: Path) -> None:
    assert weights(killed / "taught") == weights(whole / "taught")
    assert place.run("killed-taught").step_metrics() == place.run("whole-taught").step_metrics()
    assert [event.kind for event in place.run("killed-taught").metrics.events()] == ["start", "resume"]
    assert [event.kind for event in place.run("killed-sft").metrics.events()] == ["start"]
    assert not list(killed.glob(".*"))


def test_another_gate_promotes_what_is_trained_and_other_training_is_another_pipeline(
    place: Workplace, whole: Path, killed: Path
) -> None:
    refused = place.sluice("pipeline", "pipe.toml", "--id", "killed", "set.steps=4", exit_code=2)
    assert "pipeline killed can't go on with a different steps of stage sft, steps of stage taught" in refused
    assert place.python("-P", "-c", IN_PYTHON).splitlines()[-1] == "killed models/pipe/killed/taught killed-taught"
    assert (whole.parent / "current").resolve() == killed / "taught"
    assert len(place.run("killed-taught").metrics.events()) == 2  # it wasn't started again
    assert "pipeline whole is complete" in place.sluice("pipeline", "pipe.toml", "--id", "whole")
    assert (whole.parent / "current").resolve() == killed / "taught"  # it was promoted later


@pytest.fixture(scope="module")
def swept(place: Workplace) -> str:
    """What a pipeline with a sweep prints."""
    return place.sluice("pipeline", "sweep.toml", "--id", "swept")


def test_a_sweep_goes_on_with_the_best_run_and_has_so_many_at_the_same_time(place: Workplace, swept: str) -> None:
    printed = swept
    assert "stage grpo: the best run is swept-grpo-3 (optim.lr=0.0001)" in printed
    assert (place.folder / "swept/current").resolve() == place.folder / "swept/swept/grpo"
    assert place.run("swept-grpo-2").config().optim.lr == 1e-3
    before = place.run("swept-grpo-3").metrics.evals()[0]  # of the same prompts and weights, in another process
    assert f"model that it started from on eval.parquet: {before} (4 rows)" in printed
    assert "model of the last stage on eval.parquet: accuracy " in printed
    found = children(place, "swept").values()
    times = sorted((time, change) for run in found for time, change in ((run.start_time, 1), (run.end_time, -1)))
    running = [sum(change for _, change in times[: count + 1]) for count in range(len(times))]
    assert max(running) == 2


def test_only_the_version_that_was_evaluated_is_exported(place: Workplace, swept: str) -> None:
    folder, run, command = place.folder / "swept/swept", place.run("swept-grpo-3"), ("pipeline", "sweep.toml")
    expected = weights(folder / "grpo")
    shutil.rmtree(folder / "grpo")
    (folder / "result.json").unlink()
    shard = next((run.path / "policy/step-000002").glob("rank-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    printed = place.sluice(*command, "--id", "swept", exit_code=1)
    assert "again from its checkpoint before that, remove" in printed
    assert not (folder / "grpo").exists()
    (run.path / "summary.json").unlink()  # as it says
    place.sluice(*command, "--id", "swept")
    assert weights(folder / "grpo") == expected


@pytest.fixture
def judged(place: Workplace) -> Iterator[Command]:
    """The command that offers a pipeline whose second stage needs a judge, which is away."""
    (place.folder / "judged.py").write_text(JUDGED)
    (place.folder / "retried.toml").write_text(PIPELINE.replace('name = "pipe"', 'name = "retried"'))
    (place.folder / "away").touch()
    server = place.start("serve", "retried.toml", "--set", "stages.taught.set.reward.path=judged:score")
    server.wait_for(lambda: "serving until stopped" in server.printed)
    yield server
    server.kill()


def state_of(place: Workplace, flow_run: FlowRun) -> State:
    found = place.ask(lambda client: client.read_flow_run(flow_run.id)).state
    assert found is not None
    return found


def test_a_retry_of_a_failed_flow_run_goes_on_within_the_stage(place: Workplace, whole: Path, judged: Command) -> None:
    async def start(client: PrefectClient) -> FlowRun:
        deployment = await client.read_deployment_by_name("pipeline/retried")
        return await client.create_flow_run_from_deployment(deployment.id)

    started = place.ask(start)
    judged.wait_for(lambda: state_of(place, started).is_final(), poll_seconds=1)
    assert state_of(place, started).name == "Failed"
    assert "the judge is away" in (state_of(place, started).message or "")
    pipeline_id = f"retried-{str(started.id)[-12:]}"
    files, taught = place.folder / f"models/retried/{pipeline_id}", place.run(f"{pipeline_id}-taught")
    trained, num_done = (files / "sft/config.json").stat().st_mtime_ns, taught.num_done
    assert 0 < num_done < 3
    (place.folder / "away").unlink()
    place.ask(lambda client: client.set_flow_run_state(started.id, Scheduled(name="AwaitingRetry")))
    judged.wait_for(lambda: state_of(place, started).name not in ("Failed", "AwaitingRetry"), poll_seconds=1)
    judged.wait_for(lambda: state_of(place, started).is_final(), poll_seconds=1)
    promoted = f"promoted models/retried/{pipeline_id}/taught"
    assert (state_of(place, started).name, state_of(place, started).message) == ("Completed", promoted)
    assert (files / "sft/config.json").stat().st_mtime_ns == trained
    assert [event.kind for event in place.run(f"{pipeline_id}-sft").metrics.events()] == ["start"]
    assert [event.kind for event in taught.metrics.events()] == ["start", "resume"]
    assert [report.step for report in taught.metrics.steps()] == [0, 1, 2]
    assert weights(files / "taught") == weights(whole / "taught")


@pytest.fixture
def served(place: Workplace) -> Iterator[Command]:
    """The command that offers the sweep, with a learning rate at which it diverges."""
    swept = "stages.grpo.sweep.optim.lr=[1e30, 1e-2]"
    server = place.start("serve", "sweep.toml", "--cron", "0 0 29 2 *", "--set", swept)
    server.wait_for(lambda: "serving until stopped" in server.printed)
    yield server
    server.kill()


def test_a_deployment_of_a_pipeline_is_scheduled_and_a_run_that_diverges_is_left_out(
    place: Workplace, served: Command
) -> None:
    async def start(client: PrefectClient) -> FlowRun:
        deployment = await client.read_deployment_by_name("pipeline/sweep")
        assert [schedule.schedule.cron for schedule in deployment.schedules] == ["0 0 29 2 *"]
        properties = deployment.parameter_openapi_schema["properties"]
        assert list(properties) == ["file", "overrides", "pipeline_id"]
        assert all(entry["description"] for entry in properties.values())
        return await client.create_flow_run_from_deployment(deployment.id)

    started = place.ask(start)
    pipeline_id = f"sweep-{str(started.id)[-12:]}"
    served.wait_for(lambda: state_of(place, started).is_final(), poll_seconds=1)
    state = state_of(place, started)
    assert (state.name, state.message) == ("Completed", f"promoted swept/{pipeline_id}/grpo")
    assert (place.folder / "swept/current").resolve() == place.folder / f"swept/{pipeline_id}/grpo"
    summaries = [place.run(f"{pipeline_id}-grpo-{number}").summary() for number in (1, 2)]
    assert [summary is None for summary in summaries] == [True, False]
    assert {run.state_name for run in children(place, pipeline_id).values()} == {"Failed", "Completed"}
    assert "not finite" in (place.folder / f"swept/{pipeline_id}/{pipeline_id}-grpo-1.diverged").read_text()
