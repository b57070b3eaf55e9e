"""A worker's endpoint for publishing weights, in a group of the policy's rank 0 and rollout workers."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import ray
import torch
from torch import Tensor

from infra.engines.base import RolloutEngine
from infra.models.flat_tensors import flat_bytes
from infra.ray.rendezvous import Rendezvous
from infra.storage.shared_memory import SharedFolder
from infra.weights.buckets import sent_specs, split_buckets
from infra.weights.carriers import (
    BroadcastReceiver,
    BroadcastSender,
    SharedMemoryReceiver,
    SharedMemorySender,
    open_folder,
)
from infra.weights.probe import check_probe
from infra.weights.stream import BucketReceiver, BucketSender, load_weights, send_weights
from infra.weights.weight_group import WeightGroup
from schemas.config.run import RunConfig
from schemas.step import ProcessGroupHandle
from schemas.weights import (
    LoadedWeights,
    ProbeRow,
    SentWeights,
    Transport,
    WeightGroupMember,
    WeightsHandle,
    WeightsRoute,
)


class WeightSyncEndpoint:
    """Sends weights from the policy's rank 0, or receives them in a rollout worker.

    Args:
        run_id: The run.
        device: The worker's device.
        config: The size of a bucket, how long to wait for the other side, and the folder in shared memory.
        engine: The worker's engine; None in the policy.
    """

    def __init__(
        self, run_id: str, device: torch.device, config: RunConfig, engine: RolloutEngine | None = None
    ) -> None:
        self._run_id, self._device, self._config, self._engine = run_id, device, config, engine
        self._group: WeightGroup | None = None
        self._folder: SharedFolder | None = None
        self._unprobed: WeightsHandle | None = None  # of the last load, if its probe is to come

    def member(self) -> WeightGroupMember:
        """Return where the worker is, and what its engine holds."""
        return WeightGroupMember(
            node=ray.get_runtime_context().get_node_id(),
            gpu=gpu_of(self._device),
            dtype=self._engine.dtype if self._engine is not None else "",
            version=self._engine.version if self._engine is not None else None,
        )

    def open_rendezvous(self, num_receivers: int) -> ProcessGroupHandle:
        """Host the rendezvous of a new group, on this node's own address."""
        self._rendezvous = Rendezvous(ray.util.get_node_ip_address(), 1 + num_receivers)
        return self._rendezvous.group

    def join(self, group: ProcessGroupHandle, rank: int, *, on_gpus: bool) -> None:
        """Join a group, by NCCL if `on_gpus`, else by gloo; leave the previous one.

        It waits half as long for a member as the policy's ranks wait for each other: the sender goes on to gather the
        weights with them before they give up.

        Raises:
            WorkerLostError: The other members did not join in time.
        """
        if self._group is not None:
            self._group.leave()
        host, device = ray.util.get_node_ip_address(), self._device if on_gpus else torch.device("cpu")
        self._group = WeightGroup(group, rank, host, device, self._config.timeouts.collective_seconds / 2)

    @contextmanager
    def leave_on_error(self) -> Iterator[None]:
        """Leave the group if the block fails, so that the receivers don't wait for this sender."""
        with self._joined().leave_on_error():
            yield

    def send(
        self,
        version: int,
        weights: Mapping[str, Tensor],
        tensors: Iterable[tuple[str, Tensor]],
        route: WeightsRoute,
        probe: ProbeRow | None,
    ) -> SentWeights:
        """Send a version to the group's other members.

        Args:
            version: The version.
            weights: The weights by name, maybe sharded.
            tensors: The same, as `infra.weights.buckets.gathered` yields them.
            route: How to send.
            probe: The row that the receivers' engines are probed with; None: no probe.

        Raises:
            WeightsError: No space is left for a bucket.
            WorkerLostError: A receiver is gone, or did not take part in time.
        """
        specs = sent_specs(weights, route.dtype)
        handle = WeightsHandle(
            run_id=self._run_id,
            version=version,
            tensors=specs,
            bucket_bytes=self._config.weights.bucket_bytes,
            is_complete=route.is_complete,
            probe=probe,
        )
        largest = max(flat_bytes(bucket) for bucket in split_buckets(specs, handle.bucket_bytes))
        return send_weights(self._joined(), self._sender(route.transport, 2 * largest), handle, tensors)

    def load(self, version: int, transport: Transport) -> LoadedWeights:
        """Receive a version, load it into the engine, and probe that, now or once it is awake.

        See `infra.weights.stream.load_weights`.

        Raises:
            StaleWeightsError: The engine's log-probs are not the trainer's; it has no version.
        """
        assert self._engine is not None, "only rollout workers load weights"
        group = self._joined()
        receivers: dict[Transport, type] = {"shared_memory": SharedMemoryReceiver, "broadcast": BroadcastReceiver}
        receiver: BucketReceiver = receivers[transport](group)
        self._unprobed, loaded = load_weights(group, receiver, self._engine, self._run_id, version)
        started = time.perf_counter()
        difference = self.probe()
        return loaded.replace(probe_seconds=time.perf_counter() - started, probe_difference=difference)

    def probe(self) -> float | None:
        """Probe the engine with its last load's row (`check_probe`); None: no row, done before, or partly asleep.

        Raises:
            StaleWeightsError: The engine's log-probs are not the trainer's; it has no version.
        """
        assert self._engine is not None, "only rollout workers have an engine"
        if (handle := self._unprobed) is None or self._engine.asleep:
            return None
        self._unprobed = None
        return check_probe(self._engine, handle) if self._engine.version == handle.version else None

    def _sender(self, transport: Transport, num_bytes: int) -> BucketSender:
        if transport == "broadcast":
            return BroadcastSender(self._joined())
        if self._folder is None:
            self._folder = open_folder(self._run_id, self._config.runtime.shared_memory, num_bytes)
        return SharedMemorySender(self._joined(), self._folder.path)

    def _joined(self) -> WeightGroup:
        assert self._group is not None, "the worker has not joined a weight group"
        return self._group


def gpu_of(device: torch.device) -> str:
    """Return a GPU's unique name; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
