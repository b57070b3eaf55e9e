"""The table of families in docs/models.md: tiny random models of every causal family of transformers.

    sluice bench families > families.md

Rows are longer than every window and than the original positions. A column is a function of a config that returns why
not, or None: to add one, add it to `COLUMNS`.
"""

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.command import Benchmark, Report, choose, option
from infra.checkpoints.model import write_model_folder
from infra.checkpoints.state import policy_tensors, restore_policy
from infra.checkpoints.store import CheckpointStore
from infra.engines.families import engine_fault
from infra.models.assets import save_assets
from infra.models.load import describe_adapter, empty_policy
from infra.models.weights import load_weights
from rl_core.scoring import Structure, check_structure
from rl_core.scoring.miniature import build_miniature
from schemas.config.model import LoraConfig, ModelConfig
from schemas.errors import describe
from tests.support.families import write_dtype

logger = logging.getLogger(__name__)

ANY_LENGTH = 10**9
_MERGED_TOLERANCE = 1e-3  # of logits: W + s B A rounds otherwise than W x + s B (A x)
WITHOUT_DEFAULTS = {"musicgen", "musicgen_melody"}  # their configs are of several models
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
    "ple_layer_ids": [2],
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}  # sections of a tiny head
# What the defaults of a config's class leave out, but released models have.
OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "bert-generation": {"is_decoder": True},
    "cohere_compass_text": {
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 10,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "deepseek_v2": {"n_group": 2, "topk_group": 1, "topk_method": "greedy", "num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "falcon_h1": {"lm_head_multiplier": 0.04},
    "gemma2": {"attn_logit_softcapping": 50.0},
    "granitemoehybrid": {"layer_types": [*["mamba"] * 3, "attention"] * 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hyperclovax": {"logits_scaling": 0.1},
    "lfm2": {"full_attn_idxs": [2, 5]},
    "lfm2_moe": {"layer_types": [*["conv"] * 2, "full_attention", "conv"] * 8},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse"] * 60},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "phimoe": {"sliding_window": 2047},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "xlm": {"causal": True},
}


@dataclass(frozen=True)
class Family:
    """A family, by a config of its own class."""

    config: PretrainedConfig  # it has the sizes of a released model, of which only tiny ones are made

    @cached_property
    def structure(self) -> Structure | None:
        """What can't score it."""
        return check_structure(self.config, ANY_LENGTH)


def checkpoint_fault(family: Family) -> str | None:
    """Return why a family can't be trained, saved, restored and exported as transformers saves it; None: it can."""
    with tempfile.TemporaryDirectory() as folder:
        config, store = _write_base(family, Path(folder)), CheckpointStore(f"{folder}/policy")
        policy = _load_policy(config)
        _save(store, config, policy, _train(policy, lr=0.0))
        again = _load_policy(config)
        restore_policy(store, 1, again, torch.optim.AdamW(_trained(again)))
        write_model_folder(store, 1, Path(folder, "out"))
        own = AutoModelForCausalLM.from_pretrained(config.path, dtype="auto")
        own.save_pretrained(f"{folder}/own")
        found, expected = (_weights_in(Path(folder, name)) for name in ("out", "own"))
        kinds = [{name: (value.dtype, value.shape) for name, value in each.items()} for each in (found, expected)]
        if kinds[0] != kinds[1]:
            return "an export has other tensors than transformers saves"
        changed = [name for name in found if not torch.equal(found[name], expected[name])]
        return f"an export changes {changed[0]}" if changed else None


def adapter_fault(family: Family) -> str | None:
    """Return why adapters on all of a family's linear layers can't be trained and merged; None: they can."""
    with tempfile.TemporaryDirectory() as folder:
        config = _write_base(family, Path(folder)).replace(lora=LoraConfig(rank=2))
        store, policy = CheckpointStore(f"{folder}/policy"), _load_policy(config)
        for _ in range(2):  # the first changes B only, as B is zero
            optimizer = _train(policy, lr=0.05)
        _save(store, config, policy, optimizer)
        write_model_folder(store, 1, Path(folder, "out"), torch.float32)
        exported = AutoModelForCausalLM.from_pretrained(f"{folder}/out", dtype=torch.float32).eval()
        with torch.no_grad():
            difference = (_logits(exported) - _logits(policy)).abs().max().item()
        return f"merged adapters change the logits by {difference:g}" if difference > _MERGED_TOLERANCE else None


def _write_base(family: Family, folder: Path) -> ModelConfig:
    """Write a tiny model whose config is in bfloat16 and whose weights are in float32, none of them zero."""
    model = build_miniature(family.config, ANY_LENGTH)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.01 * torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0)))
    model.save_pretrained(folder / "base")
    # Whoever loads it gets the constants that its code sets (Zaya's last bias), so the folder has these as well.
    AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).save_pretrained(folder / "base")
    write_dtype(folder / "base" / "config.json", "bfloat16")
    return ModelConfig(path=str(folder / "base"))


def _load_policy(config: ModelConfig) -> PreTrainedModel:
    model = empty_policy(config)
    load_weights(model, config.path, torch.device("cpu"))
    return model


def _trained(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def _logits(model: PreTrainedModel) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.arange(3, 15)[None], use_cache=False).logits
    return logits


def _train(model: PreTrainedModel, lr: float) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(_trained(model), lr=lr)
    _logits(model).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _save(
    store: CheckpointStore, config: ModelConfig, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> None:
    tensors, assets = policy_tensors(model, optimizer), partial(save_assets, config)
    adapter = describe_adapter(config)
    store.save(1, tensors, num_updates=1, report=None, adapter=adapter, write_assets=assets).wait()


def _weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def _reason(check: Callable[[Family], str | None], family: Family) -> str | None:
    """Return what a check returns, or its error."""
    try:
        return check(family)
    except Exception as error:  # noqa: BLE001 - of any type, as families have code of their own
        return describe(error)


def _run(family: Family) -> None:
    """Run a tiny model of a family."""
    _logits(build_miniature(family.config, ANY_LENGTH))


COLUMNS: dict[str, Callable[[Family], str | None]] = {
    "packed": lambda family: family.structure and family.structure.packed,
    "padded": lambda family: family.structure and family.structure.padded,
    "embedded engine": lambda family: engine_fault(family.config, ANY_LENGTH),
    "checkpoint, export": checkpoint_fault,
    "LoRA": adapter_fault,
}


@dataclass(frozen=True)
class Plan:
    """Which families."""

    families: tuple[str, ...] = option((), "comma-separated model types; default: all that transformers has")


def rows(names: Iterable[str]) -> Iterator[tuple[str, list[str | None]]]:
    """Yield each family that a tiny model can be made of, and why it can't be used in the way of each column."""
    for name in names:
        family = Family(CONFIG_MAPPING[name](**OPTIONS.get(name, {})))
        if family.structure is None:
            logger.info("%s: left out, as no tiny model of it runs: %s", name, _reason(_run, family))
        else:
            yield name, [_reason(column, family) for column in COLUMNS.values()]


def measure(plan: Plan) -> Report:
    """Return why each family can't be used in the way of each column, None: it can; progress goes to the log."""
    transformers.logging.set_verbosity_error()
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - WITHOUT_DEFAULTS
    choose("families", plan.families, sorted(known))
    report: Report = {}
    for family, reasons in rows(sorted(plan.families or known)):
        report[family] = dict(zip(COLUMNS, reasons, strict=True))
        for column, reason in report[family].items():
            if reason is not None:
                logger.info("%s, %s: %s", family, column, reason)
    return report


def render(report: Report) -> str:
    """Return the table in Markdown, of the families that can be scored at all."""
    lines = [f"| family | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for family, reasons in report.items():
        if None in (reasons["packed"], reasons["padded"]):
            cells = ("yes" if reason is None else "no" for reason in reasons.values())
            lines.append(f"| `{family}` | {' | '.join(cells)} |")
    return "\n".join(lines)


BENCHMARK = Benchmark(Plan(), Plan(families=("llama",)), measure, render)
