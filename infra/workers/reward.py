"""The reward worker: a reward model or a judge that scores all responses to a prompt at a time."""

from collections.abc import Collection

from infra.ray.device import choose_device, set_threads
from infra.workers.hosted import load_hosted
from infra.workers.residency import Residency
from infra.workers.roles import reward_model_of
from rl_core.rewards import RewardItem, RewardOutcome, group_outcome
from rl_core.rewards.hosted import GroupReward
from schemas.placement import MemoryChange, Part
from schemas.step import RunHandle

_WEIGHTS: tuple[Part, ...] = ("weights",)


class RewardWorker:
    """One of the run's reward workers. Any call can be repeated: what it returns depends on its arguments alone.

    Args:
        run: The run it belongs to.
        number: Its number, which decides its model.
    """

    def __init__(self, run: RunHandle, number: int = 0) -> None:
        self._run, self._model_config = run, reward_model_of(run.config, number)
        self._reward: GroupReward | None = None
        self._residency = Residency({})

    def start(self) -> None:
        """Load the model, once.

        Raises:
            UserError: It can't be used.
        """
        if self._reward is not None:
            return
        set_threads(self._run.config.runtime.num_threads)
        self._reward, parts = load_hosted(self._model_config, choose_device())
        self._residency = Residency(parts)

    def score(self, item: RewardItem) -> RewardOutcome:
        """Return the outcomes of all responses to a prompt, as `group`; weights that were moved out are moved in.

        Raises:
            torch.OutOfMemoryError: The device has too little memory; that is no failure of the responses.
        """
        assert self._reward is not None, "the worker has not started"
        assert isinstance(item.completion, list), "a reward worker scores whole groups"
        self._residency.move_in(_WEIGHTS)
        return group_outcome(self._reward.score(item.prompt, item.completion, item.answer), len(item.completion))

    def sleep(self, parts: Collection[Part]) -> MemoryChange:
        """Move the weights out of the device's memory, for as long as others need it."""
        return self._residency.move_out(parts)

    def wake(self, parts: Collection[Part]) -> MemoryChange:
        """Move the weights into the device's memory again.

        Raises:
            torch.OutOfMemoryError: It has too little.
        """
        return self._residency.move_in(parts)
