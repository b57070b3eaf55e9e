"""Which node each worker of a planned run is on."""

from collections import Counter
from dataclasses import dataclass

from infra.workers.layout import Role, decide_device, num_workers, spread_over_gpus
from rl_core.planning.hardware import Cluster
from schemas.config.run import RunConfig
from schemas.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """The node of each worker, by role and number; with GPUs, each worker has its own, shared only if colocated.

    Attributes:
        nodes: By role, the node of each worker.
        is_colocated: Whether a worker of each role shares a GPU.
        on_gpus: Whether workers have GPUs.
        takes_turns: Whether workers of a GPU move out of its memory while others compute.
    """

    nodes: dict[Role, tuple[int, ...]]
    is_colocated: bool
    on_gpus: bool
    takes_turns: bool = False

    def count(self, role: Role) -> int:
        """Return the number of workers of a role."""
        return len(self.nodes[role])

    def of_node(self, node: int) -> dict[Role, int]:
        """Return how many workers of each role are on a node."""
        return {role: nodes.count(node) for role, nodes in self.nodes.items()}

    @property
    def used_nodes(self) -> tuple[int, ...]:
        """The nodes with workers."""
        return tuple(sorted({node for nodes in self.nodes.values() for node in nodes}))

    def remote_fraction(self, writer: Role, reader: Role) -> float:
        """Return the fraction of rows that a reader of one role fetches from a writer on another node."""
        readers, writers = Counter(self.nodes[reader]), Counter(self.nodes[writer])
        pairs = sum(readers.values()) * sum(writers.values())
        local = sum(count * writers[node] for node, count in readers.items())
        return 1 - local / pairs if pairs else 0.0


def place(config: RunConfig, cluster: Cluster) -> Placement:
    """Place workers on GPUs as a run does, node by node; without GPUs, all on one node.

    Raises:
        ConfigError: The cluster has too few GPUs, in all or on one node.
    """
    counts = num_workers(config)
    device = config.runtime.device
    if device == "cpu" or (device == "auto" and not cluster.gpus_per_node):
        return Placement({role: (0,) * count for role, count in counts.items()}, False, False)
    gpus = [cluster.gpus_per_node] * cluster.num_nodes
    try:
        decide_device(config, gpus, num_cpus=0)  # raises if there are too few GPUs
    except ConfigError as error:
        if cluster.is_here:
            raise ConfigError(f"{error}; or plan for hardware that is not here, with --cluster 8xH100") from None
        raise
    spread = spread_over_gpus(config, gpus)
    nodes = {role: tuple(spread[role, number] for number in range(count)) for role, count in counts.items()}
    return Placement(nodes, config.runtime.placement == "colocated", True, config.takes_turns)
