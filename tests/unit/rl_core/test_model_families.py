"""Packed, padded and plain forwards agree for every family of models that is trained packed."""

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from rl_core.scoring import explicit as explicit_module
from rl_core.scoring import leak_probe, use_packed_attention
from schemas.errors import ScoringError
from tests.support.families import DELTA_NET, EXPERTS, LATENT, WINDOWED
from tests.support.packed import SIZES, VOCAB_SIZE, random_batch
from tests.unit.rl_core.gradients import gradients, relative_error
from tests.unit.rl_core.scorers import score_packed, score_padded, score_plain

NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
# A query nearly orthogonal to its keys reads almost nothing, mostly rounding, which the layer's norm would enlarge up
# to a thousandfold (1.4e-5 was seen with two threads, in the plain forward's gradient).
STEADY_DELTA_NET = {**DELTA_NET, "rms_norm_eps": 1e-3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "phi3": ("Phi3", {"sliding_window": 4}),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {}),
    "glm4": ("Glm4", {}),
    "exaone4": ("Exaone4", WINDOWED),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "first_k_dense_replace": 2}),
    "gemma2": ("Gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **WINDOWED}),
    "gemma3": ("Gemma3Text", WINDOWED),
    "gemma4": (
        "Gemma4Text",
        {**WINDOWED, "final_logit_softcapping": 3.0, "vocab_size_per_layer_input": VOCAB_SIZE},
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWED}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"logit_scale": 0.25, **WINDOWED}),
    "granite": ("Granite", {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "qwen3_next": ("Qwen3Next", {**EXPERTS, **STEADY_DELTA_NET, "shared_expert_intermediate_size": 16}),
    "qwen3_5": ("Qwen3_5Text", STEADY_DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**EXPERTS, **STEADY_DELTA_NET, "shared_expert_intermediate_size": 16}),
}
PROMPTS, RESPONSES = [3, 3, 1, 5, 2, 1], [4, 4, 7, 0, 1, 3]  # two of equal length share a call


def make_family(name: str) -> PreTrainedModel:
    prefix, options = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **NO_TOKENS, **options})
    torch.manual_seed(0)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if name == "gpt_oss":  # its sinks start at random
        for layer in model.get_decoder().layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_padded_and_plain_agree(name: str) -> None:
    model, batch = make_family(name), random_batch(PROMPTS, RESPONSES)
    ours = score_packed(model, batch)
    our_gradients = gradients(model, (ours * ours).sum())
    plain = score_plain(model, batch, attention="eager")
    plain_gradients = gradients(model, (plain * plain).sum())
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)
    assert relative_error(our_gradients, plain_gradients) < 1e-5
    torch.testing.assert_close(score_padded(model, batch), plain, rtol=0, atol=1e-5)
    use_packed_attention(model)
    leak_probe(model)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_blocks_of_queries_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make_family(name), random_batch([3, 2], [9, 9])
    whole = score_packed(model, batch)
    whole_gradients = gradients(model, whole.sum())
    monkeypatch.setattr(explicit_module, "QUERY_TOKENS", 5)
    blocks = score_packed(model, batch)
    rounding = 3e-6  # a block's matrices may be multiplied by another kernel; 1.2e-6 was seen on an AMD processor
    torch.testing.assert_close(blocks, whole, rtol=0, atol=rounding)
    assert relative_error(gradients(model, blocks.sum()), whole_gradients) < rounding


def test_a_dummy_row_runs_and_gives_zero_gradients() -> None:
    model = make_family("qwen3_next")
    assert not any(gradient.any() for gradient in gradients(model, score_packed(model, random_batch([], [])).sum()))


def test_a_model_that_can_not_run_packed_rows_is_refused() -> None:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    config = transformers.MambaConfig(**sizes, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    model = transformers.MambaForCausalLM(config).eval()
    use_packed_attention(model)
    with pytest.raises(ScoringError, match=r'set packing\.kind = "padded"'):
        leak_probe(model)
