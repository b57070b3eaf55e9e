"""A worker's endpoint for publishing weights: through the object store, or by broadcast in a group."""

import ray
import torch

from infra.engines.base import RolloutEngine
from infra.weights.base import ObjectRefs, WeightsReceiver, WeightsSender
from infra.weights.broadcast import BroadcastReceiver, BroadcastSender
from infra.weights.group import WeightGroup, open_rendezvous
from infra.weights.object_store import ObjectStoreReceiver, ObjectStoreSender
from schemas.step import ProcessGroupHandle
from schemas.weights import LoadedWeights, Transport, WeightGroupMember


class WeightSyncEndpoint:
    """Sends weights from the policy's rank 0, or receives them in a rollout worker.

    Args:
        run_id: The run.
        device: The worker's device.
        timeout_seconds: The longest wait for the other side.
    """

    def __init__(self, run_id: str, device: torch.device, timeout_seconds: float) -> None:
        self._run_id, self._device, self._timeout = run_id, device, timeout_seconds
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
        if transport == "object_store":
            return ObjectStoreSender(self._run_id)
        assert self._group is not None, "the worker has not joined a weight group"
        return BroadcastSender(self._run_id, self._group)

    def load(self, engine: RolloutEngine, version: int, refs: ObjectRefs, transport: Transport) -> LoadedWeights:
        """Receive a version by this transport and load it into the engine; see `WeightsReceiver.load`."""
        if transport == "object_store":
            receiver: WeightsReceiver = ObjectStoreReceiver(self._run_id, self._timeout)
        else:
            assert self._group is not None, "the worker has not joined a weight group"
            receiver = BroadcastReceiver(self._run_id, self._group)
        return receiver.load(engine, version, refs)


def gpu_of(device: torch.device) -> str:
    """Return a GPU's unique name; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
