"""Activation memory without values, against what autograd saves in a forward with values."""

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from rl_core.planning.activations import trace_activations
from rl_core.scoring import use_padded_attention
from rl_core.scoring.forward import decoder
from rl_core.scoring.miniature import shrink_config
from schemas.errors import ModelError

NUM_SEQUENCES, WIDTH = 3, 20
# Families that can't be packed, each with an attention of its own.
PADDED_ONLY = ("bloom", "codegen", "gpt_neo", "gptj", "stablelm")


def build(name: str, device: str) -> PreTrainedModel:
    config = shrink_config(CONFIG_MAPPING[name](), longest=10**9)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def saved_bytes(model: PreTrainedModel) -> int:
    """Return the bytes that autograd saves in a forward of a padded batch, beyond the model's own tensors."""
    saved = {}

    def pack(tensor: torch.Tensor) -> Any:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    use_padded_attention(model)
    ids = torch.zeros(NUM_SEQUENCES, WIDTH, dtype=torch.int64)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder(model)(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.arange(WIDTH).expand_as(ids),
            use_cache=False,
        )
    own = {part.untyped_storage().data_ptr() for part in (*model.parameters(), *model.buffers())}
    return sum(storage.nbytes() for pointer, storage in saved.items() if pointer not in own)


@pytest.mark.parametrize("name", PADDED_ONLY)
def test_a_padded_batch_is_traced_with_the_models_own_attention(name: str) -> None:
    with pytest.raises(ModelError, match="packed"):
        trace_activations(build(name, "meta"), NUM_SEQUENCES * WIDTH, longest=WIDTH)
    traced = trace_activations(build(name, "meta"), NUM_SEQUENCES * WIDTH, longest=WIDTH, kind="padded")
    model = build(name, "cpu")
    assert traced.layer_input == NUM_SEQUENCES * WIDTH * 4 * model.config.hidden_size
    assert sum(traced.layers) + traced.other == pytest.approx(saved_bytes(model), rel=0.02)
