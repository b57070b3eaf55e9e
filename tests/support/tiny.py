"""A tiny Hugging Face model folder and a tiny prompt file, for tests."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from infra.models.tiny import make_model, make_tokenizer

END = "<|end|>"


def make_tiny_model(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a Qwen3-architecture folder (about 12,000 parameters, fp32, random weights) and return it.

    Args:
        folder: Where to write; made if it isn't there.
        seed: Seed of the weights.
        **overrides: Fields of `Qwen3Config` that differ from the tiny ones.
    """
    fields: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,  # far from uniform, so that greedy paths don't hang on rounding
    }
    return make_model(folder, seed=seed, **{**fields, **overrides})


def make_tiny_reward_model(folder: Path) -> Path:
    """Write a Qwen3-architecture folder for sequence classification with one label, and return it."""
    make_tiny_model(folder)
    fields = json.loads((folder / "config.json").read_text())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen3Config(**{**fields, "architectures": None, "num_labels": 1})
        Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return folder


def make_tiny_judge(folder: Path, *, cut: str = "", head_dim: int = 8) -> Path:
    """Write a judge without randomness, and return its folder: its answer depends on a question's last byte alone.

    The answer is that byte's digit, the remainder of its position in the vocabulary by 10, and then the end of the
    turn. To a byte of `cut`, it answers digits without an end. Attention and MLP add nothing to the embeddings, which
    are one-hot, and the head maps each token to the next one.
    """
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ '<|user|>' + message['content'] }}{% endfor %}"
    size = 272
    make_tiny_model(
        folder,
        tokenizer=tokenizer,
        hidden_size=size,
        num_hidden_layers=1,
        head_dim=head_dim,
        tie_word_embeddings=False,
        max_position_embeddings=2048,
    )
    model = Qwen3ForCausalLM.from_pretrained(folder)
    digits, end = tokenizer.convert_tokens_to_ids([*"0123456789"]), tokenizer.eos_token_id
    following = [end if token in digits else digits[token % 10] for token in range(len(tokenizer))]
    for byte in tokenizer.convert_tokens_to_ids([*cut]):
        following[byte] = byte
    with torch.no_grad():
        for weight in (model.model.layers[0].self_attn.o_proj.weight, model.model.layers[0].mlp.down_proj.weight):
            weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), size))
        model.lm_head.weight.zero_()
        for token, after in enumerate(following):
            model.lm_head.weight[after, token] = 1.0
    model.save_pretrained(folder)
    return folder


def make_tiny_moe(folder: Path, *, num_experts: int = 4) -> Path:
    """Write a Qwen3-MoE folder of two layers, whose tokens are routed to two experts, and return it."""
    make_tiny_model(folder)
    dense = json.loads((folder / "config.json").read_text())
    sizes = {name: value for name, value in dense.items() if name not in ("model_type", "architectures")}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen3MoeConfig(**sizes, num_experts=num_experts, num_experts_per_tok=2, moe_intermediate_size=16)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_row(
    index: int, *, data_source: str = "tiny", prompt: str | None = None, answer: str | None = None
) -> dict[str, Any]:
    """One row in verl's columns: the sum `index + 1`."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": f"{index} + 1 =" if prompt is None else prompt}],
        "reward_model": {"style": "rule", "ground_truth": str(index + 1) if answer is None else answer},
        "extra_info": {"index": index, "split": "train"},
    }


def make_tiny_data(path: Path, n: int, *, row: Callable[[int], dict[str, Any]] = tiny_row) -> Path:
    """Write `n` rows in verl's columns as Parquet, or as JSONL by the name's ending, and return the path."""
    return write_rows(path, [row(index) for index in range(n)])


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write `rows` as they are, as Parquet or JSONL by the name's ending, and return the path."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path
