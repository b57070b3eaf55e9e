"""What TextArena 0.7 offers to who plays its games, and one game; the library itself installs 30 packages.

It needs the standard library only.
"""

import random
from enum import Enum, auto


class ObservationType(Enum):
    PROMPT = auto()
    PLAYER_ACTION = auto()
    GAME_MESSAGE = auto()


class Dice:
    def __init__(self, rolls):
        self._rolls = rolls

    def reset(self, num_players, seed=None):
        assert num_players == 1
        random.seed(seed)
        self._said = [(-1, f"Guess {self._rolls} rolls.", ObservationType.PROMPT)]

    def step(self, action):
        roll = random.randint(1, 10**6)
        self._rolls -= 1
        self._said = [
            (0, action, ObservationType.PLAYER_ACTION),
            (-1, f"{action}: {roll}", ObservationType.GAME_MESSAGE),
        ]
        return self._rolls == 0, {}

    def get_observation(self):
        return 0, self._said

    def close(self):
        return {0: 0.25}, {0: {"invalid_move": True}}


def make(env_id, **options):
    assert env_id == "Dice-v0-raw"
    return Dice(**options)
