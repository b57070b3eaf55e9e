"""A colocated run of agents: whatever dies, in the middle of a turn, at wake-up or asleep, its weights are the same.

They are compared with those of a separate run. Its environments can be held in a turn. In one more step, they answer
otherwise in each process, and are asked nothing twice.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.environments.journal import Entry, load
from infra.models.load import load_model
from infra.stores.offline import read_step
from schemas.config.model import ModelConfig
from schemas.step import StoredBatch
from tests.support.progress import wait_until
from tests.support.run_results import Run
from tests.support.workplace import Command, Workplace

pytestmark = pytest.mark.extended

STEPS, RUN_ID = 5, "colocated"
ASLEEP = 2  # the step in which the second driver is killed while the engine sleeps
GAME = '''
import os, pathlib, time

class Held:
    """Wants few vowels, in each of three turns; in the second one, it waits while a file is there."""

    def __init__(self, task, seed):
        self._turn, self._seed = 0, seed

    def reset(self):
        return f"{self._seed % 10}?"

    async def step(self, action):
        self._turn += 1
        if self._turn == 2 and (FOLDER / "held").exists():
            (FOLDER / f"waiting-{os.getpid()}").touch()
            while (FOLDER / "held").exists():
                time.sleep(0.05)
        return f"{len(action) % 10}!", 1 - sum(map(action.count, "aeiou")) / 4, self._turn == 3
'''
REWARDS = '''
import os, pathlib, signal

from infra.engines.embedded.engine import TransformersEngine
from tiny_rewards import short

wake = TransformersEngine.wake

def wake_or_die(self, tags):
    """Wake up, or kill this worker, once, if a test has asked for it."""
    order = pathlib.Path("die-at-wake-up")
    if order.exists():
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return wake(self, tags)

TransformersEngine.wake = wake_or_die
'''
SEARCH = '''
import os, time

SALT, asked = os.urandom(4).hex(), []

class Held:
    """Answers otherwise in each process, which it notes; after some answers it waits while a file is there."""

    keeps_state = False

    def __init__(self, task, seed):
        self._seed = seed  # tells a step's trajectories from those of an evaluation

    def reset(self):
        self._note("reset")
        return SALT

    def step(self, action):
        self._note("step")
        asked.append(action)
        if len(asked) > NUM_ANSWERS and (FOLDER / "held").exists():
            (FOLDER / f"waiting-{os.getpid()}").touch()
            while (FOLDER / "held").exists():
                time.sleep(0.05)
        return SALT[:2], 0.5, False, {"asked": 1}

    def _note(self, call):
        with (FOLDER / f"calls-{os.getpid()}").open("a") as file:
            file.write(f"{call} {self._seed}\\n")
'''
NUM_ANSWERS, NUM_ROWS = 7, 16
STOPS = [*range(40), 259]  # a tiny model rarely ends a turn itself
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", "eval.every_steps=3", "kl.coef=0.01", "loss.behavior=recompute"),
    'environment={kind="class", path="held_game:Held", num_processes=1, max_turn_tokens=12}',
    'reward={kind="weighted", num_processes=0, timeout_seconds=inf, parts={turns={reward={kind="environment"}}, '
    'short={reward={kind="function", path="colocated_rewards:short"}}}}',
    *("rollout.max_response_tokens=48", f"rollout.stop_token_ids={STOPS}", "runtime.num_policy_ranks=2"),
    *("advantage.kind=turn_level", "loss.observation_coef=0.1"),
)


@pytest.fixture(scope="module")
def separate(workplace: Workplace) -> Run:
    """An undisturbed run whose workers keep all that they hold."""
    write_game(workplace, GAME)
    (workplace.folder / "colocated_rewards.py").write_text(REWARDS)
    workplace.sluice(*CONFIG, "--run-id", "separate")
    return workplace.run("separate")


def write_game(workplace: Workplace, text: str) -> None:
    header = f"import pathlib\n\nFOLDER, NUM_ANSWERS = pathlib.Path({str(workplace.folder)!r}), {NUM_ANSWERS}\n"
    (workplace.folder / "held_game.py").write_text(header + text)


def hold(workplace: Workplace) -> None:
    """Have environments wait in their second turns."""
    for old in waiting(workplace):
        old.unlink()
    (workplace.folder / "held").touch()


def release(workplace: Workplace) -> None:
    (workplace.folder / "held").unlink()


def waiting(workplace: Workplace) -> list[Path]:
    """Return the files of the environment processes that wait in a turn."""
    return list(workplace.folder.glob("waiting-*"))


@pytest.fixture(scope="module")
def in_turns(workplace: Workplace, separate: Run) -> Run:
    """A colocated run; environment, engine and driver die in turns, and the engine asleep. No step may be run again."""
    hold(workplace)
    driver = workplace.start(*CONFIG, "runtime.placement=colocated", "runtime.max_restarts=0", "--run-id", RUN_ID)
    run = workplace.run(RUN_ID)
    driver.wait_for(lambda: bool(waiting(workplace)))
    first = waiting(workplace)[0]
    os.kill(int(first.name.removeprefix("waiting-")), signal.SIGKILL)  # an environment process
    wait_until(lambda: set(waiting(workplace)) - {first})
    release(workplace)

    driver.wait_standing(lambda: run.num_done == 0 and run.committed(0, "reference"))
    assert workplace.kill_worker("RolloutWorker") == 1  # it sleeps
    kill_in_turn(driver, workplace, lambda: workplace.kill_worker("RolloutWorker"))
    driver.wait_standing(lambda: run.num_done == 1 and run.committed(1, "put"))
    kill_in_turn(driver, workplace, driver.kill)
    return run


def kill_in_turn(driver: Command, workplace: Workplace, kill: Callable[[], object]) -> None:
    """Kill a process in the middle of a trajectory of the next step of a driver, which stands."""
    hold(workplace)
    driver.resume()
    driver.wait_for(lambda: bool(waiting(workplace)))
    kill()
    release(workplace)


@pytest.fixture(scope="module")
def ledger(workplace: Workplace, in_turns: Run) -> dict[str, str]:
    """The text of the ledger's entries, by stage, that the next driver left: it was killed while the engine slept."""
    driver = workplace.start("resume", RUN_ID)
    driver.wait_standing(lambda: in_turns.num_done == ASLEEP and in_turns.committed(ASLEEP, "advantage"))
    driver.kill()
    folder = in_turns.step_ledger(ASLEEP)
    return {name.partition("-")[0]: (folder / name).read_text() for name in in_turns.entries(ASLEEP)}


@pytest.fixture(scope="module")
def colocated(workplace: Workplace, in_turns: Run, ledger: dict[str, str]) -> Run:
    """The same run, resumed to its end; the engine dies when it wakes up for the first time."""
    (workplace.folder / "die-at-wake-up").touch()
    printed = workplace.sluice("resume", RUN_ID)
    assert "workers take turns in a GPU's memory" in printed
    assert not (workplace.folder / "die-at-wake-up").exists()
    return in_turns


def test_trajectories_have_several_turns(separate: Run) -> None:
    assert all(step["turns"] > 1 for step in separate.step_metrics())
    assert all(step["turns/failed"] == 0 for step in separate.step_metrics())


def test_what_environments_answer_is_learned(separate: Run) -> None:
    first, *_, last = (step["observation_cross_entropy"] for step in separate.step_metrics())
    assert 0 < last < first


def test_what_the_ledger_holds_is_small_and_plain(ledger: dict[str, str]) -> None:
    assert {"rollout", "put", "logprob", "reference", "advantage"} <= set(ledger)
    for entry in ledger.values():
        record = json.loads(entry)  # JSON throughout: no tensor, table or object reference
        assert len(entry) < 20_000
        assert "ObjectRef" not in entry
        assert record["metadata"]["serializer"]["type"] == "sluice-handle"  # JSON, as `json.loads` has shown
    result = json.loads(ledger["put"])["result"]
    handle = json.loads(result) if isinstance(result, str) else result
    assert {"prompt_ids", "response_ids"} < set(StoredBatch.model_validate(handle["data"]).batch.columns)


def test_a_colocated_run_ends_the_same_whatever_dies(separate: Run, colocated: Run) -> None:
    assert colocated.weights(STEPS) == separate.weights(STEPS)
    assert colocated.step_metrics() == separate.step_metrics()
    assert colocated.evaluations() == separate.evaluations()
    assert [event.kind for event in colocated.metrics.events()] == ["start", "resume", "resume"]  # no step run again


def test_each_turn_moves_the_bytes_of_the_model(workplace: Workplace, separate: Run, colocated: Run) -> None:
    model = load_model(ModelConfig(path=str(workplace.folder / "model")))
    whole = 4 * sum(weight.numel() for weight in model.parameters())
    assert separate.metrics.steps()[-1].memory_by_phase == {}
    turns = colocated.metrics.steps()[-1].memory_by_phase
    rollout, scoring, update = (turns[phase] for phase in ("rollout", "scoring", "update"))
    # The optimizer of both ranks, and their weights once they are published; then the engine's weights exist again.
    assert (rollout.moved_bytes, rollout.freed_bytes, rollout.kept_bytes) == (3 * whole, whole, 0)
    assert rollout.resident_bytes == {"reference": 0, "policy": 0, "rollout": whole}
    assert (scoring.moved_bytes, scoring.freed_bytes) == (2 * whole, whole)
    assert scoring.resident_bytes == {"rollout": 0, "policy": whole // 2, "reference": whole}
    assert (update.moved_bytes, update.freed_bytes) == (3 * whole, 0)  # the reference out, the optimizer in
    assert update.resident_bytes == {"rollout": 0, "reference": 0, "policy": 3 * whole // 2}


def test_in_one_more_step_nothing_is_asked_twice(workplace: Workplace, colocated: Run) -> None:
    write_game(workplace, SEARCH)
    hold(workplace)
    driver = workplace.start("resume", RUN_ID, f"steps={STEPS + 1}")
    driver.wait_for(lambda: bool(waiting(workplace)))
    wait_until(lambda: len(answers(colocated)) == NUM_ROWS + NUM_ANSWERS)  # those before the one that waits
    driver.kill()
    assert workplace.kill_worker("RolloutWorker") == 1
    recorded = answers(colocated)
    first = waiting(workplace)[0].name.removeprefix("waiting-")
    release(workplace)
    workplace.sluice("resume", RUN_ID)

    calls = {
        path.name.removeprefix("calls-"): [line.split() for line in path.read_text().splitlines()]
        for path in workplace.folder.glob("calls-*")
    }
    report = colocated.metrics.steps()[STEPS]
    assert report.telemetry["turns/recorded"] == NUM_ANSWERS
    assert "turns/restarted" not in report.telemetry
    seeds = {seed for _, seed in calls[first]}
    asked = Counter(call for process in calls.keys() - {first} for call, seed in calls[process] if seed in seeds)
    answered = round(report.metrics["environment/asked"] * NUM_ROWS)
    assert (asked["reset"], asked["step"]) == (0, answered - NUM_ANSWERS)
    rows = read_step(colocated.path, STEPS, columns=["sample_id", "prompt_text", "response_text"]).to_pylist()
    texts = {row["sample_id"]: row["prompt_text"] + row["response_text"] for row in rows}
    assert len({row["prompt_text"][-8:] for row in rows}) == 1  # all resets were of the first process
    for entry in recorded:
        assert entry.answer.observations[0] in texts[f"{STEPS}-{entry.group}-{entry.sample}"]
    assert colocated.journals.steps() == []


def answers(run: Run) -> list[Entry]:
    """Return the answers in the journal of the last step."""
    lines = [line for attempt in run.journals.attempts(STEPS, 0) for line in attempt.read()]
    entries = [Entry.model_validate(load(line)) for line in lines if "turn" in load(line)]
    return [entry for entry in entries if entry.answer is not None]
