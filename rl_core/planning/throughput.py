"""The work of a step's phases in operations.

An operation is a multiplication or an addition. A token costs two per weight of the decoder's matrices, a scored token
two per weight of the LM head, and a sequence of n tokens 2 * n^2 per layer and unit of attention width. A backward
costs twice its forward; gradient checkpointing adds the decoder's forward once more.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedModel

from rl_core.training.sharding import layer_modules


@dataclass(frozen=True)
class ModelWork:
    """What a token costs."""

    decoder_weights: int  # weights of the decoder's matrices that a token passes
    head_weights: int  # weights of the LM head
    attention_width: int  # width of the queries, summed over the layers; every layer counts as full causal attention

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelWork":
        """Return a model's work; of experts, a token passes those that it is routed to."""
        config = model.config.get_text_config()
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
        active = getattr(config, "num_experts_per_tok", None) or 1
        weights = 0.0
        for layer in layer_modules(model):
            for name, part in layer.named_parameters():
                if part.ndim > 1:
                    weights += part.numel() * (active / experts if ".experts." in name else 1)
        return cls(
            decoder_weights=round(weights),
            head_weights=config.vocab_size * config.hidden_size,
            attention_width=round(sum(map(_attention_width, config.per_layer_config))),
        )

    def forward(
        self,
        prompts: NDArray[np.int64],
        responses: NDArray[np.int64],
        *,
        num_shared: int = 0,
        num_scored: int | None = None,
    ) -> float:
        """Return the operations of scoring sequences.

        Args:
            prompts: [N] tokens.
            responses: [N] tokens.
            num_shared: Of the prompts' tokens, those that are not computed, as another sequence shares them.
            num_scored: Of the responses' tokens, those that pass through the LM head; None: all.
        """
        scored = int(responses.sum()) if num_scored is None else num_scored
        every = self._linear(prompts + responses, scored) + self._attention(prompts + responses)
        return every - self._shared(prompts, num_shared)

    def update(
        self,
        prompts: NDArray[np.int64],
        responses: NDArray[np.int64],
        *,
        checkpointing: bool,
        is_frozen: bool = False,
        num_shared: int = 0,
        num_scored: int | None = None,
    ) -> float:
        """Return the operations of forward and backward over sequences; see `forward`.

        Args:
            prompts: [N] tokens.
            responses: [N] tokens.
            checkpointing: Whether the backward computes the decoder's forward again.
            is_frozen: Whether only adapters are trained: the weights then get no gradient, which is half of a backward.
            num_shared: See `forward`.
            num_scored: See `forward`.
        """
        scored = int(responses.sum()) if num_scored is None else num_scored
        again = self._decoder(prompts + responses) - self._shared(prompts, num_shared) if checkpointing else 0.0
        all_trained = 3 * self.forward(prompts, responses, num_shared=num_shared, num_scored=scored) + again
        if not is_frozen:
            return all_trained
        return all_trained - self._linear(prompts + responses, scored) + 2.0 * self.decoder_weights * num_shared

    def generate(self, prompts: NDArray[np.int64], responses: NDArray[np.int64], samples: int) -> float:
        """Return the operations of generating responses with a KV cache: a prompt is computed once for all its samples.

        Args:
            prompts: [N] tokens.
            responses: [N] tokens, `samples` consecutive rows of each prompt.
            samples: Responses per prompt.
        """
        return self.forward(prompts, responses) - self._decoder(prompts) * (1 - 1 / samples)

    def _shared(self, prompts: NDArray[np.int64], num_shared: int) -> float:
        """Return the decoder's operations of so many of the prompts' tokens, each prompt's alike."""
        return self._decoder(prompts) * num_shared / int(prompts.sum()) if num_shared else 0.0

    def _decoder(self, lengths: NDArray[np.int64]) -> float:
        return 2.0 * self.decoder_weights * int(lengths.sum()) + self._attention(lengths)

    def _linear(self, lengths: NDArray[np.int64], num_scored: int) -> float:
        return 2.0 * self.decoder_weights * int(lengths.sum()) + 2.0 * self.head_weights * num_scored

    def _attention(self, lengths: NDArray[np.int64]) -> float:
        return 2.0 * self.attention_width * float((lengths.astype(np.float64) ** 2).sum())


def _attention_width(layer: PretrainedConfig) -> float:
    """Return the width of a layer's queries: of queries and values the mean (multi-head latent attention)."""
    heads: int = getattr(layer, "num_attention_heads", None) or 0
    if heads == 0:
        return 0.0
    query, value = getattr(layer, "qk_head_dim", None), getattr(layer, "v_head_dim", None)
    if query and value:
        return heads * float(query + value) / 2
    return heads * float(getattr(layer, "head_dim", None) or layer.hidden_size // heads)
