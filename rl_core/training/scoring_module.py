"""Scoring as a module, so that wrappers of modules (FSDP) see every use of the model's parameters."""

from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_core.scoring import (
    PackedRow,
    RouterReplay,
    TokenScores,
    leak_probe,
    pack_row,
    packed_scores,
    padded_probe,
    padded_scores,
    use_packed_attention,
    use_padded_attention,
)
from rl_core.scoring.forward import share_fault
from rl_core.training.sharding import release_gathered
from schemas.config.optim import PackingConfig

_PROBE_TOKENS = 8


class ScoringModule(nn.Module):
    """Log-probs and entropies of a row's responses under a model.

    Args:
        model: A causal language model; its attention is switched to the one that `packing` needs.
        packing: Packed or padded, and the number of tokens whose logits exist at once.
        temperature: The sampler's temperature.
        router_replay: Whether the experts of tokens can be given, in rows.
        num_tokens: The most likely tokens are sought among the first of these; None: among all.
        may_branch: Whether rows may have branches, if the model's sequences can share tokens.

    Raises:
        ModelError: They can't be given to models of this family.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        packing: PackingConfig,
        temperature: float,
        *,
        router_replay: bool = False,
        num_tokens: int | None = None,
        may_branch: bool = False,
    ) -> None:
        super().__init__()
        self._replay = RouterReplay(model) if router_replay else None
        self.model = model
        self._chunk_tokens, self._temperature = packing.logits_chunk_tokens, temperature
        self.shares_prompts = bool(packing.share_prompts)
        self._num_tokens, self._may_branch = num_tokens, may_branch
        if packing.kind == "packed":
            use_packed_attention(model)
            self._scores = packed_scores
        else:
            use_padded_attention(model)
            self._scores = padded_scores

    def forward(
        self, row: PackedRow | None, entropy: Literal[False, "no_grad", "grad"] = False, top_k: int = 0
    ) -> TokenScores | None:
        """Score one packed row.

        Args:
            row: On the model's device; R response tokens. None: run the start-up checks, for which the weights outside
                of the layers must be gathered too if the model is sharded.
            entropy: Whether to compute entropies, and whether they have a gradient.
            top_k: How many of the most likely tokens to return.

        Returns:
            [R] float32 log-probs, and what was requested, in nats; None for the checks.
        """
        if row is None:
            self._check()
            return None
        assert row.experts is None or self._replay is not None, "experts are given to a model that doesn't replay them"
        return self._scores(
            self.model,
            row,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
            entropy=entropy,
            top_k=top_k,
            num_tokens=self._num_tokens,
        )

    def probe(self) -> None:
        """Check, sharded and in the compute dtype as in the run, that rows are scored as by the model's own forward.

        All ranks must call it, and get the same result.

        Raises:
            ScoringError: They are not, packed sequences leak into each other, or its routers don't replay experts.
        """
        with torch.no_grad():
            self(None)
        release_gathered(self)

    def _check(self) -> None:
        if self._scores is packed_scores:
            branches = self._may_branch and share_fault(self.model.config) is None
            leak_probe(self.model, share_prompts=self.shares_prompts, branches=branches)
        else:
            padded_probe(self.model)
        if self._replay is not None:
            self._replay.check(self._score_probe)

    def _score_probe(self, experts: Tensor | None) -> None:
        """Score one sequence of probe tokens with these experts, [T, L * K]."""
        ids = torch.arange(_PROBE_TOKENS, device=self.model.device)
        one = torch.ones(1, dtype=torch.int64)
        parts = None if experts is None else (experts[:1], experts[1:])
        row = pack_row(ids[:1], one, ids[1:], one * (_PROBE_TOKENS - 1), parts)
        self._scores(self.model, row, temperature=1.0, chunk_tokens=_PROBE_TOKENS)
