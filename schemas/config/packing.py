"""How rows are packed into micro-batches."""

from typing import Literal

from pydantic import PositiveInt

from schemas.base import Frozen


class PackingConfig(Frozen):
    """Budgets of forwards."""

    kind: Literal["packed", "padded"] = "packed"  # padded: the same numbers the slow way, as oracle and kill switch
    token_budget: PositiveInt = 8192  # hard limit: prompt + response tokens of one micro-batch
    logits_chunk_tokens: PositiveInt = 1024  # tokens whose logits exist at once
