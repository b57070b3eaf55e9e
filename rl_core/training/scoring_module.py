"""Scoring as a module, so that wrappers of modules (FSDP) see every use of the model's parameters."""

from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from rl_core.scoring import (
    PackedRow,
    TokenScores,
    leak_probe,
    packed_scores,
    padded_scores,
    use_packed_attention,
    use_padded_attention,
)
from schemas.config.model import ModelConfig
from schemas.config.packing import PackingConfig


class ScoringModule(nn.Module):
    """Log-probs and entropies of a row's responses under a model.

    Args:
        model: A causal language model; its attention is switched to the one that `packing` needs.
        compute: Sets the compute dtype.
        packing: Packed or padded, and the number of tokens whose logits exist at once.
        temperature: The sampler's temperature.
    """

    def __init__(
        self, model: PreTrainedModel, compute: ModelConfig, packing: PackingConfig, temperature: float
    ) -> None:
        super().__init__()
        self.model = model
        self._autocast = compute.compute_dtype == "bfloat16"
        self._chunk_tokens, self._temperature = packing.logits_chunk_tokens, temperature
        if packing.kind == "packed":
            use_packed_attention(model)
            self._scores = packed_scores
        else:
            use_padded_attention(model)
            self._scores = padded_scores

    def forward(self, row: PackedRow, entropy: Literal[False, "no_grad", "grad"] = False) -> TokenScores:
        """Score one packed row.

        Args:
            row: On the model's device; R response tokens.
            entropy: Whether to compute entropies, and whether they have a gradient.

        Returns:
            [R] float32 log-probs, and entropies if requested, in nats.
        """
        with self._compute():
            return self._scores(
                self.model, row, temperature=self._temperature, chunk_tokens=self._chunk_tokens, entropy=entropy
            )

    def probe(self) -> None:
        """Check, in the compute dtype of the run, that packed sequences don't leak into each other.

        Raises:
            ScoringError: They do, or packed log-probs differ from those of the model's own forward.
        """
        if self._scores is packed_scores:
            with self._compute():
                leak_probe(self.model)

    def _compute(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self._autocast)
