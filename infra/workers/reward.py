"""The reward worker: a reward model or a judge that scores all responses to a prompt at a time."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from infra.engines.base import GenerationRequest, RolloutEngine, Sampling, generate_all
from infra.engines.embedded.engine import TransformersEngine
from infra.engines.open import OPENERS, EngineModel
from infra.models.load import stop_token_ids
from infra.ray.device import choose_device, set_threads
from infra.rewards.base import RewardScorer
from infra.rewards.local import LocalRewardScorer
from infra.workers.layout import reward_model_of
from infra.workers.residency import Residency, Tensors
from rl_core.rewards import RewardItem, RewardOutcome, group_outcome
from rl_core.rewards.hosted import GroupReward, model_error
from rl_core.rewards.judge_model import Answer, JudgeModel, Question
from rl_core.rewards.model import RewardModel
from schemas.config.judge import JudgeModelReward
from schemas.config.model import ModelConfig
from schemas.config.reward import ModelReward
from schemas.config.reward_base import HostedReward
from schemas.errors import UserError
from schemas.placement import MemoryChange, Part
from schemas.step import RunHandle

_WEIGHTS: tuple[Part, ...] = ("weights",)


def load_hosted(config: HostedReward, device: torch.device) -> tuple[GroupReward, Mapping[Part, Tensors]]:
    """Return a reward that holds its model in this process, and the tensors that can move out of the device's memory.

    Raises:
        ModelError: The model can't be used.
        ConfigError: The judge's engine can't run here.
    """
    if isinstance(config, JudgeModelReward):
        judge = JudgeModel(config)
        engine = _open_engine(config, judge.tokenizer)
        judge.load(_generator(config, engine, judge.tokenizer))
        # vLLM keeps its memory, which no other worker shares.
        return judge, {"weights": engine.model.parameters} if isinstance(engine, TransformersEngine) else {}
    assert isinstance(config, ModelReward), f"{type(config).__name__} has no model"
    model = RewardModel(config)
    model.load(device)
    return model, {"weights": model.model.parameters}


def open_model_here(config: HostedReward) -> RewardScorer:
    """Return a scorer of whole groups that holds its model in this process, on the GPU that it sees, if any.

    Raises:
        ModelError: The model can't be used.
        ConfigError: The judge's engine can't run here.
    """
    reward, _ = load_hosted(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return LocalRewardScorer(reward)


def _open_engine(config: JudgeModelReward, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """Start the judge's engine.

    Raises:
        ModelError: The model is not usable, or the engine can't run it here.
    """
    longest = config.max_question_tokens + config.max_tokens
    model = EngineModel(ModelConfig(path=config.path), tokenizer, longest)
    try:
        return OPENERS(config.engine_config, model)
    except UserError as error:
        raise model_error(config, f"the judge's engine, {config.engine}, can't start: {error}") from error


def _generator(
    config: JudgeModelReward, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase
) -> Callable[[Sequence[Question]], list[Answer]]:
    sampling = Sampling(
        max_response_tokens=config.max_tokens,
        temperature=config.temperature,
        stop_token_ids=stop_token_ids(ModelConfig(path=config.path), tokenizer),
    )
    return partial(_answer, engine, sampling)


def _answer(engine: RolloutEngine, sampling: Sampling, questions: Sequence[Question]) -> list[Answer]:
    """Return the answers to questions that are asked together."""
    requests = [GenerationRequest(np.array(question.token_ids), (question.seed,)) for question in questions]
    found = generate_all(engine, requests, sampling)
    return [Answer(each.token_ids.tolist(), is_cut=each.finish_reason == "length") for each in found]


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
