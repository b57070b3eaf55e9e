"""Games of TextArena for one player: `infra.integrations.textarena:TextArenaEnvironment`."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import textarena

from rl_core.environments.base import Step, Task
from rl_core.environments.calls import without_reasoning

try:
    from numpy import random as numpy_random
except ImportError:  # most games don't need it
    numpy_random = None  # type: ignore[assignment]


class TextArenaEnvironment:
    """A game that `textarena.make` makes, played to its end: its reward comes with the last turn.

    Each turn shows what the game has said since the one before; how the game would repeat the whole history is left
    out, by its variant `-raw`. The game gets the turn without its reasoning. It decides itself what an invalid move
    costs; the metric `invalid_moves` counts those that ended a game.

    The games draw from Python's random numbers, and a few from NumPy's, which are one stream per process: each
    environment has its own state of them, so that it depends on its seed only.

    Args:
        task: The data row.
        seed: The seed of the game.
        id: The game's id, such as `GuessTheNumber-v0`.
        options: Further keyword arguments of `textarena.make`.
    """

    def __init__(self, task: Task, seed: int, *, id: str, options: Mapping[str, Any] | None = None) -> None:
        self._seed, self._states = seed, _seeded(seed)
        with self._own_random_numbers():
            self._game = textarena.make(id if id.endswith("-raw") else f"{id}-raw", **options or {})

    def reset(self) -> str:
        with self._own_random_numbers():
            self._game.reset(num_players=1, seed=self._seed)
            return self._read()

    def step(self, action: str) -> Step:
        with self._own_random_numbers():
            done, _ = self._game.step(action=without_reasoning(action).strip())
            if not done:
                return Step(self._read())
            rewards, info = self._game.close()
        return Step("", float(rewards[0]), True, {"invalid_moves": float(info[0]["invalid_move"])})

    def _read(self) -> str:
        """Return what the game has said, without the player's own words."""
        _, messages = self._game.get_observation()
        said = (text for _, text, kind in messages if kind is not textarena.ObservationType.PLAYER_ACTION)
        return "\n".join(said)

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        before = _states()
        _set_states(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _set_states(before)


def _states() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's random numbers."""
    return random.getstate(), numpy_random and numpy_random.get_state()


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if numpy_random:
        numpy_random.set_state(states[1])


def _seeded(seed: int) -> tuple[Any, Any]:
    """Return the states that a seed begins with."""
    return random.Random(seed).getstate(), numpy_random and numpy_random.RandomState(seed % 2**32).get_state()
