"""Environments of other libraries, in real environment processes."""

import random
import sys
from pathlib import Path

import pytest

from infra.environments.pool import EnvironmentPool
from tests.infra.environment_pools import open_rows, opened, step_rows

ADAPTERS = "rl_core.environments.adapters"
HERE = Path(__file__).parent
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
    (tmp_path / "openenv" / "core.py").write_text((HERE / "stand_in_openenv.py").read_text())
    (tmp_path / "textarena.py").write_text((HERE / "stand_in_textarena.py").read_text())
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
            "b": "The action is invalid. The action is no JSON: ",
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
