"""The host memory of a planned run's fullest node."""

from collections.abc import Mapping

from pydantic import NonNegativeInt

from flows.plan.footprint import Footprint
from flows.plan.workers import ModelMemory, Placement, WorkerMemory, bucket_bytes, engine_weight_bytes, weight_carrier
from infra.checkpoints.writing import FILE_BYTES
from infra.workers.layout import Role
from rl_core.planning.memory import PHASES, Phase, PhaseBytes
from schemas.base import Frozen
from schemas.catalog import column_spec
from schemas.config.run import RunConfig

PROCESS_BYTES = 512 * 2**20  # of a worker before it loads a model: measured, without CUDA
NO_BYTES = PhaseBytes(load=0, rollout=0, scoring=0, update=0, publish=0)


class HostMemory(Frozen):
    """The host memory of one node."""

    node: NonNegativeInt
    parts: dict[str, NonNegativeInt]  # the most of each; not all of them exist at the same time
    phase: Phase  # with the most bytes
    num_bytes: NonNegativeInt


def host_memory(
    config: RunConfig,
    footprint: Footprint,
    model: ModelMemory,
    workers: tuple[WorkerMemory, ...],
    placement: Placement,
) -> HostMemory:
    """Return the memory of the fullest node: shared memory, checkpoint staging and processes.

    Without GPUs the workers' weights, activations and caches are in it too. Rewards, data and Prefect are not counted.
    """

    def of_node(node: int) -> HostMemory:
        counts = placement.of_node(node)
        columns = _columns(config, footprint, placement, counts)
        staging = _staging(config, model) * counts["policy"]
        ranks = config.rollout.gpus_per_worker
        processes = PROCESS_BYTES * (sum(counts.values()) + (ranks * counts["rollout"] if ranks > 1 else 0))
        sent = _published(config, model, counts, placement, node)
        loading = _loading(model, workers, counts) if placement.on_gpus else 0
        moments = model.policy.optimizer * counts["policy"] if config.optim.offload and placement.on_gpus else 0
        device = NO_BYTES
        if not placement.on_gpus:
            for worker in workers:
                device = device + worker.phases.scaled(counts[worker.role])
        always = processes + columns + moments
        # A checkpoint is copied after the update, and written while the next steps run.
        extra = {"load": loading - columns, "publish": sent + staging, "rollout": staging}
        moved = _moved_out(config, model, counts) if placement.time_shares_gpus else {}
        totals = {
            phase: always + getattr(device, phase) + extra.get(phase, staging) + moved.get(phase, 0) for phase in PHASES
        }
        fullest = max(PHASES, key=lambda phase: totals[phase])
        parts = {
            "columns in shared memory": columns,
            "published weights": sent,
            "checkpoint staging": staging,
            "processes": processes,
            "weights while loading": loading,
            "optimizer": moments,
            "moved out of GPUs": max(moved.values(), default=0),
            "workers' tensors": device.peak,
        }
        parts = {name: num_bytes for name, num_bytes in parts.items() if num_bytes}
        return HostMemory(node=node, parts=parts, phase=fullest, num_bytes=totals[fullest])

    return max(map(of_node, placement.used_nodes), key=lambda node: node.num_bytes)


def _columns(config: RunConfig, footprint: Footprint, placement: Placement, counts: Mapping[Role, int]) -> int:
    """Return the columns that the node's workers put, of all steps that are stored at the same time."""
    if config.store.kind == "fsspec":
        return 0
    putters: dict[str, Role] = {} if config.sft else {"rollout": "rollout"}
    if config.needs_reference_worker:
        putters["reference"] = "reference"
    if placement.nodes["teacher"]:
        putters["teacher"] = "teacher"
    total = 0.0
    for column in footprint.columns:
        role = putters.get(column_spec(column.name).producer, "policy")  # the driver's count as the policy's
        total += column.num_bytes * counts[role] / len(placement.nodes[role])
    steps = 1 + config.runtime.max_staleness
    scale = (footprint.most_store_bytes - footprint.partial_bytes) / sum(each.num_bytes for each in footprint.columns)
    partial = footprint.partial_bytes * counts["rollout"] / max(1, len(placement.nodes["rollout"]))
    return round(steps * scale * total + partial)


def _loading(model: ModelMemory, workers: tuple[WorkerMemory, ...], counts: Mapping[Role, int]) -> int:
    """Return what loads pass through host memory: an engine's weights, but of a sharded model a tensor's slice."""
    total = 0
    frozen = {"reference": model.reference, "teacher": model.teacher.policy if model.teacher is not None else None}
    for worker in workers:
        if worker.role in ("rollout", "reward"):
            total += counts[worker.role] * worker.phases.load
            continue
        weights = frozen.get(worker.role, model.policy)
        assert weights is not None
        total += counts[worker.role] * (weights.largest // weights.num_ranks)
    return total


def _moved_out(config: RunConfig, model: ModelMemory, counts: Mapping[Role, int]) -> dict[Phase, int]:
    """Return what workers keep in host memory while others compute on their GPUs."""
    weights, reference, teacher = model.policy, model.reference, model.teacher
    optimizer = 0 if config.optim.offload else weights.optimizer * counts["policy"]
    frozen = reference.computed(reference.held) * counts["reference"] if reference else 0
    frozen += teacher.policy.computed(teacher.policy.held) * counts["teacher"] if teacher else 0
    scored = model.reward.weights * counts["reward"] if model.reward else 0
    engines = engine_weight_bytes(model) * counts["rollout"] if config.model.publishes_adapters else 0
    return {
        "rollout": optimizer + weights.held * counts["policy"] + frozen,
        "publish": optimizer + frozen,
        "scoring": optimizer + scored + engines,
        "update": frozen + scored + engines,
    }


def _published(
    config: RunConfig, model: ModelMemory, counts: Mapping[Role, int], placement: Placement, node: int
) -> int:
    """Return the buckets of weights: two files; or the two of each side of gloo, which are tensors without GPUs."""
    if config.sft is not None:
        return 0
    carrier, bucket = weight_carrier(config, placement), bucket_bytes(config, model)
    sides = int(node == placement.nodes["policy"][0])
    if carrier == "gloo":
        sides = sides + counts["rollout"] if placement.on_gpus else 0
    held = 0 if carrier == "nccl" else 2 * bucket * sides
    if config.rollout.gpus_per_worker > 1 and carrier != "shared_memory":
        held += bucket * counts["rollout"]  # an engine's ranks map a copy of what did not come as a file
    return held


def _staging(config: RunConfig, model: ModelMemory) -> int:
    """Return what a policy rank copies for a checkpoint, and a file that it encodes, with the copy that this takes."""
    weights = model.policy
    copied = weights.trained + weights.optimizer + (weights.trained if config.runtime.max_staleness else 0)
    return copied + min(FILE_BYTES, copied)
