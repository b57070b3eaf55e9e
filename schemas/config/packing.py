"""Packing of rows into micro-batches."""

from typing import Literal

from pydantic import PositiveInt

from schemas.base import FrozenConfig


class PackingConfig(FrozenConfig):
    """Token budgets of the trainer's forwards."""

    kind: Literal["packed", "padded"] = "packed"
    """`packed`: rows without padding; `padded`: the same result from padded batches, slower, as oracle and fallback."""

    token_budget: PositiveInt = 8192
    """Hard limit of the prompt + response tokens in a micro-batch."""

    logits_chunk_tokens: PositiveInt = 1024
    """Number of tokens whose logits exist at once."""
