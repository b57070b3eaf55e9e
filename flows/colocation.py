"""The turns of a step's workers on GPUs that they share."""

from flows.phases import PhaseTimer
from schemas.placement import PhaseMemory, TurnPhase
from schemas.step import PolicyHandle, RunHandle
from schemas.weights import WeightsTransfer
from tasks.operations import enter_scoring, enter_update, publish_weights
from tasks.stage import is_committed


class Turns:
    """Gives the memory of shared GPUs to the next phase of a step; does nothing if workers don't take turns.

    Attributes:
        memory: What moved, by the phase that was entered.
        published: The transfer of the policy's weights to the engines, before the rollout; None if there was none.
    """

    def __init__(self, run: RunHandle, policy: PolicyHandle, phase: PhaseTimer) -> None:
        self._run, self._policy, self._phase = run, policy, phase
        self.memory: dict[TurnPhase, PhaseMemory] = {}
        self.published: WeightsTransfer | None = None

    async def rollout(self) -> None:
        """Wake the engines with the policy's weights, unless the step's rows are stored already."""
        if not self._run.config.takes_turns or is_committed(self._run, self._policy, "put"):
            return
        with self._phase("publish"):
            self.published, memory = await publish_weights(self._run, self._policy)
        if memory is not None:
            self.memory["rollout"] = memory

    async def scoring(self) -> None:
        """Have the engines sleep, and bring in what scores."""
        if self._run.config.takes_turns:
            with self._phase("enter-scoring"):
                self.memory["scoring"] = await enter_scoring(self._run)

    async def update(self) -> None:
        """Bring in what the update needs."""
        if self._run.config.takes_turns:
            with self._phase("enter-update"):
                self.memory["update"] = await enter_update(self._run)
