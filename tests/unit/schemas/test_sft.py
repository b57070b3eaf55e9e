"""The config of supervised fine-tuning: what it sets by itself, and the keys that it refuses."""

import pytest

from schemas.config.load import override_config, parse_config
from schemas.config.loss import CrossEntropyLoss
from schemas.errors import ConfigError
from tests.support.configs import run_config
from tests.support.sft import sft_config


def test_a_section_is_enough() -> None:
    values = {"steps": 3, "model": {"path": "m"}, "data": {"train_path": "rows.jsonl"}, "sft": {}}
    config = parse_config(values, ["loss.aggregation=seq_mean_token_mean"], "sft.toml")
    assert config.loss == CrossEntropyLoss(aggregation="seq_mean_token_mean")
    assert not config.scores_behavior
    assert not config.needs_reference_worker
    assert config.sft is not None
    assert config.max_row_tokens == config.sft.max_tokens
    again = override_config(config, ["sft.num_rows=3"], "sft.toml")
    assert again == config.replace(sft=config.sft.replace(num_rows=3))


def test_grpo_still_needs_a_reward() -> None:
    with pytest.raises(ConfigError, match="f: missing key reward"):
        parse_config({"steps": 3, "model": {"path": "m"}, "data": {"train_path": "rows.jsonl"}}, (), "f")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("reward.kind=math", "reward"),
        ("rollout.kind=vllm", "rollout"),
        ("rollout.num_prompts=3", "rollout.num_prompts"),
        ("advantage.kind=rloo", "advantage"),
        ("kl.coef=0.1", "kl.coef"),
        ("distillation.teachers.big.path=m", "distillation"),
        ("correction.kind=truncated", "correction"),
        ("overlong.mask_truncated=true", "overlong.mask_truncated"),
        ("weights.probe=false", "weights.probe"),
        ("data.max_prompt_tokens=5", "data.max_prompt_tokens"),
        ("loss.behavior=recompute", "loss.behavior"),
        ("eval.samples_per_prompt=1 eval.temperature=1.0", "eval.temperature"),
        ("runtime.placement=colocated", "runtime.placement"),
    ],
)
def test_keys_without_a_meaning_are_refused(override: str, named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        override_config(sft_config(), override.split(), "sft.toml")
    assert f"[sft], supervised fine-tuning, doesn't use {named}; leave it out" in str(raised.value)


def test_keys_of_the_evaluation_that_have_one_are_not() -> None:
    config = override_config(sft_config(), ["eval.every_steps=2", "eval.num_prompts=3"], "sft.toml")
    assert config.eval.every_steps == 2


def test_loss_and_section_belong_together() -> None:
    with pytest.raises(ConfigError, match=r"\[sft\] trains with loss.kind = \"cross_entropy\", not \"gspo\""):
        override_config(sft_config(), ["loss.kind=gspo"], "sft.toml")
    with pytest.raises(ConfigError, match=r"cross_entropy\" trains on the rows of a data set; add a section \[sft\]"):
        override_config(run_config(), ["loss.kind=cross_entropy"], "grpo.toml")
    with pytest.raises(ConfigError, match=r"needs loss.norm_tokens with \[sft\]"):
        override_config(sft_config(), ["loss.aggregation=seq_mean_token_sum_norm"], "sft.toml")
