"""A game as an environment of verifiers: guess a number, and be told whether it is higher or lower."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    """One game."""

    number: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    """A game, and what is counted in it."""

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        """Return how often the model has guessed."""
        return float(trace.num_turns)


class GuessConfig(vf.TasksetConfig):
    """What can be set of the games, in `env.taskset`."""

    top: int = 7


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    """Games without end, each of the numbers in turn."""

    INFINITE = True

    def load(self) -> Iterator[GuessTask]:
        """Yield one game after another."""
        top = self.config.top
        while True:
            for number in range(1, top + 1):
                data = GuessData(prompt=f"Guess my number from 1 to {top}.", number=number)
                yield GuessTask(data, self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    """Who plays: `env.player` has the limits of the model."""

    player: vf.AgentConfig = vf.AgentConfig(max_turns=3)


class GuessEnv(vf.Env[GuessEnvConfig]):
    """Plays a game with the model."""

    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        """Answer guesses until the number is found, or the model has no more turns."""
        number, won = task.data.number, False
        async with agents.player.interaction(task) as game:
            segment = await game.turn()
            while not segment.terminated:
                guess = segment.last_reply
                won = guess == str(number)
                if won:
                    break
                hint = "higher" if guess.isdecimal() and int(guess) < number else "lower"
                segment = await game.turn(hint if guess.isdecimal() else "say a number")
        game.trace.record_reward("won", float(won))
