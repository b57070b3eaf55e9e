"""How weights lie in memory while a model decodes."""

import torch
from transformers import PreTrainedModel


def use_decode_layout(model: PreTrainedModel) -> None:
    """Store the linear layers' weights column by column, in place; names, shapes and values stay what they are.

    A few rows times a weight stored row by row, as `torch.nn.Linear` does, takes a CPU's matrix products up to five
    times as long. Other devices don't mind, and an embedding reads whole rows, so a tied head stays as it is.
    """
    if model.device.type != "cpu":
        return
    embedding = model.get_input_embeddings().weight
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.weight is not embedding:
            module.weight.data = module.weight.data.t().contiguous().t()
