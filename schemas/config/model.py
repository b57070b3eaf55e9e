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

    target_modules: tuple[Annotated[str, Field(pattern=r"^[\w.-]+$")], ...] = ()
    """Names of the modules with adapters; empty: all linear layers except the LM head."""

    publish: Literal["merged", "adapters"] = "merged"
    """What is sent to engines: weights with the adapters merged; or the adapters, of far fewer bytes, as such."""


class ModelConfig(FrozenConfig):
    """A causal language model and its tokenizer, as an ordinary Hugging Face folder."""

    path: str
    """Local folder, or a name on the Hugging Face hub if there is network access."""

    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and activations in forward and backward; auto: bfloat16 on CUDA, float32 on a CPU."""

    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, more time."""

    lora: LoraConfig | None = None
    """Low-rank adapters; None: all weights are trained."""

    @property
    def published_lora(self) -> LoraConfig | None:
        """The adapters that engines compute with as such, and are sent alone; None: theirs are merged."""
        return self.lora if self.lora is not None and self.lora.publish == "adapters" else None

    @property
    def publishes_adapters(self) -> bool:
        """Whether engines are sent adapters."""
        return self.published_lora is not None

    def dtype_on(self, device: str) -> Literal["float32", "bfloat16"]:
        """Return the compute dtype on a kind of device, `cpu` or `cuda`."""
        if self.compute_dtype == "auto":
            return "bfloat16" if device == "cuda" else "float32"
        return self.compute_dtype
