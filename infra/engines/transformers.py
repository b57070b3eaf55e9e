"""The embedded engine: batched decoding of a transformers model with a KV cache.

N rows (samples), L of them live, V tokens of vocabulary. Prompts are padded on the left and prefilled once
each, then repeated per sample. Rows that have finished leave the batch.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from infra.engines.attention import use_decode_attention
from infra.engines.base import Generation, GenerationRequest, Sampling
from infra.engines.cache import cache_bytes_per_token, decoding_cache
from infra.engines.noise import uniforms
from infra.engines.sampler import draw
from infra.models import check_weights

_LEAVE_FRACTION = 1 / 8  # finished rows leave once they are this part of the batch: copying the cache must pay


class TransformersEngine:
    """A `RolloutEngine` over a transformers causal language model on its own device.

    Attributes:
        version: The policy version of the model's weights.
    """

    def __init__(self, model: PreTrainedModel, version: int = 0, max_cache_bytes: int = 2**32) -> None:
        """Wrap `model`, whose weights are those of policy `version`.

        Args:
            model: The model, in eval mode.
            version: The policy version of its weights.
            max_cache_bytes: Requests are decoded in several batches where one's KV cache could exceed this.
        """
        use_decode_attention(model)
        self.model = model
        self.version = version
        self.max_cache_bytes = max_cache_bytes

    def load_weights(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy `state` into the model's weights in place; from now on it generates as policy `version`.

        Args:
            state: Tensors by the names of the model's state dict; of tied ones, one is enough.
            version: The policy version of `state`.

        Raises:
            WeightsError: A name or shape isn't the model's, or a weight is missing; nothing has been copied.
        """
        check_weights(self.model, state, version)
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in state.items():
                own[name].copy_(tensor)
        self.version = version

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[tuple[int, Generation]]:
        """Yield each sample when it is finished, with its number: request by request, in the order of their seeds.

        Raises:
            ValueError: A prompt is empty.
            NonFiniteError: The model's logits aren't finite.
        """
        for index, request in enumerate(requests):
            if len(request.prompt_ids) == 0:
                raise ValueError(f"request {index} has an empty prompt; a model needs at least one token to continue")
        first = 0
        for batch in self._batches(requests, sampling):
            with torch.inference_mode():
                generations = _Decode(self.model, batch, sampling).run()
            yield from enumerate(generations, first)
            first += len(generations)

    def close(self) -> None:
        """Let go of the model; it generates nothing any more."""
        del self.model

    def _batches(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[list[GenerationRequest]]:
        """Cut `requests` into runs whose rows, all as long as the longest could get, fit the cache budget."""
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
    """The state of one batch while it is decoded. `live` [L] are the rows still in the batch, ascending."""

    def __init__(self, model: PreTrainedModel, requests: Sequence[GenerationRequest], sampling: Sampling) -> None:
        self.model = model
        self.sampling = sampling
        self.requests = requests
        self.request_of_row = np.repeat(np.arange(len(requests)), [r.num_samples for r in requests])
        self.prompt_lengths = np.array([len(r.prompt_ids) for r in requests])
        num_rows = len(self.request_of_row)
        self.cache = decoding_cache(model.config)
        self.live = np.arange(num_rows)
        self.token_ids = np.zeros((num_rows, sampling.max_response_tokens), dtype=np.int32)
        self.logprobs = np.zeros((num_rows, sampling.max_response_tokens), dtype=np.float32)
        self.lengths = np.zeros(num_rows, dtype=np.int64)  # 0: not finished yet

    def run(self) -> list[Generation]:
        """Decode every row to its end."""
        seeds = np.array([seed for request in self.requests for seed in request.seeds], dtype=np.uint64)
        noise = torch.from_numpy(uniforms(seeds, self.sampling.max_response_tokens))
        stop_ids = np.array(self.sampling.stop_token_ids, dtype=np.int64)
        stopped = np.zeros(len(seeds), dtype=bool)
        logits = self._prefill()
        for position in range(self.sampling.max_response_tokens):
            drawn, logprobs = draw(logits, noise[self.live, position].to(logits.device), self.sampling)
            tokens = drawn.cpu().numpy()
            self.token_ids[self.live, position] = tokens
            self.logprobs[self.live, position] = logprobs.cpu().numpy()
            ending = np.isin(tokens, stop_ids) & ~stopped[self.live]
            self.lengths[self.live[ending]] = position + 1
            stopped[self.live[ending]] = True
            if stopped.all() or position + 1 == self.sampling.max_response_tokens:
                break
            drawn = self._drop_finished(drawn, stopped)
            logits = self._advance(drawn, position)
        self.lengths[~stopped] = self.sampling.max_response_tokens
        return [
            Generation(
                token_ids=self.token_ids[row, :length].copy(),
                logprobs=self.logprobs[row, :length].copy(),
                finish_reason="stop" if stopped[row] else "length",
            )
            for row, length in enumerate(self.lengths)
        ]

    def _prefill(self) -> torch.Tensor:
        """Run each prompt once, then give every row its prompt's cache and logits [N, V]."""
        width = int(self.prompt_lengths.max())
        input_ids = np.zeros((len(self.requests), width), dtype=np.int64)
        for row, request in enumerate(self.requests):
            input_ids[row, width - len(request.prompt_ids) :] = request.prompt_ids
        padding = (width - self.prompt_lengths)[:, None]
        logits = self._forward(
            torch.from_numpy(input_ids),
            np.maximum(np.arange(width) - padding, 0),
            np.arange(width) >= padding,
        )
        rows = torch.from_numpy(self.request_of_row).to(self.model.device)
        self.cache.batch_select_indices(rows)
        return logits[rows]

    def _advance(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """Append `tokens` [L], the responses' tokens at `position`, and return the next logits [L, V]."""
        prompt_lengths = self.prompt_lengths[self.request_of_row[self.live]][:, None]
        width = int(self.prompt_lengths.max())
        present = np.arange(width + position + 1) >= width - prompt_lengths
        return self._forward(tokens[:, None], prompt_lengths + position, present)

    def _forward(self, input_ids: torch.Tensor, position_ids: np.ndarray, present: np.ndarray) -> torch.Tensor:
        """Run `input_ids` after what the cache holds; `present` [L, cached + new] is false on padding."""
        device = self.model.device
        output = self.model(
            input_ids=input_ids.to(device),
            position_ids=torch.from_numpy(position_ids).to(device),
            attention_mask=None if present.all() else torch.from_numpy(present).to(device),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _drop_finished(self, tokens: torch.Tensor, stopped: np.ndarray) -> torch.Tensor:
        """Let finished rows leave once they are enough of the batch; return the staying rows' `tokens`."""
        staying = ~stopped[self.live]
        if staying.all() or (~staying).sum() < _LEAVE_FRACTION * len(self.live):
            return tokens
        kept = torch.from_numpy(np.flatnonzero(staying)).to(tokens.device)
        self.cache.batch_select_indices(kept)
        self.live = self.live[staying]
        return tokens[kept]
