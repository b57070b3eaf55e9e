"""Environments of other libraries, in real environment processes."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from infra.environments.pool import EnvironmentPool, Reply
from rl_core.environments.base import Task
from tests.support.environment_pools import open_rows, opened, step_rows

ADAPTERS = "infra.integrations"
STAND_INS = Path(__file__).parents[2] / "support"
ROOT = Path(__file__).parents[3]
REAL_VERIFIERS = ROOT / ".venv-verifiers" / "bin" / "python"  # made by `make verifiers`
LAKE = {"id": "FrozenLake-v1", "options": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}


def failure(pool: EnvironmentPool) -> str:
    reply = open_rows(pool, "")[0]
    assert reply.failure is not None
    return reply.failure.message


def test_a_gymnasium_environment_is_played_by_names_of_its_actions() -> None:
    pytest.importorskip("gymnasium")
    with opened(f"{ADAPTERS}.gymnasium:GymnasiumEnvironment", LAKE) as pool:
        assert open_rows(pool, "")[0].observations == ("<red>S</red>FFF\nFHFH\nFFFH\nHFFG",)
        reply = step_rows(pool, ["<think>left</think> not right, but DOWN."])[0]
        assert reply.observations == ("  (Down)\nSFFF\n<red>F</red>HFH\nFFFH\nHFFG",)
        assert (reply.reward, reply.done, reply.metrics) == (0.0, False, {"invalid_actions": 0.0})
        reply = step_rows(pool, ["downwards 1 <think>up</think>"])[0]
        assert reply.observations == ("There is no valid action in it. The actions are left, down, right, up.",)
        assert (reply.reward, reply.done, reply.metrics) == (0.0, False, {"invalid_actions": 1.0})
        replies = [step_rows(pool, [word])[0] for word in ("down", "right", "right", "down", "right")]
        assert [reply.done for reply in replies] == [False] * 4 + [True]
        assert replies[-1].reward == 1.0


def test_gymnasium_observations_and_actions_are_numbers_or_json() -> None:
    pytest.importorskip("gymnasium")
    path = f"{ADAPTERS}.gymnasium:GymnasiumEnvironment"
    with opened(path, {"id": "Blackjack-v1"}) as pool:
        replies = open_rows(pool, *"ab")
        assert replies[0].observations != replies[1].observations  # of other seeds
        replies = step_rows(pool, ["4.0", "stick: 0"])
        assert replies[0].observations == ("There is no valid action in it. An action is a number from 0 to 1.",)
        assert replies[1].done
        assert replies[1].reward in (-1.0, 0.0, 1.0)
    with opened(path, {"id": "Pendulum-v1"}) as pool:
        open_rows(pool, *"abcd")
        replies = step_rows(pool, ["[0.5]", "0.5", "[NaN]", "[[1], [2, 3]]"])
        assert [replies[row].metrics["invalid_actions"] for row in range(4)] == [0, 1, 1, 1]
        assert replies[0].observations[0].count(",") == 2
    with opened(path, {**LAKE, "actions": ["left"]}) as pool:
        assert "the argument actions has 1 names, but actions of FrozenLake-v1 are Discrete(4)" in failure(pool)


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "openenv").mkdir()
    (tmp_path / "openenv" / "core.py").write_text((STAND_INS / "stand_in_openenv.py").read_text())
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "v1.py").write_text((STAND_INS / "stand_in_verifiers.py").read_text())
    (tmp_path / "textarena.py").write_text((STAND_INS / "stand_in_textarena.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("python", [None, sys.executable])
def test_a_textarena_game_depends_on_its_seed_only(python: str | None) -> None:
    with opened(
        f"{ADAPTERS}.textarena:TextArenaEnvironment", {"id": "Dice-v0", "options": {"rolls": 3}}, python=python
    ) as pool:
        replies = open_rows(pool, *"abc")
        assert [replies[row].observations for row in range(3)] == [("Guess 3 rolls.",)] * 3
        replies = [
            step_rows(pool, rows) for rows in ({0: "x", 2: "<think>y</think> x"}, {1: "x", 0: "x"}, {0: "x", 1: "x"})
        ]
        rolls = {seed: random.Random(seed) for seed in range(3)}
        said = [{row: f"x: {rolls[row].randint(1, 10**6)}" for row in sorted(turn)} for turn in replies]
        assert [{row: turn[row].observations[0] for row in sorted(turn)} for turn in replies[:2]] == said[:2]
        last = replies[2][0]
        assert (last.reward, last.done, last.metrics) == (0.25, True, {"invalid_moves": 1.0})
        assert not replies[2][1].done


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", ["Echoing", "AsyncEchoing"])
def test_an_openenv_environment_takes_actions_as_json_or_as_one_field(name: str) -> None:
    arguments = {"environment": f"openenv.core:{name}", "action": "openenv.core:Echo", "arguments": {"most": 2}}
    path = f"{ADAPTERS}.openenv:OpenEnvEnvironment"
    with opened(path, arguments) as pool:
        pool.open(0, {"prompt": [], "answer": "", "info": {"reset": {"start": "set"}}}, seed=3)
        assert pool.wait()[0].observations == ('{"heard": "set", "left": 2}',)
        said = random.Random(3)
        assert step_rows(pool, ['{"text": "a", "times": 2}'])[0].observations == (
            f'{{"heard": "aa {said.randint(0, 9)}", "left": 1}}',
        )
        for action, message in {
            "b": "The action is invalid. The action is not JSON: ",
            "[]": "The action is invalid. The action must be a JSON object.",
            '{"text": "b", "times": 4}': "The action is invalid. times: Input should be less than or equal to 3",
        }.items():
            reply = step_rows(pool, [action])[0]
            assert reply.observations[0].startswith(message)
            assert (reply.reward, reply.done, reply.metrics) == (0.0, False, {"invalid_actions": 1.0})
        reply = step_rows(pool, ['<think>{}</think>{"text": "c"}'])[0]
        assert (reply.reward, reply.done) == (1.0, True)
    with opened(path, {**arguments, "action_field": "text", "observation_field": "heard"}) as pool:
        assert open_rows(pool, "")[0].observations == ("ready",)
        assert step_rows(pool, [' {"a" '])[0].observations == (f'{{"a" {random.Random(0).randint(0, 9)}',)
    with opened(path, {**arguments, "observation_field": "seen"}) as pool:
        assert "observation_field is 'seen', but the observation has done, reward, metadata, heard, left" in failure(
            pool
        )


ODD_TASKSET = """
import verifiers.v1 as vf
from guess_taskset import GuessEnvConfig, GuessTaskset
__all__ = ["GuessTaskset", "OddEnv"]

class OddEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        if task.data.number == 1:
            raise LookupError("there is no such game")
        for _ in range(2):
            async with agents.player.interaction(task) as game:
                await game.turn()
"""
VERIFIERS = f"{ADAPTERS}.verifiers:VerifiersEnvironment"
GAME = {"env": {"taskset": {"id": "guess_taskset", "top": 9}, "player": {"max_turns": 2}}}
MORE_TIME = {"reset_timeout_seconds": 60.0, "step_timeout_seconds": 60.0}  # the library takes seconds to begin


@pytest.fixture(params=["stand-in", "stand-in elsewhere", "verifiers"])
def verifiers(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Return an interpreter that finds verifiers, or what stands in for it, and the tasksets of these tests."""
    (tmp_path / "odd_taskset.py").write_text(ODD_TASKSET)
    monkeypatch.syspath_prepend(ROOT / "examples" / "verifiers_env")
    if request.param == "verifiers":
        if not REAL_VERIFIERS.exists():
            pytest.skip("verifiers is not there: make verifiers")
        monkeypatch.syspath_prepend(tmp_path)
        return str(REAL_VERIFIERS)
    request.getfixturevalue("stand_ins")
    return None if request.param == "stand-in" else sys.executable


def open_games(pool: EnvironmentPool, *numbers: int, prompt: str = "Guess my number from 1 to 9.") -> dict[int, Reply]:
    for row, number in enumerate(numbers):
        data = {"prompt": "Guess my number from 1 to 9.", "number": number}
        task: Task = {"prompt": [{"role": "user", "content": prompt}], "answer": "", "info": {"task": data}}
        pool.open(row, task, seed=0)
    return pool.wait()


def message(reply: Reply) -> str:
    assert reply.failure is not None
    return reply.failure.message


def test_a_verifiers_episode_asks_for_turns_and_ends_with_its_rewards(verifiers: str | None) -> None:
    with opened(VERIFIERS, GAME, python=verifiers, **MORE_TIME) as pool:
        replies = open_games(pool, 5, 5, 7)
        assert [(replies[row].observations, replies[row].failure) for row in range(3)] == [((), None)] * 3
        replies = step_rows(pool, ["3", "<think>3</think> 5", "many"])
        assert [replies[row].observations for row in (0, 2)] == [("higher",), ("say a number",)]
        assert [replies[row].done for row in range(3)] == [False, True, False]
        assert (replies[1].reward, replies[1].metrics) == (1.0, {"guesses": 1.0, "reward/won": 1.0})
        replies = step_rows(pool, {0: "5", 2: "5"})
        assert [(replies[row].reward, replies[row].done) for row in (0, 2)] == [(1.0, True), (0.0, True)]
        assert [replies[row].metrics["guesses"] for row in (0, 2)] == [2.0, 2.0]


def test_a_verifiers_episode_is_in_its_state_again_when_its_process_is_lost(verifiers: str | None) -> None:
    with opened(VERIFIERS, GAME, python=verifiers, **MORE_TIME) as pool:
        open_games(pool, 5)
        step_rows(pool, ["3"])
        for slot in pool._slots:
            slot.process.kill()
        reply = step_rows(pool, ["5"])[0]
        assert (reply.reward, reply.done, reply.metrics["guesses"]) == (1.0, True, 2.0)


def test_what_a_verifiers_episode_may_not_do_costs_its_trajectory(verifiers: str | None) -> None:
    with opened(VERIFIERS, GAME, python=verifiers, **MORE_TIME) as pool:
        said = message(open_games(pool, 5, prompt="Guess!")[0])
        assert "the environment doesn't extend the chat: message 0 of its request is Message(role='user'" in said
        pool.end(0)
        pool.open(0, {"prompt": [], "answer": "", "info": {}}, seed=0)
        assert "the data row has no extra_info.task" in message(pool.wait()[0])
    with opened(VERIFIERS, {"env": {"taskset": {"id": "odd_taskset"}}}, python=verifiers, **MORE_TIME) as pool:
        replies = open_games(pool, 1, 2)
        assert "there is no such game" in message(replies[0])
        pool.end(0)
        assert "a second agent, or a second attempt of the first one, asks" in message(step_rows(pool, {1: "3"})[1])


@pytest.mark.parametrize(
    ("player", "error"),
    [
        ({"sampling": {"temperature": 0.5}}, "the environment asks its model with temperature"),
        ({"max_total_tokens": 9}, "env.player.max_total_tokens has no effect here"),
    ],
)
def test_how_turns_are_sampled_is_up_to_the_run(verifiers: str | None, player: dict[str, object], error: str) -> None:
    arguments = {"env": {**GAME["env"], "player": player}}
    with opened(VERIFIERS, arguments, python=verifiers, **MORE_TIME) as pool:
        assert error in message(open_games(pool, 5)[0])


def test_tasks_of_verifiers_are_written_as_rows(verifiers: str | None, tmp_path: Path) -> None:
    config, out = ROOT / "examples" / "verifiers_env" / "config.toml", tmp_path / "rows" / "tasks.jsonl"
    program = ROOT / "infra" / "integrations" / "verifiers_rows.py"
    done = subprocess.run(
        [verifiers or sys.executable, program, config, out, "--skip", "1", "--take", "2"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:2])},
        capture_output=True,
        text=True,
        cwd=config.parent,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    prompt = "Guess my number from 1 to 7."
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": prompt}]] * 2
    assert [row["data_source"] for row in rows] == ["guess_taskset"] * 2
    tasks = [row["extra_info"]["task"] for row in rows]
    assert [(task["prompt"], task["number"]) for task in tasks] == [(prompt, 2), (prompt, 3)]
