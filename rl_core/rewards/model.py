"""The scores of a reward model: a sequence-classification model with one label."""

import math
from collections.abc import Iterator, Sequence

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rl_core.rewards.base import Score
from rl_core.rewards.hosted import (
    GroupReward,
    build_on_meta,
    check_positions,
    describe_model,
    first_line,
    load_hosted_tokenizer,
    model_error,
    open_chat,
)
from rl_core.scoring import use_packed_attention
from rl_core.scoring.pooled import pack_whole, packed_pooled_scores, prepare_pooled, score_head
from schemas.config.reward import ModelReward
from schemas.errors import ScoringError


class RewardModel(GroupReward):
    """Scores all responses to a prompt in packed rows of theirs only.

    Args:
        config: The model, its compute dtype and the longest text.

    Raises:
        ModelError: The folder has no decoder-only model with one label, or no tokenizer of it with a chat template
            that writes prompt and response.
    """

    model: PreTrainedModel

    def __init__(self, config: ModelReward) -> None:
        self._config = config
        tokenizer = load_hosted_tokenizer(config, build_meta_reward_model(config))
        self._chat = open_chat(config, tokenizer, ("user", "assistant"), with_prompt=False)

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
            raise model_error(self._config, first_line(error)) from error
        if missing := sorted(found["missing_keys"]):
            raise model_error(
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
            raise model_error(self._config, str(error)) from error

    def score(self, prompt: str, completions: Sequence[str], answer: str) -> list[Score | Exception]:
        """Return the model's score of each response; it sees no answer. See `GroupReward.score`."""
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
        """Return the token ids of which the last one has the score.

        Raises:
            ValueError: There are more than `max_tokens`, or the chat template rejects the texts.
        """
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
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
    """Build the model on the meta device: its parameters have shapes but no memory. It uses packed attention.

    Raises:
        ModelError: The folder has none with one label that is decoder-only, it has too few positions, or can't be
            packed.
    """
    described = describe_model(config, "ForSequenceClassification", "a reward model")
    if described.num_labels != 1:
        raise model_error(
            config,
            f"the model has {described.num_labels} labels, expected 1, the score; use a model that was trained with "
            "num_labels=1",
        )
    check_positions(config, described, config.max_tokens, "reward.max_tokens")
    model = build_on_meta(config, described, AutoModelForSequenceClassification)
    try:
        score_head(model)
        use_packed_attention(model)
    except ScoringError as error:
        raise model_error(config, str(error)) from error
    return model


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
