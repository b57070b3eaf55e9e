"""The score of a reward model: a sequence-classification model with one label."""

import json
from typing import Any

from rl_core.rewards.base import ManagedReward
from rl_core.rollout.chat import ChatTemplate
from schemas.config.reward import ModelReward
from schemas.errors import ConfigError, ModelError


class RewardModel(ManagedReward):
    """Scores each response on its own, so that a score depends on no other response; float32.

    Args:
        config: The model, its device and the longest text.

    Raises:
        ModelError: The folder has no model with one label, or no tokenizer with a chat template.
    """

    is_concurrent, max_calls = False, None

    def __init__(self, config: ModelReward) -> None:
        from transformers import AutoConfig, AutoTokenizer  # takes seconds, and other rewards don't need it

        self._config = config
        try:
            model, tokenizer = AutoConfig.from_pretrained(config.path), AutoTokenizer.from_pretrained(config.path)
        except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
            raise ModelError(f"reward.path {config.path}: the model can't be loaded: {_first_line(error)}") from error
        names = ", ".join(model.architectures or ["none"])
        if not names.endswith("ForSequenceClassification"):
            raise ModelError(
                f"reward.path {config.path}: its architecture is {names}, expected one that ends with "
                "ForSequenceClassification; use a reward model's folder"
            )
        if model.num_labels != 1:
            raise ModelError(
                f"reward.path {config.path}: the model has {model.num_labels} labels, expected 1, the score; use a "
                "model that was trained with num_labels=1"
            )
        if tokenizer.chat_template is None:
            raise ModelError(
                f"reward.path {config.path}: the tokenizer has no chat template, by which prompt and response are "
                "written; write one to chat_template.jinja in that folder"
            )
        self._chat = ChatTemplate(tokenizer)

    async def prepare(self) -> None:
        """Load the weights, from safetensors only.

        Raises:
            ConfigError: There is no such device.
            ModelError: The weights can't be loaded.
        """
        import torch
        from transformers import AutoModelForSequenceClassification

        if self._config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError('reward.device = "cuda", but this process sees no GPU; set reward.device = "cpu"')
        try:
            model, found = AutoModelForSequenceClassification.from_pretrained(
                self._config.path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"reward.path {self._config.path}: {_first_line(error)}") from error
        if missing := sorted(found["missing_keys"]):
            raise ModelError(
                f"reward.path {self._config.path}: the weights {', '.join(missing)} are missing, and would be random; "
                "save the whole model there with `model.save_pretrained(folder)`"
            )
        self._model = model.eval().to(self._config.device)

    async def __call__(self, prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
        """Return the model's score of the response as the answer to the prompt.

        Raises:
            ValueError: Both together are longer than `max_tokens`.
        """
        import torch

        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        token_ids = self._chat.encode(messages, with_prompt=False)
        if len(token_ids) > self._config.max_tokens:
            raise ValueError(
                f"prompt and response have {len(token_ids)} tokens, more than reward.max_tokens = "
                f"{self._config.max_tokens}"
            )
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([token_ids], device=self._model.device))
        return float(output.logits[0, 0])


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
