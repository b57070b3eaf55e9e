"""Which model is trained, and how it computes."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from schemas.base import Frozen


class LoraConfig(Frozen):
    """Train low-rank adapters only (extra `lora`); the reference is the model without them (arXiv:2106.09685)."""

    rank: PositiveInt = 16
    alpha: PositiveInt = 32  # the adapter's output is scaled by alpha / rank
    dropout: Literal[0] = 0  # a replayed log-prob is a function of weights and tokens
    target_modules: tuple[
        Annotated[str, Field(pattern=r"^[\w.-]+$")], ...
    ] = ()  # empty: all linear layers but the head


class ModelConfig(Frozen):
    """A causal language model and its tokenizer, as an ordinary Hugging Face folder."""

    path: str  # local folder, or a hub name where there is a network
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # of forwards, by autocast; weights stay in float32
    gradient_checkpointing: bool = False  # layers are computed again in the backward: less memory, more time
    lora: LoraConfig | None = None
