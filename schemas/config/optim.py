"""The optimizer, and the packing of rows into its micro-batches."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from schemas.base import FrozenConfig


def _not_in_eight_bits(implementation: object) -> object:
    if implementation == "8bit":
        raise ValueError(
            "moments in 8 bits were removed in 0.3; set optim.offload = true to keep moments in host memory, or train "
            "adapters (model.lora)"
        )
    return implementation


class OptimConfig(FrozenConfig):
    """The optimizer, with warm-up."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the matrices of the decoder layers (arXiv:2502.16982), AdamW for all other weights."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate, reached after the warm-up."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""

    epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon, added to the root of the second moment."""

    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay; 0: none."""

    implementation: Annotated[Literal["auto", "for_loop", "foreach", "fused"], BeforeValidator(_not_in_eight_bits)] = (
        "auto"
    )
    """AdamW's kernels; auto: fused on CUDA, torch's choice on a CPU."""

    offload: bool = False
    """Keep the optimizer's moments in host memory, and move some of them at a time to the GPU for the step."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's decay rate of the mean of gradients."""

    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm, over all ranks."""

    warmup_updates: NonNegativeInt = 0
    """Updates of linear warm-up; 0: none."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a line or half cosine to 0 at the run's end, which may move."""

    updates_per_step: PositiveInt = 1
    """Optimizer updates per step, each on an equal part of its rows."""


class PackingConfig(FrozenConfig):
    """Token budgets of the trainer's forwards."""

    kind: Literal["packed", "padded"] = "packed"
    """`packed`: rows without padding; `padded`: the same result from padded batches, slower, as oracle and fallback."""

    token_budget: PositiveInt = 8192
    """Hard limit of the prompt + response tokens in a micro-batch; a shared prompt counts once."""

    share_prompts: bool | None = None
    """Compute a prompt once for its samples in a micro-batch; unset: if the family and the other settings can."""

    logits_chunk_tokens: PositiveInt = 1024
    """Number of tokens whose logits exist at once."""
