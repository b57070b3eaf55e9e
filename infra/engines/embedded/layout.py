"""The memory layout of weights while a model decodes."""

import torch
from transformers import PreTrainedModel


def use_decode_layout(model: PreTrainedModel) -> None:
    """Store the linear layers' weights column-major, in place; names, shapes and values don't change.

    On a CPU, multiplying a few rows by a row-major weight, as `torch.nn.Linear` stores it, takes up to five times as
    long. Other devices don't benefit, and an embedding reads whole rows, so a tied head is left unchanged.
    """
    if model.device.type != "cpu":
        return
    embedding = model.get_input_embeddings().weight
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.weight is not embedding:
            module.weight.data = module.weight.data.t().contiguous().t()
