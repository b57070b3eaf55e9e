"""Two ranks that save checkpoints or load a model, and the peak memory of exports, in processes of their own.

Run as `python -m tests.support.two_ranks`; see `save_by_ranks`, `load_by_ranks` and `peaks_of_exports`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from infra.checkpoints import model as exports
from infra.checkpoints.state import model_tensors, policy_tensors
from infra.checkpoints.store import CheckpointStore
from infra.models.assets import save_assets
from infra.models.files import ModelFiles
from infra.models.load import build_model, cast_model, describe_adapter, empty_model, load_model
from infra.models.lora import add_adapter, has_adapter
from infra.models.weights import load_weights
from schemas.config.model import ModelConfig
from tests.support.checkpoint_processes import group, join, run_forked
from tests.support.measured_memory import ENVIRONMENT, reset_peak, status_bytes
from tests.support.policies import load_policy

IDS = torch.arange(40, 60)[None]


def save_by_ranks(configs: Mapping[Path, ModelConfig]) -> None:
    """Have two ranks train models a little, and save each as version 1 in a folder that isn't there yet."""
    _run("save", *chain(*((str(folder), config.model_dump_json()) for folder, config in configs.items())))


def load_by_ranks(config: ModelConfig, folder: Path) -> list[list[str]]:
    """Have two ranks load a model, and compare their shards with the whole one; return the experts that each read."""
    _run("load", config.model_dump_json(), str(folder))
    return [json.loads((folder / f"read-{rank}.json").read_text()) for rank in range(2)]


def peaks_of_exports(folders: Sequence[Path], shard_bytes: int) -> list[int]:
    """Export version 1 of checkpoints in a process of its own; return each peak of resident memory, above before it."""
    printed = _run("peaks", str(shard_bytes), *map(str, folders))
    return list(map(int, printed.splitlines()[-1].split()))


def save_whole(store: CheckpointStore, out: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    """Save version 1 by transformers, of a model that is in memory as a whole."""
    adapter = store.read_manifest(1).adapter
    with store.assets(1) as assets:
        model = load_model(ModelConfig(path=adapter.base_model)) if adapter else build_model(assets)
    if adapter:
        add_adapter(model, adapter.lora)
    store.load(1, model_tensors(model))
    if has_adapter(model):
        for name, layer in [each for each in model.named_modules() if hasattr(each[1], "get_delta_weight")]:
            layer.merge()
            model.set_submodule(name, layer.get_base_layer())
        del model.peft_config
    cast_model(model, dtype)
    model.save_pretrained(out, max_shard_size=shard_bytes)


def _run(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.support.two_ranks", *arguments]
    environment = {**os.environ, **ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _be_rank(rank: int, config: ModelConfig, folder: Path) -> None:
    join(rank, 2, folder.with_suffix(".rendezvous"))
    model = load_policy(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.01)
    for _ in range(2):
        model(IDS, use_cache=False).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    save(config, folder, model, optimizer, group())


def _load(rank: int, config: ModelConfig, folder: Path) -> None:
    join(rank, 2, folder / "rendezvous")
    model, read, own = empty_model(config), list[str](), ModelFiles.read
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)

    def noted(files: ModelFiles, name: str, *rows: int) -> torch.Tensor:
        read.append(name)
        return own(files, name, *rows)

    ModelFiles.read = noted  # type: ignore[method-assign]
    load_weights(model, config.path, torch.device("cpu"))
    ModelFiles.read = own  # type: ignore[method-assign]
    whole = dict(load_model(config).named_parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(weight.full_tensor(), whole[name]), name
    (folder / f"read-{rank}.json").write_text(json.dumps(sorted(read)))


def save(
    config: ModelConfig,
    folder: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    ranks: ProcessGroup | None = None,
) -> None:
    """Save version 1."""
    CheckpointStore(str(folder)).save(
        1,
        policy_tensors(model, optimizer),
        num_updates=1,
        report=None,
        adapter=describe_adapter(config),
        write_assets=partial(save_assets, config),
        process_group=ranks,
    ).wait()


def _peak(folder: Path, shard_bytes: int) -> int:
    exports.SHARD_BYTES = shard_bytes
    base = reset_peak()
    exports.write_model_folder(CheckpointStore(str(folder)), 1, folder.with_suffix(".out"), torch.bfloat16)
    return status_bytes("VmHWM") - base


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *given = sys.argv[1:]
    if what == "save":
        for place, config in zip(given[::2], given[1::2], strict=True):
            model = ModelConfig.model_validate_json(config)
            run_forked([partial(_be_rank, rank, model, Path(place)) for rank in range(2)])
    elif what == "load":
        model = ModelConfig.model_validate_json(given[0])
        run_forked([partial(_load, rank, model, Path(given[1])) for rank in range(2)])
    else:
        print(*(_peak(Path(place), int(given[0])) for place in given[1:]))
