"""The embedded engine: batched decoding of a transformers model with a KV cache.

N rows (samples), L of them live, V tokens of vocabulary. Prompts are left-padded and prefilled once each, then repeated
per sample. Finished rows are removed from the batch.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infra.engines.base import EngineUsage, Sampling, WeightsBucket, check_held, require_awake
from infra.engines.embedded.attention import use_decode_attention
from infra.engines.embedded.cache import cache_argument, cache_bytes_per_token, decoding_cache
from infra.engines.embedded.rows import TransformersRows
from infra.models.load import check_weights
from rl_core.scoring import RouterReplay
from rl_core.storages import EmptiedStorages, release_cached, storage_bytes
from rl_core.telemetry import take_peak_memory
from schemas.placement import EngineTag, MemoryChange, PartBytes
from schemas.weights import TensorSpec


def use_decode_layout(model: PreTrainedModel) -> None:
    """Store the linear layers' weights column-major, in place; names, shapes and values don't change.

    On a CPU, multiplying a few rows by a row-major weight, as `torch.nn.Linear` stores it, takes up to five times as
    long. Other devices don't benefit, and an embedding reads whole rows, so a tied head is left unchanged.
    """
    if model.device.type != "cpu":
        return
    embedding = model.get_input_embeddings().weight
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.weight is not embedding:
            module.weight.data = module.weight.data.t().contiguous().t()


class TransformersEngine:
    """A `RolloutEngine` over a transformers causal language model on its own device.

    Attributes:
        version: The policy version of the model's weights; None after a load that failed, or if they are gone, as the
            engine slept without keeping them.
        dtype: The dtype of the weights.
        asleep: The parts that are out of the device's memory.
        usage: How much of it was in use.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_cache_bytes: int = 2**32,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        records_experts: bool = False,
        keeps_weights: bool = False,
    ) -> None:
        """Wrap `model`, whose weights are those of policy version 0.

        Args:
            model: The model, in eval mode and on its device; its attention and its weights' memory layout are changed.
            max_cache_bytes: Requests are split into several batches if one batch's KV cache could exceed this.
            tokenizer: The model's tokenizer; needed for stop strings only.
            records_experts: Whether generations have the experts that the model chose.
            keeps_weights: Whether it keeps its weights in host memory while it sleeps, instead of dropping them.

        Raises:
            ModelError: The experts of this model can't be recorded.
        """
        self._replay = RouterReplay(model) if records_experts else None
        use_decode_attention(model)
        use_decode_layout(model)
        self.model = model
        self.tokenizer = tokenizer
        self.version: int | None = 0
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.asleep: frozenset[EngineTag] = frozenset()
        self._emptied, self._keeps_weights = EmptiedStorages(), keeps_weights
        self.max_cache_bytes = max_cache_bytes
        self.usage = EngineUsage()
        self._token_bytes = cache_bytes_per_token(model.config, model.dtype)

    def load_weights(
        self, specs: Sequence[TensorSpec], buckets: Iterable[WeightsBucket], version: int, *, is_complete: bool = True
    ) -> None:
        assert "weights" not in self.asleep, "an engine is woken before it loads weights"
        check_held(self.version, is_complete=is_complete)
        check_weights(self.model, specs, version, is_complete=is_complete)
        self.version = None
        own = self.model.state_dict()
        for bucket in buckets:
            _copy(own, bucket.tensors)
        self.version = version

    @torch.inference_mode()
    def score(self, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        tokens = torch.from_numpy(token_ids.astype(np.int64)).to(self.model.device)
        positions = torch.arange(len(tokens), device=tokens.device)
        cache = {cache_argument(self.model): decoding_cache(self.model.config)}
        output = self.model(tokens[None], position_ids=positions[None], use_cache=True, **cache)
        return _token_logprobs(output.logits[0], tokens, temperature)

    @torch.inference_mode()
    def score_plainly(self, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        """Return the log-probs of given tokens by the model's own eager forward with the same weights; see `score`.

        A difference from `score` is one of functions, not of weights.
        """
        tokens = torch.from_numpy(token_ids.astype(np.int64)).to(self.model.device)
        attention = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        try:
            logits = self.model(tokens[None], use_cache=False).logits[0]
        finally:
            self.model.set_attn_implementation(attention)
        return _token_logprobs(logits, tokens, temperature)

    def open_rows(self, sampling: Sampling, *, several_turns: bool = False) -> TransformersRows:
        """Return a decoder without rows; see `RolloutEngine.open_rows`. The KV cache lives until it is closed.

        Raises:
            ValueError: `sampling` has stop strings but the engine has no tokenizer, or experts of several turns would
                have to be recorded.
        """
        require_awake(self)
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop strings {sampling.stop} need a tokenizer; give TransformersEngine the model's")
        if several_turns and self._replay is not None:
            raise ValueError("the experts of rows of several turns can't be recorded")
        max_tokens = max(1, self.max_cache_bytes // max(1, self._token_bytes))
        return TransformersRows(
            self.model,
            sampling,
            self.tokenizer,
            self._replay,
            self.usage,
            max_tokens,
            several_turns=several_turns,
        )

    def sleep(self, tags: Collection[EngineTag]) -> MemoryChange:
        """Give up the weights' memory; a KV cache exists only during a call. See `RolloutEngine.sleep`."""
        num_bytes = 0
        if "weights" in tags and "weights" not in self.asleep:
            if not self._keeps_weights:
                self.version = None
            num_bytes = self._emptied.move_out(self.model.parameters(), keep_values=self._keeps_weights)
        self.asleep |= frozenset(tags)
        release_cached()
        return self._change(num_bytes)

    def wake(self, tags: Collection[EngineTag]) -> MemoryChange:
        """Allocate the weights again, in the same layout, with their values if kept; see `RolloutEngine.wake`."""
        allocated = self._emptied.move_in() if "weights" in tags else 0
        self.asleep -= frozenset(tags)
        return self._change(allocated)

    def _change(self, num_bytes: int) -> MemoryChange:
        changed: PartBytes = {"weights": num_bytes}
        return MemoryChange(
            moved=changed if self._keeps_weights else {},
            freed={} if self._keeps_weights else changed,
            resident={"weights": storage_bytes(self.model.parameters())},
        )

    def check(self) -> None:
        """Do nothing: the engine has no other processes that could be lost."""

    def take_peak_memory(self) -> dict[str, int]:
        return take_peak_memory(self.model.device)

    def close(self) -> None:
        del self.model


def _token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> np.ndarray:
    """Return the log-probs of all tokens [T] but the first, from the logits [T, V] after each: float32 [T - 1]."""
    logprobs = (logits[:-1].float() / temperature).log_softmax(-1)
    scores: np.ndarray = logprobs.gather(-1, tokens[1:, None])[:, 0].cpu().numpy()
    return scores


@torch.no_grad()
def _copy(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        own[name].copy_(tensor)
