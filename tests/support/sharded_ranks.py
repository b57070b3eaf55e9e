"""Ranks of a sharded policy in processes of their own: what they hold while loading, and the gradient of one update.

`python -m tests.support.sharded_ranks FOLDER CASES` runs every case, a JSON object of `Case`, and leaves in FOLDER the
gradient, the new weights and rank 0's log-probs as `<name>.safetensors`, and what each rank measured as
`<name>-<rank>.json`.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # otherwise the optimizer imports it, in every process
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface

from infra.models.load import empty_policy
from infra.models.weights import load_weights
from rl_core.planning import plan_forward, plan_step
from rl_core.scoring import PACKED_ATTENTION, register
from rl_core.scoring.attention import packed_attention
from rl_core.training import ScoringModule, Trainer, optimizer, score_rows, shard
from rl_core.training.sharding import full_tensor, make_mesh
from schemas.config.run import RunConfig
from tests.support.configs import run_config
from tests.support.measured_memory import ENVIRONMENT, packed_rows, reset_peak, status_bytes
from tests.support.policies import load_policy

CPU = torch.device("cpu")
PROMPT_TOKENS = 9  # of a row whose memory is measured; two rows fill a micro-batch
NUM_EXPERTS = 4  # of a model that replays its routers
PROMPTS, RESPONSES = (3, 3, 5, 5, 2, 2, 6, 6), (9, 4, 12, 7, 3, 8, 11, 6)
SAMPLES = 2  # of the same prompt


@dataclass(frozen=True)
class Case:
    """One run of some ranks."""

    name: str
    model: str  # folder
    num_ranks: int
    sections: dict[str, Any] = field(default_factory=dict)
    token_budget: int = 64
    part_bytes: int | None = None  # of a step whose moments are offloaded; None: as in a run
    warm_up: str | None = None  # a tiny model, with which each rank first does all of which the memory is measured


def response_tokens(token_budget: int) -> int:
    """Return the response tokens of a row whose memory is measured."""
    return token_budget // 2 - PROMPT_TOKENS


def run_cases(folder: Path, cases: Sequence[Case]) -> None:
    """Run cases in a new process, which must succeed; what its ranks report goes to this process's own stderr."""
    command = [sys.executable, "-m", "tests.support.sharded_ranks", str(folder), json.dumps([asdict(c) for c in cases])]
    subprocess.run(command, env=os.environ | ENVIRONMENT, check=True)


def _run_rank(folder: Path, case: Case, rank: int) -> None:
    config = run_config(folder, model={"path": case.model, **case.sections.get("model", {})}, **_others(case))
    store = dist.FileStore(str(folder / f"{case.name}.rendezvous"), case.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.num_ranks)
    mesh = make_mesh("cpu", case.num_ranks, config.runtime.num_policy_replicas)
    if case.part_bytes is not None:
        optimizer._PART_BYTES = case.part_bytes
    measured: dict[str, Any] = {}
    if case.warm_up is not None:
        _peaks(config.replace(model=config.model.replace(path=case.warm_up)), mesh, rank)
        measured = _peaks(config, mesh, rank)
    else:
        module = _load(config, mesh)
        with _attention_dtypes() as dtypes:
            module.probe()
        measured["attention"] = sorted(map(str, dtypes))
        tensors, measured["seconds"] = _train(config, module, mesh, rank, case)
        if rank == 0:
            save_file(tensors, folder / f"{case.name}.safetensors")
    (folder / f"{case.name}-{rank}.json").write_text(json.dumps(measured))
    dist.barrier()


def _peaks(config: RunConfig, mesh: DeviceMesh, rank: int) -> dict[str, int]:
    """Return the peak bytes of each phase, of micro-batches of equal rows, two for each rank."""
    budget, peaks = config.packing.token_budget, {}
    num_rows = 2 * 2 * mesh.size()
    prompts, responses = [PROMPT_TOKENS] * num_rows, [response_tokens(budget)] * num_rows
    sizes = {"num_ranks": mesh.size(), "token_budget": budget}
    rows, forward = packed_rows(prompts, responses), plan_forward(prompts, responses, **sizes)
    update = plan_step(prompts, responses, responses, num_updates=1, seed=0, **sizes).updates[0]
    assert update.num_micros == 2
    short = [1] * mesh.size()
    first = plan_step(short, short, short, num_updates=1, seed=0, **sizes).updates[0]
    base = reset_peak()
    module = _load(config, mesh)
    peaks["load"] = status_bytes("VmHWM") - base
    trainer = Trainer(module, config, mesh)
    trainer.update(packed_rows(short, short), first, rank)  # the optimizer's state exists from now on
    peaks["rollout"] = reset_peak() - base
    score_rows(module, rows, forward.ranks[rank])
    peaks["scoring"] = status_bytes("VmHWM") - base
    reset_peak()
    trainer.update(rows, update, rank)
    peaks["update"] = status_bytes("VmHWM") - base
    return peaks


@contextmanager
def _attention_dtypes() -> Iterator[set[torch.dtype]]:
    """Collect the dtypes of the queries, keys and values that packed attention gets."""
    found: set[torch.dtype] = set()

    def observed(module: nn.Module, *states: Tensor, **options: Any) -> Any:
        found.update(tensor.dtype for tensor in states[:3])
        return packed_attention(module, *states, **options)

    AttentionInterface.register(PACKED_ATTENTION, observed)
    try:
        yield found
    finally:
        register()


def _load(config: RunConfig, mesh: DeviceMesh) -> ScoringModule:
    model = empty_policy(config.model)
    replay = config.rollout.router_replay
    module = ScoringModule(model, config.packing, config.rollout.temperature, router_replay=replay)
    shard(module, model, mesh, config.model.dtype_on("cpu"))
    load_weights(model, config.model.path, CPU, seed=config.seed)
    return module


def _train(
    config: RunConfig, module: ScoringModule, mesh: DeviceMesh, rank: int, case: Case
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the gradient of an update and the new weights, whole, this rank's log-probs, and seconds by part."""
    experts = NUM_EXPERTS if config.rollout.router_replay else 0
    rows = packed_rows(PROMPTS, RESPONSES, experts=experts, samples=SAMPLES)
    trainer, gradient = Trainer(module, config, mesh), {}
    sizes: dict[str, Any] = {"num_ranks": case.num_ranks, "token_budget": case.token_budget}
    if config.packing.share_prompts:
        sizes["prefixes"] = np.arange(len(PROMPTS)) // SAMPLES, PROMPTS

    def keep(*_: Any) -> None:
        for name, parameter in trainer.named_parameters().items():
            gradient[f"gradient/{name}"] = full_tensor(parameter.grad).clone()

    logprobs = score_rows(module, rows, plan_forward(PROMPTS, RESPONSES, **sizes).ranks[rank])
    update = plan_step(PROMPTS, RESPONSES, RESPONSES, num_updates=1, seed=0, **sizes).updates[0]
    assert (update.num_tokens < sum(PROMPTS + RESPONSES)) == bool(config.packing.share_prompts)
    trainer.optimizer.register_step_pre_hook(keep)
    trainer.update(rows, update, rank, part=config.optim.updates_per_step - 1)
    assert all(parameter.grad is None for parameter in trainer.named_parameters().values())
    assert {tensor.dtype for tensor in gradient.values()} == {torch.float32}
    live = trainer.named_parameters().items()
    weights = {f"new/{name}": full_tensor(weight.detach()).clone() for name, weight in live}
    return gradient | weights | {"logprobs": torch.from_numpy(logprobs)}, trainer.stopwatch.take()


def _others(case: Case) -> dict[str, Any]:
    sections = {name: values for name, values in case.sections.items() if name != "model"}
    runtime = {"num_policy_ranks": case.num_ranks, **sections.pop("runtime", {})}
    optim = {"lr": 1e-3, "max_grad_norm": 1e9, **sections.pop("optim", {})}
    packing = {"token_budget": case.token_budget, **sections.pop("packing", {})}
    return {"rollout": {"max_response_tokens": 16}, "optim": optim, "runtime": runtime, "packing": packing, **sections}


def main(folder: Path, cases: list[Case]) -> None:
    """Run each case in forked processes; a fork requires that there are no threads.

    A rank that fails ends the others: they would wait for it.
    """
    for model in {case.model for case in cases}:
        load_policy(run_config(folder, model={"path": model}).model)  # what a process pays for once
    if any("lora" in case.sections.get("model", {}) for case in cases):
        import peft  # noqa: F401  as above
    for case in cases:
        running = {_fork(folder, case, rank): rank for rank in range(case.num_ranks)}
        while running:
            child, status = os.wait()
            rank = running.pop(child)
            if status:
                for other in running:
                    os.kill(other, signal.SIGKILL)
                raise SystemExit(f"{case.name}: rank {rank} ended with {os.waitstatus_to_exitcode(status)}")


def _fork(folder: Path, case: Case, rank: int) -> int:
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of a process with threads may hang"
    if child := os.fork():
        return child
    try:
        _run_rank(folder, case, rank)
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), [Case(**values) for values in json.loads(sys.argv[2])])
