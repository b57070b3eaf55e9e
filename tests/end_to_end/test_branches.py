"""A program that leaves its chat: runs of it train on each token once, and end in the same weights after kills."""

import numpy as np
import pytest

from infra.stores.offline import read_step
from rl_core.columns.jagged import BRANCH_COLUMNS, branches_of
from tests.support.programs import PRELUDE
from tests.support.progress import wait_until
from tests.support.run_results import Run
from tests.support.workplace import Workplace

STEPS, NUM_TURNS, NUM_BRANCHES = 3, 5, 3
AGENT = """
import random

place = {folder!r}
held, prompt = os.path.join(place, "held"), list(messages)
ask()
say("go on")
second = ask()
trunk = list(messages)
messages[:] = [*prompt, {"role": "user", "content": "so far: " + second[:3]}]  # a summary of its history
ask()
messages[:] = [{"role": "user", "content": "who are you?"}]  # a second agent
if os.path.exists(held):
    open(os.path.join(place, "waiting"), "w").close()
    while os.path.exists(held):
        time.sleep(0.05)
ask()
messages[:] = [*trunk, {"role": "user", "content": "well?"}]  # where the first one was
last = ask()
finish(len(set(last)) / 12)
"""
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", "eval.every_steps=0", "kl.coef=0.01", "loss.behavior=recompute"),
    'environment={kind="program", command=["{python}", "{workdir}/branching.py"], max_turn_tokens=8, num_processes=1}',
    *('reward={kind="environment"}', "rollout.max_response_tokens=150", "rollout.num_prompts=2"),
    *(
        f"rollout.stop_token_ids={[*range(40), 259]}",
        "store.keep_steps=all",
        "packing.token_budget=600",
        "runtime.num_policy_ranks=2",
    ),
)
COLUMNS = ("prompt_ids", "response_ids", "loss_mask", "sampler_logprobs", *BRANCH_COLUMNS)


@pytest.fixture(scope="module")
def expected(workplace: Workplace) -> Run:
    agent = AGENT.replace("{folder!r}", repr(str(workplace.folder)))
    (workplace.folder / "branching.py").write_text(PRELUDE + agent)
    workplace.sluice(*CONFIG, "--run-id", "branches")
    return workplace.run("branches")


def test_engine_trainer_and_reference_score_the_same_paths(workplace: Workplace, expected: Run) -> None:
    for step, metrics in enumerate(expected.step_metrics()):
        assert metrics["turns/branches"] > 1
        assert metrics["turns/branch_tokens"] > 2 * metrics["turns/branches"]
        assert metrics["mismatch/max"] < 1e-4  # the engine samples a branch as a chat of its own
        assert (metrics["ratio"], metrics["ratio_max"]) == (1.0, 1.0)
        assert (metrics["kl"] < 1e-6) == (step == 0)
    assert "same bits" in workplace.sluice("replay", "branches", "--steps", "1")


def test_its_requests_are_counted_and_its_trajectories_drawn(workplace: Workplace, expected: Run) -> None:
    for report in expected.metrics.steps():
        assert report.telemetry["requests/chat_completions"] >= report.metrics["turns"]  # one may have been cut off
        assert 0 < report.telemetry["requests/seconds"] < report.telemetry["requests/seconds_max"]
        assert report.telemetry.keys().isdisjoint(("requests/repeated", "requests/refused"))
    artifacts = workplace.ask(lambda client: client.read_artifacts())
    found = {artifact.description: artifact for artifact in artifacts if artifact.key == "branches-trajectories"}
    assert set(found) == {"trajectories of step 0", f"trajectories of step {STEPS - 1}"}
    drawn = found["trajectories of step 0"].data
    rows = read_step(expected.path, 0, columns=("loss_mask", "response_ids"))
    totals = {f"    {sum(row['loss_mask'])} of {len(row['response_ids'])} tokens sampled" for row in rows.to_pylist()}
    assert totals & set(drawn.splitlines())
    assert "    └─ turn 4: " in drawn


def test_each_token_is_stored_and_trained_once(expected: Run) -> None:
    rows = read_step(expected.path, 1, columns=COLUMNS)
    found = branches_of(*(rows[name].combine_chunks() for name in BRANCH_COLUMNS))
    whole = [row for row, turns in enumerate(rows["turn_tokens"].to_pylist()) if len(turns) == NUM_TURNS]
    assert whole
    for row in whole:
        assert (found.row == row).sum() == NUM_BRANCHES
    for row in rows.to_pylist():
        assert sum(row["turn_tokens"]) == sum(row["loss_mask"])
        assert len(row["response_ids"]) == sum(row["turn_tokens"]) + sum(row["turn_bridge_tokens"])
        assert all(logprob == 0 for logprob in np.array(row["sampler_logprobs"])[~np.array(row["loss_mask"])])


def test_the_engine_computes_each_token_once(expected: Run) -> None:
    for step, report in enumerate(expected.metrics.steps()):
        rows = read_step(expected.path, step, columns=("prompt_ids", "turn_bridge_tokens"))
        given = sum(len(tokens) for tokens in rows["prompt_ids"].to_pylist())
        between = sum(sum(turns) for turns in rows["turn_bridge_tokens"].to_pylist())
        assert 0 < report.telemetry["engine/prefill_tokens"] <= given + between


def test_a_killed_run_ends_in_the_same_weights(workplace: Workplace, expected: Run) -> None:
    run, waiting, held = (
        workplace.run("branches-killed"),
        *(workplace.folder / name for name in ("waiting", "held")),
    )
    held.touch()
    driver = workplace.start(*CONFIG, "--run-id", run.run_id)
    driver.wait_for(waiting.exists)
    assert workplace.kill_worker("RolloutWorker") == 1
    waiting.unlink()
    driver.wait_for(waiting.exists)  # the programs have been started again, and asked for what they had
    held.unlink()
    driver.wait_for(lambda: run.num_done >= 1)
    waiting.unlink(missing_ok=True)
    held.touch()
    driver.wait_for(waiting.exists)
    driver.kill()
    held.unlink()
    journals = run.path / "journal"  # without its worker, what it had is played again from them
    wait_until(lambda: any("finish_reason" in each.read_text() for each in journals.rglob("*") if each.is_file()))
    assert workplace.kill_worker("RolloutWorker") == 1
    workplace.sluice("resume", run.run_id)
    assert any(report.telemetry.get("turns/recorded", 0) > 0 for report in run.metrics.steps())
    assert run.weights(STEPS) == expected.weights(STEPS)
    for step in range(STEPS):
        assert read_step(run.path, step, COLUMNS).equals(read_step(expected.path, step, COLUMNS))
