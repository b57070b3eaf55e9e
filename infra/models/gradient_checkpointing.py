"""Gradient checkpointing (arXiv:1604.06174) that changes memory and time, and nothing of what a model computes."""

from transformers import PreTrainedModel

from schemas.errors import ModelError


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Have a model's layers keep their inputs only, and compute the rest again in the backward pass.

    transformers checkpoints layers in train mode. Only the layers themselves are put into it, so that their parts stay
    in eval mode: a router that adds noise in train mode, or a model that skips layers at random, still doesn't.

    Raises:
        ModelError: The model has no layers that can be checkpointed.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # here, as few runs need it

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise ModelError(
            f"model.gradient_checkpointing: {type(model).__name__} doesn't support it; leave it out, and lower "
            "packing.token_budget if memory runs short"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True
