"""Log-probs of a random batch by the packed, the padded and the plain forward."""

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
)

from rl_core.scoring import (
    packed_scores,
    padded_scores,
    use_packed_attention,
    use_padded_attention,
)
from tests.support.packed import Batch, plain_logprobs


def score_packed(model: PreTrainedModel, batch: Batch, *, temperature: float = 1.0, chunk_tokens: int = 4) -> Tensor:
    use_packed_attention(model)
    return packed_scores(model, batch.row, temperature=temperature, chunk_tokens=chunk_tokens).logprobs


def score_padded(model: PreTrainedModel, batch: Batch, *, temperature: float = 1.0) -> Tensor:
    use_padded_attention(model)
    return padded_scores(model, batch.row, temperature=temperature, chunk_tokens=4).logprobs


def score_plain(model: PreTrainedModel, batch: Batch, *, temperature: float = 1.0, attention: str = "sdpa") -> Tensor:
    model.set_attn_implementation(attention)
    return torch.cat([plain_logprobs(model, *sequence, temperature) for sequence in batch.sequences])
