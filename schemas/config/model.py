"""The model to train, and its compute dtype."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from schemas.base import FrozenConfig


class LoraConfig(FrozenConfig):
    """Train low-rank adapters only (extra `lora`); the reference is the model without them (arXiv:2106.09685)."""

    rank: PositiveInt = 16
    """Rank of the adapters."""

    alpha: PositiveInt = 32
    """Scale of the adapters: their output is multiplied by `alpha` / `rank`."""

    dropout: Literal[0] = 0
    """Always 0, because a log-prob must be a function of weights and tokens."""

    target_modules: tuple[Annotated[str, Field(pattern=r"^[\w.-]+$")], ...] = ()
    """Names of the modules with adapters; empty: all linear layers except the LM head."""


class ModelConfig(FrozenConfig):
    """A causal language model and its tokenizer, as an ordinary Hugging Face folder."""

    path: str
    """Local folder, or a name on the Hugging Face hub if there is network access."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the forwards, by autocast; weights stay in float32."""

    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, more time."""

    lora: LoraConfig | None = None
    """Low-rank adapters; None: all weights are trained."""
