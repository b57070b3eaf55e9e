"""The embedded engine: batched decoding of a transformers model with a KV cache.

N rows (samples), L of them live, V tokens of vocabulary. Prompts are left-padded and prefilled once each, then repeated
per sample. Finished rows are removed from the batch.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infra.engines.attention import use_decode_attention
from infra.engines.base import (
    EngineUsage,
    Generation,
    GenerationRequest,
    Sampling,
    WeightsBucket,
    check_held,
    check_prompts,
    require_awake,
)
from infra.engines.cache import cache_bytes_per_token, decoding_cache
from infra.engines.experts import ExpertRecord
from infra.engines.layout import use_decode_layout
from infra.engines.sampler import sample_tokens
from infra.engines.stop import StopStrings
from infra.models.load import check_weights
from rl_core.rollout.seeding import uniforms
from rl_core.scoring import RouterReplay
from rl_core.storages import EmptiedStorages, release_cached, storage_bytes
from rl_core.telemetry import take_peak_memory
from schemas.memory import EngineTag, MemoryChange
from schemas.rollout import FinishReason
from schemas.weights import TensorSpec

_DROP_FRACTION = 1 / 8  # finished rows are removed once they are this fraction of the batch: it copies the cache


class TransformersEngine:
    """A `RolloutEngine` over a transformers causal language model on its own device.

    Attributes:
        version: The policy version of the model's weights; None after a load that failed, or if they are gone, as the
            engine slept.
        dtype: The dtype of the weights.
        asleep: The parts that are out of the device's memory.
        usage: How much of it was in use.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        version: int = 0,
        max_cache_bytes: int = 2**32,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        records_experts: bool = False,
    ) -> None:
        """Wrap `model`, whose weights are those of policy `version`.

        Args:
            model: The model, in eval mode and on its device; its attention and its weights' memory layout are changed.
            version: The policy version of its weights.
            max_cache_bytes: Requests are split into several batches if one batch's KV cache could exceed this.
            tokenizer: The model's tokenizer; needed for stop strings only.
            records_experts: Whether generations have the experts that the model chose.

        Raises:
            ModelError: The experts of this model can't be recorded.
        """
        self._replay = RouterReplay(model) if records_experts else None
        use_decode_attention(model)
        use_decode_layout(model)
        self.model = model
        self.tokenizer = tokenizer
        self.version: int | None = version
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.asleep: frozenset[EngineTag] = frozenset()
        self._emptied = EmptiedStorages()
        self.max_cache_bytes = max_cache_bytes
        self.usage = EngineUsage()
        self._token_bytes = cache_bytes_per_token(model.config, model.dtype)

    def load_weights(
        self, specs: Sequence[TensorSpec], buckets: Iterable[WeightsBucket], version: int, *, is_complete: bool = True
    ) -> None:
        """Copy weights into the model's in place, bucket by bucket; see `RolloutEngine.load_weights`.

        Raises:
            WeightsError: A name or shape is not the model's, or a weight is missing; nothing has been copied.
        """
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
        """Return the log-probs of given tokens; see `RolloutEngine.score`."""
        tokens = torch.from_numpy(token_ids.astype(np.int64)).to(self.model.device)
        positions = torch.arange(len(tokens), device=tokens.device)
        cache = decoding_cache(self.model.config)
        output = self.model(tokens[None], position_ids=positions[None], past_key_values=cache, use_cache=True)
        logprobs = (output.logits[0, :-1].float() / temperature).log_softmax(-1)
        return logprobs.gather(-1, tokens[1:, None])[:, 0].cpu().numpy()

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[tuple[int, Generation]]:
        """Yield each sample with its number as soon as it is finished; see `RolloutEngine.generate`.

        Nothing is computed until the next sample is requested. The KV cache lives as long as the iterator.

        Raises:
            ValueError: A prompt is empty, or `sampling` has stop strings but the engine has no tokenizer.
            NonFiniteError: The model's logits are not finite.
            VersionError: The engine is asleep, or has no weights.
        """
        require_awake(self)
        check_prompts(requests, sampling)
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop strings {sampling.stop} need a tokenizer; give TransformersEngine the model's")
        first, num_samples = 0, sum(request.num_samples for request in requests)
        for batch in self._batches(requests, sampling):
            decode = _Decode(self.model, batch, sampling, self.tokenizer, self._replay)
            waiting = num_samples - first - len(decode.finished)
            while (running := int((~decode.finished).sum())) > 0:
                with torch.inference_mode():  # for this step only: across a yield, it would apply to the consumer too
                    ended = decode.step()
                self.usage.add(running, waiting, decode.num_cached * self._token_bytes / self.max_cache_bytes)
                yield from ((first + row, decode.generation(row)) for row in ended)
            first += len(decode.finished)

    def sleep(self, tags: Collection[EngineTag]) -> MemoryChange:
        """Drop the weights' values and memory; a KV cache exists only during a call. See `RolloutEngine.sleep`."""
        freed = 0
        if "weights" in tags and "weights" not in self.asleep:
            self.version = None
            freed = self._emptied.move_out(self.model.parameters(), keep_values=False)
        self.asleep |= frozenset(tags)
        release_cached()
        return self._change(freed)

    def wake(self, tags: Collection[EngineTag]) -> MemoryChange:
        """Allocate the weights again, in the same layout and without values; see `RolloutEngine.wake`."""
        allocated = self._emptied.move_in() if "weights" in tags else 0
        self.asleep -= frozenset(tags)
        return self._change(allocated)

    def _change(self, num_bytes: int) -> MemoryChange:
        return MemoryChange(freed={"weights": num_bytes}, resident={"weights": storage_bytes(self.model.parameters())})

    def check(self) -> None:
        """Do nothing: the engine has no other processes that could be lost."""

    def take_peak_memory(self) -> dict[str, int]:
        """Return this process's peak memory; see `RolloutEngine.take_peak_memory`."""
        return take_peak_memory(self.model.device)

    def close(self) -> None:
        """Release the model; the engine can't generate afterwards."""
        del self.model

    def _batches(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[list[GenerationRequest]]:
        """Split `requests` into batches whose rows, all as long as the longest could get, fit the cache budget."""
        batch: list[GenerationRequest] = []
        num_rows, longest = 0, 0  # the longest row, if it gets all tokens that it may
        for request in requests:
            if not request.seeds:
                continue
            length = len(request.prompt_ids) + request.token_limit(sampling)
            num_rows += request.num_samples
            longest = max(longest, length)
            if batch and num_rows * longest * self._token_bytes > self.max_cache_bytes:
                yield batch
                batch, num_rows, longest = [], request.num_samples, length
            batch.append(request)
        if batch:
            yield batch


@torch.no_grad()
def _copy(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


class _Decode:
    """The state of one batch being decoded; `live` [L] are the rows still in the batch, ascending."""

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        tokenizer: PreTrainedTokenizerBase | None,
        replay: RouterReplay | None,
    ) -> None:
        self.model = model
        self.sampling = sampling
        self.requests = requests
        self.request_of_row = np.repeat(np.arange(len(requests)), [r.num_samples for r in requests])
        num_rows = len(self.request_of_row)
        seeds = np.array([seed for request in requests for seed in request.seeds], dtype=np.uint64)
        self.limits = np.array([request.token_limit(sampling) for request in requests])[self.request_of_row]
        self.max_tokens = int(self.limits.max())
        self.noise = torch.from_numpy(uniforms(seeds, self.max_tokens))
        self.stop_ids = np.array(sampling.stop_token_ids, dtype=np.int64)
        self.stop_strings = StopStrings(tokenizer, sampling.stop, num_rows) if tokenizer and sampling.stop else None
        self.cache = decoding_cache(model.config)
        self.num_tokens = 0  # of the response of each live row
        self.live = np.arange(num_rows)
        self.finished = np.zeros(num_rows, dtype=bool)
        self.reasons: list[FinishReason] = ["length"] * num_rows
        self.lengths = np.zeros(num_rows, dtype=np.int64)  # of finished rows
        self.token_ids = np.zeros((num_rows, self.max_tokens), dtype=np.int32)
        self.logprobs = np.zeros((num_rows, self.max_tokens), dtype=np.float32)
        self.experts = ExpertRecord(replay, num_rows, self.max_tokens) if replay else None

    def step(self) -> list[int]:
        """Append a token to every live row, and return the rows that it has finished."""
        logits = self._prefill() if self.num_tokens == 0 else self._advance()
        noise = self.noise[self.live, self.num_tokens].to(logits.device)
        self.newest, logprobs = sample_tokens(logits, noise, self.sampling)
        self.token_ids[self.live, self.num_tokens] = self.newest.cpu().numpy()
        self.logprobs[self.live, self.num_tokens] = logprobs.cpu().numpy()
        self.num_tokens += 1
        return self._finish()

    @property
    def num_cached(self) -> int:
        """Tokens in the KV cache, padding included."""
        return len(self.live) * (self.width + self.num_tokens)

    def generation(self, row: int) -> Generation:
        """Return the sample of a finished row."""
        length = self.lengths[row]
        return Generation(
            token_ids=self.token_ids[row, :length].copy(),
            logprobs=self.logprobs[row, :length].copy(),
            finish_reason=self.reasons[row],
            experts=self.experts.of_row(row, self.request_of_row[row], length) if self.experts else None,
        )

    def _finish(self) -> list[int]:
        """Mark the unfinished rows that end with their newest token, and return them."""
        rows = self.live[~self.finished[self.live]]
        stops = np.isin(self.token_ids[rows, self.num_tokens - 1], self.stop_ids)
        if self.stop_strings is not None:
            stops |= self.stop_strings.find(rows, self.token_ids, self.num_tokens)
        for row in rows[stops]:
            self.reasons[row] = "stop"
        ended = rows[stops | (self.limits[rows] == self.num_tokens)]
        self.finished[ended] = True
        self.lengths[ended] = self.num_tokens
        return ended.tolist()

    def _prefill(self) -> torch.Tensor:
        """Run each prompt once, give every row its prompt's cache, and return every row's logits [N, V]."""
        device = self.model.device
        lengths = np.array([len(request.prompt_ids) for request in self.requests])
        self.width = width = int(lengths.max())
        input_ids = np.zeros((len(self.requests), width), dtype=np.int64)
        for row, request in enumerate(self.requests):
            input_ids[row, width - lengths[row] :] = request.prompt_ids
        # False on padding; as wide as a row may become.
        present = np.arange(width + self.max_tokens) >= (width - lengths)[:, None]
        position_ids = np.maximum(np.arange(width) - (width - lengths)[:, None], 0)
        self.is_padded = len(set(lengths)) > 1
        self.present = torch.from_numpy(present).to(device)
        with self.experts.prefill(lengths) if self.experts else nullcontext():
            logits = self._forward(torch.from_numpy(input_ids).to(device), torch.from_numpy(position_ids).to(device))
        rows = torch.from_numpy(self.request_of_row).to(device)
        self.present = self.present[rows]
        self.next_positions = torch.from_numpy(lengths).to(device)[rows, None]
        self.cache.batch_select_indices(rows)
        return logits[rows]

    def _advance(self) -> torch.Tensor:
        """Run the newest tokens, and return the next logits [L, V]."""
        self._drop_finished()
        with self.experts.decode(self.live, self.num_tokens - 1) if self.experts else nullcontext():
            logits = self._forward(self.newest[:, None], self.next_positions)
        self.next_positions = self.next_positions + 1
        return logits

    def _forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Run `input_ids` [L, T], the last tokens of padded prompt and response, which follow the cached ones."""
        num_present = self.width + self.num_tokens
        output = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=self.present[:, :num_present] if self.is_padded else None,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _drop_finished(self) -> None:
        """Remove finished rows once they are a large enough fraction of the batch."""
        unfinished = ~self.finished[self.live]
        if (~unfinished).sum() < max(1, _DROP_FRACTION * len(self.live)):
            return
        kept = torch.from_numpy(np.flatnonzero(unfinished)).to(self.newest.device)
        self.cache.batch_select_indices(kept)
        self.present, self.next_positions = self.present[kept], self.next_positions[kept]
        self.newest = self.newest[kept]
        self.live = self.live[unfinished]
