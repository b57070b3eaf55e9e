"""Families that plan refuses, or that the embedded engine runs, beyond their limits and with unequal rows."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from infra.engines.embedded.cache import cache_bytes_per_token
from infra.engines.families import branch_fault, check_family, engine_fault, with_sharing
from rl_core.planning.throughput import ModelWork
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, ModelError
from tests.support.configs import run_config

ANY_LENGTH = 10**9
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 128,
}


def config_of(prefix: str, **options: Any) -> transformers.PretrainedConfig:
    config: transformers.PretrainedConfig = getattr(transformers, f"{prefix}Config")(**options)
    return config


@pytest.mark.parametrize(
    "config",
    [
        config_of("Gemma2", attn_logit_softcapping=2.0),
        config_of("VaultGemma", attn_logit_softcapping=2.0),
        config_of("GptOss"),
        config_of("GraniteSWA"),
        config_of("Gemma4Text"),
        config_of("Qwen2Moe", use_sliding_window=True, sliding_window=4096, max_window_layers=1),
        config_of("Qwen3_5Text"),
        config_of("Qwen3Next"),
        config_of("Bamba", attn_layer_indices=[1, 3]),
        config_of("NemotronH"),
        config_of("FalconH1"),
        config_of("Lfm2", full_attn_idxs=[2, 5]),
        config_of("Mamba2"),
    ],
    ids=lambda config: config.model_type,
)
def test_the_embedded_engine_samples_from_the_models_own_function(config: transformers.PretrainedConfig) -> None:
    assert engine_fault(config, ANY_LENGTH) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of("DeepseekV32"), "DeepseekV32Attention needs indices"),
        (config_of("MiniMaxM3VLText", layer_types=["minimax_m3_sparse"] * 60), "needs block_indices"),
        (config_of("MiniMax"), "can't run the embedded engine: ValueError: MiniMax uses cache of its own"),
        (config_of("RecurrentGemma"), ""),  # by another reason in each version of transformers
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_the_embedded_engine_can_not_run_says_why(config: transformers.PretrainedConfig, reason: str) -> None:
    fault = engine_fault(config, ANY_LENGTH)
    assert fault is not None
    assert reason in str(fault)


def run_of(folder: Path, config: transformers.PretrainedConfig, **overrides: Any) -> RunConfig:
    config.save_pretrained(folder / "model")
    return run_config(folder, data={"max_prompt_tokens": 100}, **overrides)


def test_a_family_that_only_padding_scores_is_refused_with_advice_that_works(tmp_path: Path) -> None:
    config = run_of(tmp_path, config_of("Bamba", attn_layer_indices=[1, 3]))
    with pytest.raises(ModelError, match=r"a bamba model can't be scored in packed rows: .* packing\.kind = .padded."):
        check_family(config)
    check_family(config.replace(packing=config.packing.replace(kind="padded")))


def test_a_family_that_nothing_scores_or_samples_is_refused(tmp_path: Path) -> None:
    config = run_of(tmp_path, config_of("HyperCLOVAX", logits_scaling=0.1))
    with pytest.raises(
        ModelError, match=r"can't be scored in packed rows: its logits .*; use a model of another family"
    ):
        check_family(config)


def test_an_engine_of_another_function_is_refused(tmp_path: Path) -> None:
    config = run_of(tmp_path, config_of("DeepseekV32"), packing={"kind": "padded"})
    with pytest.raises(ModelError, match=r'needs indices, .*; set rollout\.kind = "vllm"'):
        check_family(config)


def test_rows_with_other_positions_than_their_first_tokens_had_are_refused(tmp_path: Path) -> None:
    phi = config_of(
        "Phi3", rope_parameters=LONG_ROPE, original_max_position_embeddings=128, max_position_embeddings=4096
    )
    check_family(run_of(tmp_path, phi, rollout={"max_response_tokens": 28}))
    with pytest.raises(
        ConfigError, match=r"rows of 129 tokens, but a phi3 model .* more than 128 .* limit both to 128"
    ):
        check_family(run_config(tmp_path, data={"max_prompt_tokens": 100}, rollout={"max_response_tokens": 29}))


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("Qwen3", {}, None),
        ("Gemma2", {"packing": {"share_prompts": True}}, None),
        ("Qwen3", {"environment": {"kind": "tools", "tools": ["json:loads"]}}, None),
        ("Qwen3", {"packing": {"share_prompts": False}}, "packing.share_prompts is false"),
        ("Qwen3", {"packing": {"kind": "padded"}}, 'packing.kind is "padded"'),
        ("Qwen3Moe", {"rollout": {"router_replay": True}}, None),
        ("Qwen3", {"environment": {"kind": "class", "path": "json:loads"}}, None),
        ("Qwen3_5Text", {}, "a qwen3_5_text model: .* recurrent layers"),
        ("Mamba2", {}, "a mamba2 model: "),
    ],
)
def test_samples_share_prompts_where_family_and_settings_can(
    family: str, overrides: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    config = run_of(tmp_path, config_of(family), **overrides)
    decided, line = with_sharing(config)
    assert decided.packing.share_prompts is (reason is None)
    assert decided == config.replace(packing=config.packing.replace(share_prompts=reason is None))
    if reason is None:
        assert line == "a prompt is computed once for its samples in a micro-batch (packing.share_prompts)"
        return
    assert re.fullmatch(f"each sample's prompt is computed for itself: {reason}.*", line)
    if config.packing.share_prompts is None:
        asked = config.replace(packing=config.packing.replace(share_prompts=True))
        with pytest.raises(ConfigError, match=f"samples can't share a prompt: {reason}.*; leave it out"):
            with_sharing(asked)


PROGRAM = {"environment": {"kind": "program", "command": ["agent"]}, "reward": {"kind": "environment"}}


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("Qwen3", {}, None),
        ("Gemma2", {"packing": {"share_prompts": False}}, None),
        ("Qwen3", {"packing": {"kind": "padded"}}, 'packing.kind is "padded"'),
        ("Qwen3_5Text", {}, "a qwen3_5_text model: .* recurrent layers"),
    ],
)
def test_why_trajectories_cannot_branch_is_said_before_they_do(
    family: str, overrides: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    config = run_of(tmp_path, config_of(family), **PROGRAM, **overrides)
    assert (branch_fault(config) is None) == (reason is None)
    said = with_sharing(config)[1].partition("; a trajectory that branches fails, as ")[2]
    assert re.match(reason or "$", said)


def test_sizes_of_layers_that_differ() -> None:
    config = config_of("Gemma4Text", global_head_dim=512, head_dim=256, num_key_value_heads=1, num_hidden_layers=6)
    widths = [layer.head_dim * layer.num_key_value_heads for layer in config.per_layer_config]
    assert set(widths) == {256, 512}
    assert cache_bytes_per_token(config, torch.float32) == 4 * 2 * sum(widths)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    heads = [layer.head_dim * layer.num_attention_heads for layer in config.per_layer_config]
    assert ModelWork.of(model).attention_width == sum(heads)
    assert cache_bytes_per_token(config_of("Mamba"), torch.float32) == 0
