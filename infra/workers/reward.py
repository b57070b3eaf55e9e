"""The reward worker: a reward model that scores all responses to a prompt at a time."""

from collections.abc import Collection

import torch

from infra.ray.device import choose_device, set_threads
from infra.rewards.base import RewardScorer
from infra.rewards.local import LocalRewardScorer
from infra.storage.runs import RunDirectory
from infra.workers.inputs import check_models
from infra.workers.layout import reward_model_of
from rl_core.rewards import RewardItem, RewardOutcome, group_outcome
from rl_core.rewards.model import RewardModel
from rl_core.storages import Offload
from schemas.config.kinds import Variable
from schemas.config.reward import ModelReward
from schemas.placement import MemoryChange, Part
from schemas.step import RunHandle


def open_model_here(config: ModelReward, date: Variable | None = None) -> RewardScorer:
    """Return a scorer of whole groups that holds its model in this process, on the GPU that it sees, if any.

    Args:
        config: The reward model.
        date: The day that its chat template takes for today; None: today.

    Raises:
        ModelError: The model can't be used.
    """
    model = RewardModel(config, date)
    model.load(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return LocalRewardScorer(model)


class RewardWorker:
    """One of the run's reward workers. Any call can be repeated: what it returns depends on its arguments alone.

    Args:
        run: The run it belongs to.
        number: Its number, which decides its model.
    """

    def __init__(self, run: RunHandle, number: int = 0) -> None:
        self._run, self._config, self._number = run, run.config, number
        self._model: RewardModel | None = None
        self._offload = Offload({})

    def start(self) -> None:
        """Load the model, once.

        Raises:
            ModelError: It can't be used.
            RunError: It is not the one that the run was given.
        """
        if self._model is not None:
            return
        set_threads(self._config.runtime.num_threads)
        config = reward_model_of(self._config, self._number)
        check_models(RunDirectory.of(self._run), [config.path])
        model = RewardModel(config, self._config.data.date)
        model.load(choose_device())
        self._model, self._offload = model, Offload({"weights": model.model.parameters})

    def score(self, item: RewardItem) -> RewardOutcome:
        """Return the outcomes of all responses to a prompt, as `group`; weights that were moved out are moved in.

        Raises:
            torch.OutOfMemoryError: The device has too little memory; that is no failure of the responses.
        """
        assert self._model is not None, "the worker has not started"
        assert isinstance(item.completion, list), "a reward worker scores whole groups"
        self._offload.move_in(["weights"])
        scores = self._model(item.prompt, item.completion, item.answer, item.info)
        return group_outcome(scores, len(item.completion))

    def sleep(self, parts: Collection[Part]) -> MemoryChange:
        """Move the weights out of the device's memory, for as long as others need it."""
        return self._offload.move_out(parts)

    def wake(self, parts: Collection[Part]) -> MemoryChange:
        """Move the weights into the device's memory again.

        Raises:
            torch.OutOfMemoryError: It has too little.
        """
        return self._offload.move_in(parts)
