"""The table of families in docs/models.md: tiny random models of every causal family of transformers.

    python -m benchmarks.families > families.md

Rows are longer than every window and than the original positions. A column is a function of a config that returns why
not, or None: to add one, add it to `COLUMNS`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from infra.engines.embedded.structure import engine_fault
from rl_core.scoring import Structure, check_structure

ANY_LENGTH = 10**9
WITHOUT_DEFAULTS = {"musicgen", "musicgen_melody"}  # their configs are of several models
# What the defaults of a config's class leave out, but released models have.
OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": {"n_group": 2, "topk_group": 1, "topk_method": "greedy"},
    "falcon_h1": {"lm_head_multiplier": 0.04},
    "gemma2": {"attn_logit_softcapping": 50.0},
    "granitemoehybrid": {"layer_types": [*["mamba"] * 3, "attention"] * 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hyperclovax": {"logits_scaling": 0.1},
    "lfm2": {"full_attn_idxs": [2, 5]},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse"] * 60},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128},
    "phimoe": {"sliding_window": 2047},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 1},
}


@dataclass(frozen=True)
class Family:
    """A family, by a config of its own class.

    Attributes:
        config: It has the sizes of a released model, of which only tiny ones are made.
    """

    config: PretrainedConfig

    @cached_property
    def structure(self) -> Structure | None:
        """What can't score it."""
        return check_structure(self.config, ANY_LENGTH)


COLUMNS: dict[str, Callable[[Family], str | None]] = {
    "packed": lambda family: family.structure and family.structure.packed,
    "padded": lambda family: family.structure and family.structure.padded,
    "embedded engine": lambda family: engine_fault(family.config, ANY_LENGTH),
}


def rows() -> Iterator[tuple[str, list[str | None]]]:
    """Yield each family that a tiny model can be made of, and why it can't be used in the way of each column."""
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - WITHOUT_DEFAULTS):
        family = Family(CONFIG_MAPPING[name](**OPTIONS.get(name, {})))
        if family.structure is not None:
            yield name, [column(family) for column in COLUMNS.values()]


def main() -> None:
    """Print the table in Markdown, of the families that can be scored at all."""
    transformers.logging.set_verbosity_error()
    print("| family |", " | ".join(COLUMNS), "|")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for family, reasons in rows():
        if None in reasons[:2]:
            print(f"| `{family}` |", " | ".join("yes" if reason is None else "no" for reason in reasons), "|")


if __name__ == "__main__":
    main()
