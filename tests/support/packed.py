"""Tiny in-memory models and random jagged batches, for tests of packed scoring."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_core.scoring import PackedRow, pack_row

VOCAB_SIZE = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # log-probs far from uniform, so that a wrong token shows
    "pad_token_id": None,
}


def tiny_qwen3(*, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Qwen3ForCausalLM:
    """Create a random Qwen3 with grouped heads; `overrides` are fields of `Qwen3Config`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **overrides})).to(dtype).eval()


@dataclass(frozen=True, eq=False)
class Batch:
    """S jagged sequences: flat token ids and lengths."""

    prompt_ids: Tensor
    prompt_lengths: Tensor
    response_ids: Tensor
    response_lengths: Tensor

    @property
    def row(self) -> PackedRow:
        """All sequences packed."""
        return pack_row(self.prompt_ids, self.prompt_lengths, self.response_ids, self.response_lengths)

    @property
    def sequences(self) -> list[tuple[Tensor, Tensor]]:
        """Prompt and response ids of each sequence."""
        prompts = torch.split(self.prompt_ids, self.prompt_lengths.tolist())
        responses = torch.split(self.response_ids, self.response_lengths.tolist())
        return list(zip(prompts, responses, strict=True))


def random_batch(prompt_lengths: list[int], response_lengths: list[int], *, seed: int = 1) -> Batch:
    """Create sequences of random token ids of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    prompt_ids = torch.randint(VOCAB_SIZE, (sum(prompt_lengths),), generator=generator)
    response_ids = torch.randint(VOCAB_SIZE, (sum(response_lengths),), generator=generator)
    return Batch(prompt_ids, torch.tensor(prompt_lengths), response_ids, torch.tensor(response_lengths))


def plain_logprobs(model: Qwen3ForCausalLM, prompt: Tensor, response: Tensor, temperature: float) -> Tensor:
    """Compute the response's log-probs by an ordinary forward of this sequence alone."""
    scores = plain_log_softmax(model, prompt, response, temperature)
    return scores.gather(-1, response[:, None]).squeeze(-1)


def plain_log_softmax(model: Qwen3ForCausalLM, prompt: Tensor, response: Tensor, temperature: float) -> Tensor:
    """Compute the log-probs of all tokens at the positions that predict the response, [response, vocabulary]."""
    input_ids = torch.cat([prompt, response])
    logits = model(input_ids=input_ids.unsqueeze(0), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)
