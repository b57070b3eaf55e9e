"""The run configs of tests: one small base, and the fields in which a test's run differs from it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schemas.config.kinds import configs_of, kind_of
from schemas.config.run import RunConfig


def kinds_of(union: object) -> tuple[str, ...]:
    """Return the kinds of a union alias such as `AdvantageConfig`, in order."""
    return tuple(map(kind_of, configs_of(union)))


def run_config(folder: Path = Path(), **overrides: object) -> RunConfig:
    """Return the config of a small run.

    Args:
        folder: Folder of the model (`model`), the prompts (`train.parquet`) and the run directories (`runs`).
        **overrides: Fields of the config; a dict replaces only the keys of its section that it names.
    """
    return RunConfig.model_validate(merge(_base(folder), overrides))


def placed_config(
    folder: Path,
    *,
    ranks: int = 1,
    rollout: int = 1,
    tensor_parallel: int = 1,
    reference: int = 0,
    timeouts: Mapping[str, float] | None = None,
    **runtime: Any,
) -> RunConfig:
    """Return the config of a run with vLLM engines and these numbers of workers and GPUs of each engine."""
    return run_config(
        folder,
        kl={"coef": 0.1} if reference else {},
        rollout={"kind": "vllm", "num_workers": rollout, "tensor_parallel": tensor_parallel},
        runtime={"num_policy_ranks": ranks, "num_reference_ranks": max(reference, 1), **runtime},
        timeouts=dict(timeouts or {}),
    )


def config_toml(**overrides: object) -> str:
    """Return the same config as TOML, for a run in the working directory."""
    lines = []
    for name, value in merge(_base(Path()), overrides).items():
        section = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        lines += [f"{key} = {json.dumps(item)}\n" for key, item in section.items()]
    return "".join(lines)


def merge(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with `overrides`; the keys of a section in both are merged."""
    merged = dict(fields)
    for name, value in overrides.items():
        section = merged.get(name)
        merged[name] = section | value if isinstance(section, dict) and isinstance(value, dict) else value
    return merged


def _base(folder: Path) -> dict[str, Any]:
    return {
        "steps": 4,
        "model": {"path": str(folder / "model")},
        "data": {"train_path": str(folder / "train.parquet")},
        "reward": {"kind": "exact"},
        "runtime": {"runs_dir": str(folder / "runs"), "num_threads": 1},
    }
