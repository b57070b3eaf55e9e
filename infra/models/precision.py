"""What keeps its own precision in a model whose weights are in bfloat16 or float16."""

import re

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def constants_to_buffers(model: PreTrainedModel) -> None:
    """Make buffers of the parameters that a model freezes itself, e.g. its routers' biases.

    As parameters they would be gathered, and so rounded, in the compute dtype; buffers of the same name keep their own.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.detach())


@torch.no_grad()
def cast_model(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast a model's weights in place, as transformers does when it loads them in that dtype: some stay in float32.

    These are those that its class declares, and those that its code makes in float32 in a model of any dtype.
    """
    kept = _float32_names(model, dtype)
    with torch.device("meta"):
        loaded = AutoModelForCausalLM.from_config(model.config, dtype=dtype).state_dict()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not (kept and kept.search(name)):
            tensor.data = tensor.data.to(loaded[name].dtype)


def _float32_names(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Return what the names of tensors contain that stay in float32, which a model's class declares."""
    declared: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        declared |= set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        declared |= set(model._keep_in_fp32_modules or ())
    return re.compile("|".join(re.escape(part).replace(r"\*", ".*") for part in sorted(declared))) if declared else None
