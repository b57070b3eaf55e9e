"""Every built-in config loads, and those named after a method are that method."""

from pathlib import Path
from typing import Any

import pytest

from flows.configs import CONFIGS
from schemas.config.load import load_config
from schemas.config.run import RunConfig

# What tells the methods apart, by the papers; a field that a kind lacks is not listed.
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {
        "advantage.kind": "grpo",
        "loss.kind": "clipped",
        "loss.aggregation": "seq_mean_token_mean",
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.2,
        "kl.coef": 0.04,
        "kl.estimator": "k3",
        "kl.in_reward": False,
        "rollout.samples_per_prompt": 64,
        "rollout.dynamic_sampling": None,
        "overlong.buffer_tokens": 0,
        "optim.updates_per_step": 1,
    },
    "dr_grpo": {
        "advantage.kind": "dr_grpo",
        "loss.kind": "clipped",
        "loss.aggregation": "seq_mean_token_sum_norm",
        "loss.norm_tokens": None,
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.2,
        "kl.coef": 0.0,
        "rollout.samples_per_prompt": 8,
        "rollout.max_response_tokens": 3000,
        "rollout.dynamic_sampling": None,
        "overlong.buffer_tokens": 0,
    },
    "dapo": {
        "advantage.kind": "grpo",
        "loss.kind": "clipped",
        "loss.aggregation": "token_mean",
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.28,
        "kl.coef": 0.0,
        "rollout.samples_per_prompt": 16,
        "rollout.max_response_tokens": 20480,
        "rollout.dynamic_sampling.max_rounds": 10,
        "overlong.buffer_tokens": 4096,
        "overlong.penalty": 0.5,
        "overlong.mask_truncated": False,
        "optim.updates_per_step": 16,
    },
    "rloo": {
        "advantage.kind": "rloo",
        "loss.kind": "clipped",
        "loss.aggregation": "seq_mean_token_sum",
        "kl.coef": 0.03,
        "kl.estimator": "k1",
        "kl.in_reward": True,
        "rollout.samples_per_prompt": 4,
        "rollout.dynamic_sampling": None,
        "optim.updates_per_step": 1,
    },
    "gspo": {
        "advantage.kind": "grpo",
        "loss.kind": "gspo",
        "loss.aggregation": "seq_mean_token_mean",
        "loss.clip_low": 3e-4,
        "loss.clip_high": 4e-4,
        "kl.coef": 0.0,
        "rollout.dynamic_sampling": None,
        "optim.updates_per_step": 4,
    },
    "cispo": {
        "advantage.kind": "grpo",
        "loss.kind": "cispo",
        "loss.aggregation": "token_mean",
        "loss.clip_low": 1.0,
        "kl.coef": 0.0,
        "rollout.dynamic_sampling.max_rounds": 10,
        "overlong.buffer_tokens": 1024,
        "optim.updates_per_step": 16,
    },
}


def field(config: RunConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def test_every_method_is_compared() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml") if not path.stem.startswith("demo")} == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_one_file_is_one_method(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.toml")
    assert {path: field(config, path) for path in METHODS[name]} == METHODS[name]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_longest_sample_fits_a_micro_batch_and_the_overlong_buffer_a_response(path: Path) -> None:
    config = load_config(path)
    if config.sft is not None:
        longest, rows = config.sft.max_tokens, config.sft.num_rows
    else:
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        rows = config.rollout.num_prompts * config.rollout.samples_per_prompt
    assert longest <= config.packing.token_budget
    assert config.overlong.buffer_tokens <= config.rollout.max_response_tokens
    assert rows % config.optim.updates_per_step == 0
