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
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from infra.models.tiny import make_model

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
