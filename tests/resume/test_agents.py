"""Trajectories of several turns: whatever is killed in the middle of one, the run ends in the same weights."""

import os
import signal
from pathlib import Path

import pytest

from tests.progress import wait_until
from tests.services import Command, Workplace

pytestmark = pytest.mark.slow

STEPS, TURNS = 3, 3
GAME = '''
import os, pathlib, time

class Held:
    """Wants few vowels, in each of three turns; in the second one, it waits while a file is there."""

    def __init__(self, task, seed, folder):
        self._turn, self._seed, self._folder = 0, seed, pathlib.Path(folder)

    def reset(self):
        return f"{self._seed % 10}?"

    async def step(self, action):
        self._turn += 1
        if self._turn == 2 and (self._folder / "held").exists():
            waiting = self._folder / f"waiting-{os.getpid()}"
            waiting.touch()
            while (self._folder / "held").exists():
                time.sleep(0.05)
        return f"{len(action) % 10}!", 1 - sum(map(action.count, "aeiou")) / 4, self._turn == 3
'''


@pytest.fixture(scope="module")
def config(workplace: Workplace) -> tuple[str, ...]:
    folder = workplace.folder
    (folder / "held_game.py").write_text(GAME)
    tiny = (folder / "tiny.toml").read_text().splitlines()
    game = f'environment = {{ kind = "class", path = "held_game:Held", arguments = {{ folder = "{folder}" }} }}'
    others = [line for line in tiny if not line.startswith("reward.")]
    (folder / "agents.toml").write_text("\n".join([*others, 'reward.kind = "environment"', game]))
    stops = [*range(40), 259]  # a tiny model rarely ends a turn itself
    return (
        *("train", "agents.toml", f"steps={STEPS}", "checkpoint.every_steps=1", "rollout.max_response_tokens=48"),
        *("environment.num_processes=1", "environment.max_turn_tokens=12"),
        *(f"rollout.stop_token_ids={stops}", "rollout.num_workers=2", "rollout.batch_prompts=2"),
    )


def hold(workplace: Workplace) -> None:
    for old in waiting(workplace):
        old.unlink()
    (workplace.folder / "held").touch()


def release(workplace: Workplace) -> None:
    (workplace.folder / "held").unlink()


def waiting(workplace: Workplace) -> list[Path]:
    """Return the files of the environment processes that wait in a turn."""
    return list(workplace.folder.glob("waiting-*"))


def wait_for_turn(driver: Command, workplace: Workplace) -> None:
    driver.wait_for(lambda: waiting(workplace))


def test_whatever_is_killed_in_the_middle_of_a_trajectory(workplace: Workplace, config: tuple[str, ...]) -> None:
    workplace.sluice(*config, "--run-id", "agents")
    expected = workplace.run("agents")
    assert all(step["turns"] > 1 for step in expected.step_metrics())
    assert all(step["turns/failed"] == 0 for step in expected.step_metrics())

    hold(workplace)
    driver = workplace.start(*config, "--run-id", "agents-killed")
    run = workplace.run("agents-killed")
    wait_for_turn(driver, workplace)
    first = waiting(workplace)[0]
    os.kill(int(first.name.removeprefix("waiting-")), signal.SIGKILL)  # an environment process
    wait_until(lambda: set(waiting(workplace)) - {first})
    release(workplace)

    driver.wait_for(lambda: run.passed(0, "put"))
    hold(workplace)
    wait_for_turn(driver, workplace)
    assert workplace.kill_worker("RolloutWorker", at_most=1) == 1
    release(workplace)

    driver.wait_for(lambda: run.passed(1, "put"))
    hold(workplace)
    wait_for_turn(driver, workplace)
    driver.kill()
    release(workplace)
    workplace.sluice("resume", "agents-killed")
    assert run.weights(STEPS) == expected.weights(STEPS)
    assert run.step_metrics() == expected.step_metrics()
    assert run.evaluations() == expected.evaluations()
