"""Whether families can be scored packed or padded, as tiny models of their configs show it beyond every limit."""

from typing import Any

import pytest
import torch
import transformers

from rl_core.scoring import check_structure, leak_probe, padded_probe, use_padded_attention
from rl_core.scoring.miniature import build_miniature
from rl_core.scoring.per_sequence import position_limit
from schemas.errors import ScoringError

ANY_LENGTH = 10**9
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 48,
    "long_factor": [1.0 + index for index in range(48)],
    "original_max_position_embeddings": 4096,
    "short_mscale": 1.2,
    "long_mscale": 1.3,
}
LONG = {"rope_parameters": LONG_ROPE, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096}


def config_of(prefix: str, **options: Any) -> transformers.PretrainedConfig:
    config: transformers.PretrainedConfig = getattr(transformers, f"{prefix}Config")(**options)
    return config


@pytest.mark.parametrize(
    "config",
    [
        config_of("Qwen2Moe", use_sliding_window=True, sliding_window=4096, max_window_layers=1),
        config_of("Phimoe", sliding_window=2047),
        config_of("Gemma2"),
        config_of("GptOss"),
        config_of("Qwen3_5Text"),
        config_of("Phi3", **LONG),
        config_of("Phimoe", **LONG),
    ],
    ids=lambda config: config.model_type,
)
def test_windows_and_positions_beyond_their_limit_are_scored(config: transformers.PretrainedConfig) -> None:
    structure = check_structure(config, ANY_LENGTH)
    assert structure is not None
    assert structure.packed is None
    assert structure.padded is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of("MiniMaxM3VLText", layer_types=["minimax_m3_sparse"] * 60), "needs block_indices"),
        (config_of("Llama4Text"), "not only causal or a sliding window: local_size"),
        (config_of("Bloom"), "uses attention 'eager' of its own"),
        (config_of("StableLm"), "got no cu_seqlens"),
        (config_of("Mamba"), "differ from those of its own forward"),
        (config_of("FalconH1", lm_head_multiplier=0.04), ""),  # by another reason in each version of transformers
        (config_of("DeepseekV4"), "can't run packed rows: RuntimeError"),
        (config_of("GlmMoeDsa"), "hides keys of its own choice in the mask"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_only_padding_scores_says_why(config: transformers.PretrainedConfig, reason: str) -> None:
    structure = check_structure(config, ANY_LENGTH)
    assert structure is not None
    assert structure.packed is not None
    assert reason in str(structure.packed)
    assert "\n" not in str(structure.packed)
    assert "rl_core" not in str(structure.packed)
    assert structure.padded is None


@pytest.mark.parametrize(
    "config", [config_of("HyperCLOVAX", logits_scaling=0.1), config_of("ModernBertDecoder")], ids=["scale", "layers"]
)
def test_an_unknown_head_is_refused_for_good(config: transformers.PretrainedConfig) -> None:
    structure = check_structure(config, ANY_LENGTH)
    assert structure is not None
    assert structure.packed == structure.padded
    assert "its logits are not only its LM head's" in str(structure.packed)


def test_a_model_that_is_not_causal_is_refused_for_good() -> None:
    config = config_of("Gemma3Text", use_bidirectional_attention=True)
    structure = check_structure(config, ANY_LENGTH)
    assert structure is not None
    assert structure.packed == structure.padded
    assert "isn't causal: log-probs depend on later tokens" in str(structure.padded)
    model = build_miniature(config, ANY_LENGTH)
    use_padded_attention(model)
    for probe in (padded_probe, leak_probe):
        with pytest.raises(ScoringError, match=r"isn't causal: changing later tokens .*; use another model$"):
            probe(model)


def test_a_limit_that_no_row_reaches_does_not_count() -> None:
    config = config_of("DeepseekV32")
    beyond, within = (check_structure(config, longest) for longest in (ANY_LENGTH, 64))
    assert beyond is not None
    assert within is not None
    assert within.padded is None
    assert beyond.padded is not None


@pytest.mark.parametrize(
    "config",
    [
        config_of("Emu3"),
        config_of("Mllama"),
        config_of("Whisper"),
        config_of("PLBart"),
        config_of("Zamba"),
    ],
    ids=lambda config: config.model_type,
)
def test_a_tiny_model_has_parts_and_layers_that_share_weights(config: transformers.PretrainedConfig) -> None:
    structure = check_structure(config, ANY_LENGTH)
    assert structure is not None
    assert structure.padded is None


def test_a_tiny_model_is_small_and_leaves_the_random_state() -> None:
    before = torch.random.get_rng_state()
    model = build_miniature(config_of("DeepseekV3"), ANY_LENGTH)
    assert torch.equal(before, torch.random.get_rng_state())
    assert sum(weight.numel() for weight in model.parameters()) < 300_000


def test_the_limit_of_positions() -> None:
    assert position_limit(config_of("Phi3", **LONG)) == 4096
    assert position_limit(config_of("Llama")) is None
