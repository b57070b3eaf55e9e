"""The placement of a run's workers: which node and device each computes on, decided by the driver.

On GPUs, one placement group reserves all that a run needs at once, so that two runs never wait for each other's half.
On the CPU nothing is reserved, as the roles take turns: each worker is pinned to a node.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from infra.ray.actors import require_ray
from infra.ray.health import run_owner
from infra.storage.identity import run_id_of
from infra.workers.layout import (
    Role,
    bundle_numbers,
    bundle_sizes,
    decide_device,
    frozen_groups,
    gpus_per_worker,
    gpus_wanted,
    nearest_configs,
    num_workers,
    spread_over_cores,
)
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, ResourcesError
from schemas.placement import Device, WorkerSlot
from schemas.step import RunHandle

_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 1.0  # before a line names the holders of the resources
_LINE_SECONDS = 30.0  # between two such lines
_next_line: dict[str, float] = {}  # when the next one is due, by run
_left: set[str] = set()  # ids of nodes that are drained: they live, but take no further worker

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """A worker's slot, and the options of `ray.remote` that put it there."""

    slot: WorkerSlot
    options: dict[str, Any]


def check_resources(config: RunConfig) -> Device:
    """Return what the workers compute on; check that the cluster has enough of it, whoever holds it now.

    Raises:
        ConfigError: It has too few GPUs, in all or on one node, or fewer cores than policy ranks.
    """
    found = [node["Resources"] for node in _living()]
    gpus = [int(each["GPU"]) for each in found if each.get("GPU")]
    return decide_device(config, gpus, sum(each.get("CPU", 0) for each in found))


async def place(run: RunHandle, role: Role, numbers: Sequence[int]) -> list[Place]:
    """Return the places of workers that are about to be created; wait until the resources of all are free.

    Raises:
        ResourcesError: Others hold them for too long, or a node is gone and no other one came.
    """
    if not numbers:
        return []
    if await wait_for_nodes(run.run_id, run.config) == "cpu":
        return _place_on_cpu(run.config, role, numbers)
    group = _find_group(run.identity) or _create_group(run)
    bundles = {number: bundle for (other, number), bundle in bundle_numbers(run.config).items() if other == role}
    nodes = await _wait_for_bundles(run, group, [bundles[number] for number in numbers])
    addresses, sharing = living_nodes(), Counter(nodes.get(bundle) for bundle in bundles.values())
    shares = len([count for count in num_workers(run.config).values() if count])
    gpus = gpus_per_worker(run.config, role)
    num_gpus = gpus / shares if run.config.runtime.placement == "colocated" else gpus
    places = []
    for number in numbers:
        own = nodes[bundles[number]]
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundles[number])
        slot = _slot(role, number, own, addresses, "cuda", sharing[own]).replace(num_gpus=gpus)
        places.append(Place(slot, {"num_gpus": num_gpus, "scheduling_strategy": strategy}))
    return places


def living_nodes() -> dict[str, str]:
    """Return the addresses of the nodes that live, by Ray's ids."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in _living()}


def leave_node(node: str) -> None:
    """Place no further worker on a node, which is drained, and will be gone."""
    _left.add(node)


def release(identity: str) -> None:
    """Free the GPUs that were reserved for a run; Ray kills workers that still use them."""
    if (group := _find_group(identity)) is not None:
        ray.util.remove_placement_group(group)


def score_together(config: RunConfig) -> bool:
    """Return whether log-probs of policy, reference and teachers are computed at the same time.

    They are if the ranks of each have devices of their own; on the same ones, they would only slow each other down.
    With the KL in the reward, the reference's pass needs the behavior log-probs.
    """
    if not (frozen := frozen_groups(config)) or config.kl.in_reward:
        return False
    if check_resources(config) == "cuda":
        return config.runtime.placement == "separate"
    nodes = _nodes_on_cpu(config)
    groups = [("policy", range(config.runtime.num_policy_ranks)), *frozen]
    used = [node for role, numbers in groups for node in {nodes[role, number] for number in numbers}]
    return len(used) == len(set(used))


def _place_on_cpu(config: RunConfig, role: Role, numbers: Sequence[int]) -> list[Place]:
    nodes, addresses = _nodes_on_cpu(config), living_nodes()
    sharing = Counter(node for (other, _), node in nodes.items() if other == role)
    own = [nodes[role, number] for number in numbers]
    return [
        Place(
            _slot(role, number, node, addresses, "cpu", sharing[node]),
            {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)},
        )
        for number, node in zip(numbers, own, strict=True)
    ]


def _nodes_on_cpu(config: RunConfig) -> dict[tuple[Role, int], str]:
    """Return the node of each worker if all were created now; this process's node is the first."""
    own = ray.get_runtime_context().get_node_id()
    cores = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in _living()}
    nodes = sorted((node for node in cores if cores[node]), key=lambda node: (node != own, node))
    spread = spread_over_cores(config, [cores[node] for node in nodes])
    return {worker: nodes[index] for worker, index in spread.items()}


def _slot(role: Role, number: int, node: str, addresses: dict[str, str], device: Device, sharing: int) -> WorkerSlot:
    worker, address = f"{role}-{number}", addresses[node]
    return WorkerSlot(worker=worker, node=node, address=address, device=device, sharing=sharing, owner=run_owner())


def _group_name(identity: str) -> str:
    return f"sluice/{identity}/gpus"


def _find_group(identity: str) -> PlacementGroup | None:
    try:
        return ray.util.get_placement_group(_group_name(identity))
    except ValueError:
        return None


def _create_group(run: RunHandle) -> PlacementGroup:
    bundles = [{"GPU": float(size)} for size in bundle_sizes(run.config)]
    return ray.util.placement_group(bundles, strategy="PACK", name=_group_name(run.identity), lifetime="detached")


async def wait_for_nodes(run_id: str, config: RunConfig) -> Device:
    """Return what the run's workers compute on, once the cluster has enough nodes: some may be gone since it began.

    Raises:
        ResourcesError: What `check_resources` raises is still so after `timeouts.resource_seconds`.
    """
    limit = config.timeouts.resource_seconds
    started = time.monotonic()
    while True:
        try:
            return check_resources(config)
        except ConfigError as error:
            if (waited := time.monotonic() - started) > limit:
                raise ResourcesError(f"{error}; none came in timeouts.resource_seconds = {limit:g}") from error
            _tell(run_id, waited, partial(str.format, "nodes: {}", error))
        await asyncio.sleep(_POLL_SECONDS)


async def _wait_for_bundles(run: RunHandle, group: PlacementGroup, bundles: Sequence[int]) -> dict[int, str]:
    """Wait until bundles have a living node each; return the nodes of all that have one."""
    limit = run.config.timeouts.resource_seconds
    started = time.monotonic()
    while True:
        living, table = living_nodes(), placement_group_table(group)
        nodes = {index: node for index, node in table["bundles_to_node_id"].items() if node in living}
        if nodes.keys() >= {*bundles}:
            return nodes
        waited = time.monotonic() - started
        if waited > limit:
            if table["state"] == "PENDING":
                release(run.identity)  # others may need fewer
            raise ResourcesError(
                f"no GPU for run {run.run_id} within timeouts.resource_seconds = {limit:g}: {_holders()}"
                f"{_scattered(run.config)}; free some (sluice stop RUN), or add nodes"
            )
        _tell(run.run_id, waited, lambda: f"{gpus_wanted(run.config)} GPUs: {_holders()}")
        await asyncio.sleep(_POLL_SECONDS)


def _tell(run_id: str, waited: float, what: Callable[[], str]) -> None:
    """Say what the run has waited for during these seconds, unless it has just begun or was said recently."""
    if waited > _PATIENCE_SECONDS and time.monotonic() > _next_line.get(run_id, 0):
        _next_line[run_id] = time.monotonic() + _LINE_SECONDS
        logger.warning("run %s waits for %s", run_id, what())


def _holders() -> str:
    """Name the holders of the cluster's GPUs."""
    total, free = (found().get("GPU", 0) for found in (ray.cluster_resources, ray.available_resources))
    held = Counter[str]()
    for table in placement_group_table().values():
        if table["state"] in ("CREATED", "RESCHEDULING"):
            held[table["name"]] += sum(bundle.get("GPU", 0) for bundle in table["bundles"].values())
    runs = {name.split("/")[1]: count for name, count in held.items() if name.startswith("sluice/") and count}
    parts = [f"run {run_id_of(identity)} holds {count:g}" for identity, count in runs.items()]
    if (others := total - free - sum(runs.values())) > 0:
        parts.append(f"others hold {others:g}")
    return f"the Ray cluster has {total:g} GPUs, {free:g} free" + "".join(f", {part}" for part in parts)


def _living() -> list[dict[str, Any]]:
    """Return what Ray tells of the nodes that live, without those that are drained."""
    require_ray()
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in _left]


def _scattered(config: RunConfig) -> str:
    """If an engine takes several GPUs of one node, say how many each has that no run has reserved, and what fits."""
    if (each := config.rollout.gpus_per_worker) == 1:
        return ""
    free = Counter({node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in _living()})
    for table in placement_group_table().values():
        if table["state"] in ("CREATED", "RESCHEDULING"):
            for index, node in table["bundles_to_node_id"].items():
                free[node] -= int(table["bundles"][index].get("GPU", 0))
    counts = [count for count in free.values() if count > 0]
    return (
        f"; an engine takes {each} of one node, but the nodes have {', '.join(map(str, counts)) or 0} that are not "
        f"reserved, where this fits: {' or '.join(nearest_configs(config, counts))}"
    )
