"""The embedded engine: batched decoding of a transformers model with a KV cache.

N rows (samples), L of them live, V tokens of vocabulary. Prompts are left-padded and prefilled once each, then repeated
per sample. Finished rows are removed from the batch.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infra.engines.attention import use_decode_attention
from infra.engines.base import Generation, GenerationRequest, Sampling
from infra.engines.cache import cache_bytes_per_token, decoding_cache
from infra.engines.layout import use_decode_layout
from infra.engines.sampler import sample_tokens
from infra.engines.stop import StopStrings
from infra.models.load import check_weights
from rl_core.rollout.seeding import uniforms
from schemas.rollout import FinishReason

_DROP_FRACTION = 1 / 8  # finished rows are removed once they are this fraction of the batch: it copies the cache


class TransformersEngine:
    """A `RolloutEngine` over a transformers causal language model on its own device.

    Attributes:
        version: The policy version of the model's weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        version: int = 0,
        max_cache_bytes: int = 2**32,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Wrap `model`, whose weights are those of policy `version`.

        Args:
            model: The model, in eval mode and on its device; its attention and its weights' memory layout are changed.
            version: The policy version of its weights.
            max_cache_bytes: Requests are split into several batches if one batch's KV cache could exceed this.
            tokenizer: The model's tokenizer; needed for stop strings only.
        """
        use_decode_attention(model)
        use_decode_layout(model)
        self.model = model
        self.tokenizer = tokenizer
        self.version = version
        self.max_cache_bytes = max_cache_bytes

    def load_weights(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy `state` into the model's weights in place; from then on it generates as policy `version`.

        Args:
            state: Tensors by state-dict name; for tied weights, one name is enough.
            version: The policy version of `state`.

        Raises:
            WeightsError: A name or shape is not the model's, or a weight is missing; nothing has been copied.
        """
        check_weights(self.model, state, version)
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in state.items():
                own[name].copy_(tensor)
        self.version = version

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[tuple[int, Generation]]:
        """Yield each sample with its number as soon as it is finished; see `RolloutEngine.generate`.

        Nothing is computed until the next sample is requested. The KV cache lives as long as the iterator.

        Raises:
            ValueError: A prompt is empty, or `sampling` has stop strings but the engine has no tokenizer.
            NonFiniteError: The model's logits are not finite.
        """
        for index, request in enumerate(requests):
            if len(request.prompt_ids) == 0:
                raise ValueError(f"request {index} has an empty prompt; a model needs at least one token to continue")
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop strings {sampling.stop} need a tokenizer; give TransformersEngine the model's")
        first = 0
        for batch in self._batches(requests, sampling):
            decode = _Decode(self.model, batch, sampling, self.tokenizer)
            while not decode.finished.all():
                with torch.inference_mode():  # for this step only: across a yield, it would apply to the consumer too
                    ended = decode.step()
                yield from ((first + row, decode.generation(row)) for row in ended)
            first += len(decode.finished)

    def close(self) -> None:
        """Release the model; the engine can't generate afterwards."""
        del self.model

    def _batches(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[list[GenerationRequest]]:
        """Split `requests` into batches whose rows, all as long as the longest could get, fit the cache budget."""
        token_bytes = cache_bytes_per_token(self.model.config, self.model.dtype)
        batch: list[GenerationRequest] = []
        num_rows, longest = 0, 0
        for request in requests:
            if not request.seeds:
                continue
            num_rows += request.num_samples
            longest = max(longest, len(request.prompt_ids))
            if batch and num_rows * (longest + sampling.max_response_tokens) * token_bytes > self.max_cache_bytes:
                yield batch
                batch, num_rows, longest = [], request.num_samples, len(request.prompt_ids)
            batch.append(request)
        if batch:
            yield batch


class _Decode:
    """The state of one batch being decoded; `live` [L] are the rows still in the batch, ascending."""

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self.model = model
        self.sampling = sampling
        self.requests = requests
        self.request_of_row = np.repeat(np.arange(len(requests)), [r.num_samples for r in requests])
        num_rows = len(self.request_of_row)
        seeds = np.array([seed for request in requests for seed in request.seeds], dtype=np.uint64)
        self.noise = torch.from_numpy(uniforms(seeds, sampling.max_response_tokens))
        self.stop_ids = np.array(sampling.stop_token_ids, dtype=np.int64)
        self.stop_strings = StopStrings(tokenizer, sampling.stop, num_rows) if tokenizer and sampling.stop else None
        self.cache = decoding_cache(model.config)
        self.num_tokens = 0  # of the response of each live row
        self.live = np.arange(num_rows)
        self.finished = np.zeros(num_rows, dtype=bool)
        self.reasons: list[FinishReason] = ["length"] * num_rows
        self.lengths = np.zeros(num_rows, dtype=np.int64)  # of finished rows
        self.token_ids = np.zeros((num_rows, sampling.max_response_tokens), dtype=np.int32)
        self.logprobs = np.zeros((num_rows, sampling.max_response_tokens), dtype=np.float32)

    def step(self) -> list[int]:
        """Append a token to every live row, and return the rows that it has finished."""
        logits = self._prefill() if self.num_tokens == 0 else self._advance()
        noise = self.noise[self.live, self.num_tokens].to(logits.device)
        self.newest, logprobs = sample_tokens(logits, noise, self.sampling)
        self.token_ids[self.live, self.num_tokens] = self.newest.cpu().numpy()
        self.logprobs[self.live, self.num_tokens] = logprobs.cpu().numpy()
        self.num_tokens += 1
        return self._finish()

    def generation(self, row: int) -> Generation:
        """Return the sample of a finished row."""
        length = self.lengths[row]
        return Generation(
            token_ids=self.token_ids[row, :length].copy(),
            logprobs=self.logprobs[row, :length].copy(),
            finish_reason=self.reasons[row],
        )

    def _finish(self) -> list[int]:
        """Mark the unfinished rows that end with their newest token, and return them."""
        rows = self.live[~self.finished[self.live]]
        stops = np.isin(self.token_ids[rows, self.num_tokens - 1], self.stop_ids)
        if self.stop_strings is not None:
            stops |= self.stop_strings.find(rows, self.token_ids, self.num_tokens)
        for row in rows[stops]:
            self.reasons[row] = "stop"
        ended = rows if self.num_tokens == self.sampling.max_response_tokens else rows[stops]
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
        present = np.arange(width + self.sampling.max_response_tokens) >= (width - lengths)[:, None]
        position_ids = np.maximum(np.arange(width) - (width - lengths)[:, None], 0)
        self.is_padded = len(set(lengths)) > 1
        self.present = torch.from_numpy(present).to(device)
        logits = self._forward(torch.from_numpy(input_ids).to(device), torch.from_numpy(position_ids).to(device))
        rows = torch.from_numpy(self.request_of_row).to(device)
        self.present = self.present[rows]
        self.next_positions = torch.from_numpy(lengths).to(device)[rows, None]
        self.cache.batch_select_indices(rows)
        return logits[rows]

    def _advance(self) -> torch.Tensor:
        """Run the newest tokens, and return the next logits [L, V]."""
        self._drop_finished()
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
