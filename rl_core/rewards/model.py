"""The scores of a reward model: a sequence-classification model with one label."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rl_core.model_folder import TOKENIZER_FILES, check_model_folder, load_config
from rl_core.rewards.base import Score
from rl_core.rollout.chat import ChatTemplate
from rl_core.scoring import use_packed_attention
from rl_core.scoring.pooled import pack_whole, packed_pooled_scores, prepare_pooled, score_head
from schemas.config.kinds import CLOCK, Variable
from schemas.config.reward import ModelReward
from schemas.errors import ChatTemplateError, DataError, ModelError, ScoringError, first_line

ROLES = ("user", "assistant")


class RewardModel:
    """A group function: scores all responses to a prompt together, in packed rows of theirs only.

    So a step that is repeated has the same rewards, whichever worker scores a prompt, and when.

    Args:
        config: The model, its compute dtype and the longest text.
        date: The day that its chat template takes for today; None: today.

    Raises:
        ModelError: The folder has no decoder-only model with one label, or no tokenizer of it with a chat template
            that writes prompt and response.
    """

    model: PreTrainedModel

    def __init__(self, config: ModelReward, date: Variable | None = None) -> None:
        self._config = config
        try:
            self._chat = ChatTemplate(load_reward_tokenizer(config), {} if date is None else {CLOCK: date})
            left_out = self._chat.find_left_out([(role, True, 0, ()) for role in ROLES], with_prompt=False)
        except (ChatTemplateError, DataError) as error:
            raise _model_error(config, str(error)) from error
        if left_out is not None:
            raise _model_error(
                config,
                f"its chat template leaves out the text of the {ROLES[left_out.message]}'s message, so that the model "
                "would not read it; use a model whose chat_template.jinja writes it, or correct that file",
            )

    def load(self, device: torch.device) -> None:
        """Load the weights, from safetensors only, and check that packed scores are the model's own.

        Raises:
            ModelError: The weights can't be loaded, or the model can't be packed.
        """
        dtype = getattr(torch, self._config.dtype_on(device.type))
        try:
            model, found = AutoModelForSequenceClassification.from_pretrained(
                self._config.path, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise _model_error(self._config, first_line(error)) from error
        if missing := sorted(found["missing_keys"]):
            raise _model_error(
                self._config,
                f"the weights {', '.join(missing)} are missing, and would be random; save the whole model there with "
                "`model.save_pretrained(folder)`",
            )
        self.model = model.eval().requires_grad_(False).to(device)
        if device.type == "cpu":  # else they are the mapped file, whose memory can't be given up
            for weight in self.model.parameters():
                weight.data = weight.data.clone()
        try:
            prepare_pooled(self.model)
        except ScoringError as error:
            raise _model_error(self._config, str(error)) from error

    def __call__(
        self, prompt: str, completions: Sequence[str], answer: str, info: dict[str, Any]
    ) -> list[Score | Exception]:
        """Return the model's score of each response to a prompt; for one without a score, the error."""
        scores: dict[int, Score | Exception] = {}
        sequences: dict[int, list[int]] = {}
        for index, completion in enumerate(completions):
            try:
                sequences[index] = self._encode(prompt, completion)
            except ValueError as error:
                scores[index] = error
        for indices in _rows([len(sequence) for sequence in sequences.values()], self._config.token_budget):
            numbers = [list(sequences)[index] for index in indices]
            row = pack_whole([sequences[number] for number in numbers], self.model.device)
            scores.update(zip(numbers, map(_finite, packed_pooled_scores(self.model, row).tolist()), strict=True))
        return [scores[index] for index in range(len(completions))]

    def _encode(self, prompt: str, completion: str) -> list[int]:
        """Return the token ids of which the last one has the score."""
        messages = [{"role": role, "content": text} for role, text in zip(ROLES, (prompt, completion), strict=True)]
        token_ids = self._chat.encode(messages, with_prompt=False)
        padding = self.model.config.get_text_config().pad_token_id
        while len(token_ids) > 1 and token_ids[-1] == padding:  # the model's own forward ignores it there
            token_ids.pop()
        if len(token_ids) > self._config.max_tokens:
            raise ValueError(
                f"prompt and response have {len(token_ids)} tokens, more than reward.max_tokens = "
                f"{self._config.max_tokens}"
            )
        return token_ids


def build_meta_reward_model(config: ModelReward) -> PreTrainedModel:
    """Build the model in float32 on the meta device, without memory for its parameters; it uses packed attention.

    Raises:
        ModelError: The folder has none with one label that is decoder-only, it has too few positions, or can't be
            packed.
    """
    check_model_folder("reward.path", config.path)
    described = load_config(config.path, "reward.path")
    names = ", ".join(described.architectures or ["none"])
    if not names.endswith("ForSequenceClassification"):
        raise _model_error(
            config,
            f"its architecture is {names}, expected one that ends with ForSequenceClassification; use a reward model's "
            "folder",
        )
    if described.num_labels != 1:
        raise _model_error(
            config,
            f"the model has {described.num_labels} labels, expected 1, the score; use a model that was trained with "
            "num_labels=1",
        )
    positions = getattr(described.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < config.max_tokens:
        raise _model_error(
            config, f"the model has {positions} positions, fewer than reward.max_tokens = {config.max_tokens}; lower it"
        )
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
                described, dtype=torch.float32
            )
    except Exception as error:  # transformers and torch raise unrelated types for bad configs
        raise _model_error(config, first_line(error)) from error
    try:
        score_head(model)
        use_packed_attention(model)
    except ScoringError as error:
        raise _model_error(config, str(error)) from error
    return model


def load_reward_tokenizer(config: ModelReward) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a reward model.

    Raises:
        ModelError: It can't be loaded, has no chat template, or is not the model's; or see `build_meta_reward_model`.
    """
    model = build_meta_reward_model(config)
    check_model_folder("reward.path", config.path, TOKENIZER_FILES)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(config.path)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise _model_error(config, f"the tokenizer can't be loaded: {first_line(error)}") from error
    if tokenizer.chat_template is None:
        raise _model_error(
            config,
            "the tokenizer has no chat template, by which the texts are written; write one to "
            "chat_template.jinja in that folder",
        )
    largest, num_tokens = max(tokenizer.get_vocab().values()), len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    if largest >= num_tokens:
        raise _model_error(
            config,
            f"the tokenizer's largest token id is {largest}, but the model has embeddings for {num_tokens} tokens (0 "
            f"to {num_tokens - 1}); use the tokenizer of this model",
        )
    return tokenizer


def _rows(lengths: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Yield the indices of each packed row: sequences in their order, as many as the budget holds."""
    row: list[int] = []
    for index, length in enumerate(lengths):
        if row and sum(lengths[each] for each in row) + length > token_budget:
            yield row
            row = []
        row.append(index)
    if row:
        yield row


def _finite(score: float) -> float | ValueError:
    return score if math.isfinite(score) else ValueError(f"the reward model's score is {score}")


def _model_error(config: ModelReward, text: str) -> ModelError:
    return ModelError(f"reward.path {config.path}: {text}")
