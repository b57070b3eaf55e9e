"""A worker's endpoint for publishing weights: through shared memory, or by broadcast in a group."""

import ray
import torch

from infra.engines.base import RolloutEngine
from infra.weights.base import WeightsReceiver, WeightsSender
from infra.weights.broadcast import BroadcastReceiver, BroadcastSender
from infra.weights.group import WeightGroup, open_rendezvous
from infra.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from schemas.config.runtime import RuntimeConfig
from schemas.step import ProcessGroupHandle
from schemas.weights import LoadedWeights, SentWeights, Transport, WeightGroupMember


class WeightSyncEndpoint:
    """Sends weights from the policy's rank 0, or receives them in a rollout worker.

    Args:
        run_id: The run.
        device: The worker's device.
        runtime: How long to wait for the other side, and the folder in shared memory.
    """

    def __init__(self, run_id: str, device: torch.device, runtime: RuntimeConfig) -> None:
        self._run_id, self._device, self._timeout = run_id, device, runtime.collective_timeout_seconds
        self.file_sender = SharedMemorySender(run_id, runtime.shared_memory)
        self._group: WeightGroup | None = None

    def member(self) -> WeightGroupMember:
        """Return the worker's GPU and the weight group that it is in."""
        return WeightGroupMember(gpu=gpu_of(self._device), group_id=self._group.group_id if self._group else "")

    def open_rendezvous(self, num_receivers: int) -> ProcessGroupHandle:
        """Host the rendezvous of a new group, on this node's own address."""
        self._rendezvous, handle = open_rendezvous(ray.util.get_node_ip_address(), num_receivers)
        return handle

    def join(self, group: ProcessGroupHandle, rank: int) -> None:
        """Join a group, and leave the previous one.

        Raises:
            WorkerLostError: The other members did not join in time.
        """
        if self._group is not None:
            self._group.leave()
        host = ray.util.get_node_ip_address()
        self._group = WeightGroup(group, rank, host, self._device, self._timeout)

    def sender(self, transport: Transport) -> WeightsSender:
        """Return the sender of this transport."""
        if transport == "shared_memory":
            return self.file_sender
        assert self._group is not None, "the worker has not joined a weight group"
        return BroadcastSender(self._run_id, self._group)

    def load(
        self, engine: RolloutEngine, version: int, sent: SentWeights | None, transport: Transport
    ) -> LoadedWeights:
        """Receive a version by this transport and load it into the engine; see `WeightsReceiver.load`."""
        if transport == "shared_memory":
            receiver: WeightsReceiver = SharedMemoryReceiver(self._run_id, self._timeout)
        else:
            assert self._group is not None, "the worker has not joined a weight group"
            receiver = BroadcastReceiver(self._run_id, self._group)
        return receiver.load(engine, version, sent)


def gpu_of(device: torch.device) -> str:
    """Return a GPU's unique name; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
