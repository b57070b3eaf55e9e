"""When rows sample on after their environments have answered.

If rows join at decoding steps that follow from what others have sampled, and not from the time, the same batch gives
the same trajectories, bit for bit, however long the environments take.
"""

from infra.environments.answers import Answers
from infra.environments.reply import Reply
from schemas.config.environment import TurnLimits


class Admission:
    """The rows of one batch that wait for their environments.

    Args:
        config: `admission` and `admission_steps`.
        answers: Answers them.
    """

    def __init__(self, config: TurnLimits, answers: Answers) -> None:
        self._kind, self._num_steps, self._answers = config.admission, config.admission_steps, answers
        self._due: dict[int, int] = {}  # the step at which each waiting row is admitted at the latest
        self._step = 0

    @property
    def num_waiting(self) -> int:
        """The number of rows that wait for their environments."""
        return len(self._due)

    def await_answer(self, row: int, action: str) -> None:
        """Have a row's environment answer an action."""
        self._answers.step(row, action)
        self._due[row] = self._step + self._num_steps

    def admitted(self, num_running: int) -> list[tuple[int, Reply]]:
        """Return the rows that sample on now with their environments' replies, after a decoding step.

        Args:
            num_running: The rows that sample meanwhile.
        """
        self._step += 1
        if not self._due:
            return []
        if self._kind == "arrival":
            return self._taken(self._answers.poll(waits=num_running == 0))
        self._answers.receive()
        if self._kind == "wave":
            return self._taken(self._answers.wait()) if num_running == 0 else []
        if num_running == 0:  # nothing is lost by going on to the step at which the next one is due
            self._step = max(self._step, min(self._due.values()))
        due = [row for row, step in self._due.items() if step <= self._step]
        return self._taken(self._answers.wait(due)) if due else []

    def _taken(self, replies: dict[int, Reply]) -> list[tuple[int, Reply]]:
        for row in replies:
            del self._due[row]
        return sorted(replies.items())
