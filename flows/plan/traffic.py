"""The bytes that a step of a planned run moves, and how much of them crosses nodes."""

from pydantic import NonNegativeFloat, NonNegativeInt

from flows.plan.footprint import Footprint
from flows.plan.nodes import producer_role
from flows.plan.placement import Placement
from flows.plan.workers import ModelMemory, sent_bytes, weight_carrier
from infra.workers.layout import Role
from rl_core.planning.hardware import Cluster
from rl_core.planning.memory import WeightBytes
from rl_core.training import policy_columns, training_columns
from rl_core.training.rows import TOKEN_COLUMNS
from schemas.base import Frozen
from schemas.catalog import column_spec
from schemas.config.run import RunConfig


class Transfer(Frozen):
    """One kind of a step's transfers."""

    name: str
    num_bytes: NonNegativeInt  # received by all workers together; of a checkpoint, written
    network_bytes: NonNegativeInt  # of these, between nodes
    seconds: NonNegativeFloat | None  # that a step waits for it; None: not known, or in the background


def step_traffic(
    config: RunConfig, footprint: Footprint, model: ModelMemory, cluster: Cluster, placement: Placement
) -> tuple[Transfer, ...]:
    """Return the transfers of one step."""
    transfers = [_columns(config, footprint, cluster, placement), _published(config, model, cluster, placement)]
    if config.runtime.num_policy_ranks > 1 or (model.reference is not None and model.reference.num_ranks > 1):
        transfers.append(_collectives(config, footprint, model, cluster, placement))
    transfers.append(_checkpoint(config, model, placement))
    return tuple(transfers)


def collective_bytes(
    weights: WeightBytes, num_scored: int, num_trained: int, num_reduced: int, num_replicas: int = 1
) -> int:
    """Return the bytes that one rank receives in a step's collectives.

    A scoring micro-batch gathers the other ranks' weights once, in the compute dtype; a trained one twice. Gradients,
    float32, are reduced to shards among the ranks of a replica, and each shard among the replicas.

    Args:
        weights: The ranks' weights.
        num_scored: Scored micro-batches of a rank.
        num_trained: Trained micro-batches of a rank, in all updates of the step.
        num_reduced: Of these, those after which gradients are reduced.
        num_replicas: Copies of the sharded weights.
    """
    others = (weights.num_ranks - 1) / weights.num_ranks
    gathered = weights.computed(weights.whole) * (num_scored + 2 * num_trained)
    among_replicas = 2 * (num_replicas - 1) / num_replicas * weights.trained
    return round(others * gathered + (others * weights.trained_whole + among_replicas) * num_reduced)


def _columns(config: RunConfig, footprint: Footprint, cluster: Cluster, placement: Placement) -> Transfer:
    reads: list[tuple[Role, str]] = [("policy", name) for name in (*policy_columns(config), *training_columns(config))]
    if config.kl.coef:
        reader: Role = "reference" if config.needs_reference_worker else "policy"
        reads += [(reader, name) for name in TOKEN_COLUMNS]
    sizes = {column.name: column.num_bytes for column in footprint.columns}
    total, crossing = 0, 0.0
    for role, name in reads:
        writer = producer_role(config, column_spec(name).producer)
        total += sizes[name]
        crossing += sizes[name] * placement.remote_fraction(writer, role)
    seconds = crossing / cluster.network_bandwidth if cluster.network_bandwidth else None
    return Transfer(name="columns read", num_bytes=total, network_bytes=round(crossing), seconds=seconds)


def _published(config: RunConfig, model: ModelMemory, cluster: Cluster, placement: Placement) -> Transfer:
    """Weights go to each rollout worker, in its engine's dtype; NCCL crosses to each node once, gloo to each worker."""
    home, nodes, num_bytes = placement.nodes["policy"][0], placement.nodes["rollout"], sent_bytes(model)
    away = [node for node in nodes if node != home]
    is_nccl = weight_carrier(config, placement) == "nccl"
    copies = len(set(away)) if is_nccl else len(away)
    slowest = cluster.network_bandwidth if away else cluster.link_bandwidth
    passes = 1 if is_nccl else max(1, len(away))
    return Transfer(
        name="weights published",
        num_bytes=num_bytes * len(nodes),
        network_bytes=num_bytes * copies,
        seconds=num_bytes * passes / slowest if slowest else None,
    )


def _collectives(
    config: RunConfig, footprint: Footprint, model: ModelMemory, cluster: Cluster, placement: Placement
) -> Transfer:
    trained = sum(update.num_micros for update in footprint.plan.updates)
    syncs_last = config.runtime.gradient_sync == "last_micro_batch"
    updating = (trained, len(footprint.plan.updates) if syncs_last else trained, config.runtime.num_policy_replicas)
    of_policy = collective_bytes(model.policy, footprint.forward.num_micros, *updating)
    roles: list[tuple[Role, int]] = [("policy", of_policy)]
    if model.reference is not None:
        total = footprint.forward.num_micros * config.runtime.num_policy_ranks  # the same micro-batches on other ranks
        roles.append(("reference", collective_bytes(model.reference, -(-total // model.reference.num_ranks), 0, 0)))
    elif config.kl.coef:
        roles[0] = ("policy", collective_bytes(model.policy, 2 * footprint.forward.num_micros, *updating))
    num_bytes, crossing, seconds = 0, 0, 0.0
    for role, of_rank in roles:
        num_nodes = len(set(placement.nodes[role]))
        num_bytes += of_rank * placement.count(role)
        crossing += of_rank * num_nodes if num_nodes > 1 else 0  # a ring crosses each node's border once
        bandwidth = cluster.network_bandwidth if num_nodes > 1 else cluster.link_bandwidth
        seconds += of_rank / bandwidth if bandwidth else 0.0
    known = seconds if cluster.link_bandwidth else None
    return Transfer(name="collectives", num_bytes=num_bytes, network_bytes=crossing, seconds=known)


def _checkpoint(config: RunConfig, model: ModelMemory, placement: Placement) -> Transfer:
    weights = model.policy
    copies = 2 if config.runtime.max_staleness else 1
    written = (copies * weights.trained + weights.optimizer) * weights.num_ranks // config.checkpoint.every_steps
    crossing = written if config.checkpoint.url is not None or len(placement.used_nodes) > 1 else 0
    return Transfer(name="checkpoint", num_bytes=written, network_bytes=crossing, seconds=None)
