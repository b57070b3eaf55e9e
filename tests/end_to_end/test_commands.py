"""Commands that the other tests of `make test` leave out, each to its end: on a run that is served; a pipeline; a demo.

What they do when they are disturbed, and with more in them, is tested by `extended` tests.
"""

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate

from infra.storage.lineage import load_fork
from tests.support.commands import sluice_in_turn
from tests.support.run_results import Run
from tests.support.sft import sft_toml, write_sums
from tests.support.workplace import Workplace

STEPS, RUN_ID, FORK, POOL = 2, "served", "served-at-1", "commands"
OFFERED, DEPLOYED = "offered.toml", "pooled.toml"  # the same config: another pool's deployment is not replaced
KEPT = ("store.keep_steps=all", f"checkpoint.every_steps={STEPS}", f"steps={STEPS}")
PIPELINE = f"""
name = "piped"
set = {{steps = {STEPS}}}

[stages.sft]
config = "sums.toml"
sweep = {{"optim.lr" = [1e-6, 1e-2]}}
max_runs = 2

[stages.taught]
config = "tiny.toml"
model = "sft"
teachers = {{before = "sft"}}
set.distillation = {{reward_weight = 0.5, teachers.before.max_prompt_tokens = 40}}
set.data.curriculum = {{kind = "levels", field = "index", starts = [0, 6], window = 2, success_threshold = 0.95}}
set.data.reuse = {{run = "{RUN_ID}", steps = [0, {STEPS}], num_groups = 1}}
set.rollout.dynamic_sampling.max_rounds = 2
set.runtime.max_staleness = 1
set.correction.kind = "truncated"

[gate]
query = "select count(*) = {STEPS} from steps where run_id = $taught"
"""
COMMANDS = {
    "deploy": ("deploy", DEPLOYED, "--pool", POOL),
    "eval": ("eval", RUN_ID),
    "bundle": ("bundle", RUN_ID, "1", "-o", "served.bundle"),
    "reproduce": ("reproduce", "served.bundle"),
    "fork": ("fork", RUN_ID, "--at", "1", "--run-id", FORK, "--start"),
    "diff": ("diff", RUN_ID, FORK),
    "tournament": ("tournament", RUN_ID, "rloo", "--fork-steps", "1", "--json"),
    "gc": ("gc", FORK, "--keep-steps", "0"),
    "demo": ("demo", "--tiny"),
}


@pytest.fixture(scope="module")
def served(workplace: Workplace) -> Run:
    """A run that was started from a deployment of `sluice serve`, which was ended then."""
    settings = [argument for setting in KEPT for argument in ("--set", setting)]
    (workplace.folder / OFFERED).symlink_to("tiny.toml")
    server = workplace.start("serve", OFFERED, *settings)
    server.wait_for(lambda: "serving until stopped" in server.printed)

    async def start(client: PrefectClient) -> UUID:
        deployment = await client.read_deployment_by_name(f"train/{Path(OFFERED).stem}")
        return (await client.create_flow_run_from_deployment(deployment.id, parameters={"run_id": RUN_ID})).id

    def is_final() -> bool:
        state = workplace.ask(lambda client: client.read_flow_run(started)).state
        return state is not None and state.is_final()

    started = workplace.ask(start)
    server.wait_for(is_final, poll_seconds=1)
    assert workplace.ask(lambda client: client.read_flow_run(started)).state_name == "Completed"
    server.terminate()
    server.finish()
    return workplace.run(RUN_ID)


@pytest.fixture(scope="module")
def printed(workplace: Workplace, served: Run) -> dict[str, str]:
    """What the commands print, all in one process."""
    workplace.ask(lambda client: client.create_work_pool(WorkPoolCreate(name=POOL, type="process")))
    (workplace.folder / DEPLOYED).symlink_to("tiny.toml")
    found = dict(zip(COMMANDS, sluice_in_turn(workplace, *COMMANDS.values()), strict=True))
    assert {name: code for name, (code, _) in found.items()} == dict.fromkeys(COMMANDS, 0), found
    return {name: text for name, (_, text) in found.items()}


def json_of(text: str) -> Any:
    return json.loads(next(line for line in text.splitlines() if line.startswith("{")))


@pytest.mark.command("serve")
def test_a_run_is_started_from_a_deployment_that_is_served(served: Run) -> None:
    assert [report.step for report in served.metrics.steps()] == list(range(STEPS))


@pytest.mark.command("deploy")
def test_a_config_is_deployed(workplace: Workplace, printed: dict[str, str]) -> None:
    deployment = workplace.ask(lambda client: client.read_deployment_by_name(f"train/{Path(DEPLOYED).stem}"))
    assert (deployment.work_pool_name, deployment.parameters["config"]) == (POOL, DEPLOYED)
    assert f"start a worker, if none runs: prefect worker start --pool {POOL}" in printed["deploy"]


@pytest.mark.command("eval")
def test_a_checkpoint_has_the_accuracy_of_the_run_s_last_evaluation(served: Run, printed: dict[str, str]) -> None:
    last = served.evaluations()[-1]
    figures = f"policy version {STEPS}: accuracy {last.accuracy:.3f}, mean reward {last.reward:.3f} over 4 prompts"
    assert figures in printed["eval"]


@pytest.mark.command("bundle", "reproduce")
def test_a_bundle_s_step_has_the_same_bits(printed: dict[str, str]) -> None:
    assert "to served.bundle" in printed["bundle"]
    assert "same bits" in printed["reproduce"]


@pytest.mark.command("fork", "diff")
def test_a_fork_ends_in_its_parent_s_weights(workplace: Workplace, served: Run, printed: dict[str, str]) -> None:
    assert f"made run {FORK} from {RUN_ID}@1: 1 updates repeated" in printed["fork"]
    fork = workplace.run(FORK)
    assert fork.weights(STEPS) == served.weights(STEPS)
    assert fork.step_metrics() == served.step_metrics()
    assert "same bits" in printed["diff"]


@pytest.mark.command("tournament")
def test_methods_are_compared_on_the_run_s_steps_and_by_forks(
    workplace: Workplace, served: Run, printed: dict[str, str]
) -> None:
    found = json_of(printed["tournament"])
    own, rloo = found["methods"]
    assert (found["steps"], found["at"]) == ([0, STEPS], STEPS)
    for step, other, metrics in zip(own["figures"], rloo["figures"], served.step_metrics(), strict=True):
        assert step["update"]["cosine"] == pytest.approx(1)
        assert 0 < other["update"]["cosine"] < 1
        assert step["metrics"]["loss"] == metrics["loss"]
    (last,) = found["rounds"]
    assert (last["stop"], last["num_kept"]) == (STEPS + 1, 1)
    assert {each["method"]: each["failure"] for each in last["standings"]} == {"own": "", "rloo": ""}
    for each in last["standings"]:
        fork = workplace.run(each["run_id"])
        origin, (*_, evaluation) = load_fork(fork), fork.metrics.evals()
        assert origin is not None
        assert (origin.run_id, origin.step, fork.num_done) == (RUN_ID, STEPS, STEPS + 1)
        assert (evaluation.policy_version, evaluation.accuracy) == (STEPS + 1, each["accuracy"])
    assert "best of 2" in (served.path / "tournament-t.html").read_text()


@pytest.mark.command("gc")
def test_the_columns_of_finished_steps_are_removed(workplace: Workplace, printed: dict[str, str]) -> None:
    assert f"{FORK}: removed " in printed["gc"]
    assert not list((workplace.run(FORK).path / "columns").glob("step-*"))


@pytest.mark.command("demo")
def test_the_demo_fine_tunes_a_model_and_improves_it(workplace: Workplace, printed: dict[str, str]) -> None:
    runs = {path.name: workplace.run(path.name) for path in (workplace.folder / "runs").glob("demo*")}
    (sft,) = (run for name, run in runs.items() if name.startswith("demo-sft"))
    (grpo,) = (run for name, run in runs.items() if not name.startswith("demo-sft"))
    assert [run.num_done for run in (sft, grpo)] == [2, 2]
    assert sft.config().sft is not None
    assert grpo.config().model.path == ".sluice/demo/tiny-seed-0/model"
    assert "held-out accuracy" in printed["demo"]


@pytest.mark.command("pipeline")
def test_a_pipeline_goes_on_with_the_best_run_of_a_sweep_and_promotes_what_it_taught(workplace: Workplace) -> None:
    write_sums(workplace.folder)
    (workplace.folder / "sums.toml").write_text(sft_toml())
    (workplace.folder / "pipe.toml").write_text(PIPELINE)
    shown = workplace.sluice("pipeline", "pipe.toml", "--id", "piped")
    assert "stage sft: the best run is piped-sft-2 (optim.lr=0.01)" in shown
    losses = [workplace.run(f"piped-sft-{number}").metrics.evals()[-1].loss for number in (1, 2)]
    assert losses[1] < losses[0]  # type: ignore[operator]
    taught = workplace.run("piped-taught")
    assert taught.config().model.path == taught.config().distillation.teachers["before"].path
    first, second = taught.step_metrics()
    assert abs(first["teacher/kl"]) < 1e-4 < abs(second["teacher/kl"])  # they begin with the same weights
    assert second["reuse/groups"] == 1
    assert {"data/index-0/share", "data/index-6/share", "rollout/rounds", "correction/weight"} <= second.keys()
    assert "rollout of the next step" in {span.name for span in taught.metrics.steps()[0].timeline}
    promoted = workplace.folder / "models/piped/piped/taught"
    assert (promoted.parents[1] / "current").resolve() == promoted
    exported, before = ((promoted.with_name(name) / "model.safetensors").read_bytes() for name in ("taught", "sft"))
    assert exported != before
