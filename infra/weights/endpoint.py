"""A worker's end of publishes: by the object store, or in a group that broadcasts."""

import ray
import torch

from infra.engines.base import RolloutEngine
from infra.weights.base import ObjectRefs, WeightsReceiver, WeightsSender
from infra.weights.broadcast import BroadcastReceiver, BroadcastSender, WeightGroup, open_rendezvous
from infra.weights.object_store import ObjectStoreReceiver, ObjectStoreSender
from schemas.step import ProcessGroupHandle
from schemas.weights import LoadedWeights, Transport, WeightGroupMember


class WeightSyncEndpoint:
    """What the policy's first rank sends with, and a rollout worker receives with.

    Args:
        run_id: The run.
        device: Where the worker computes.
        timeout_seconds: How long it waits for the others.
    """

    def __init__(self, run_id: str, device: torch.device, timeout_seconds: float) -> None:
        self._run_id, self._device, self._timeout = run_id, device, timeout_seconds
        self._group: WeightGroup | None = None

    def member(self) -> WeightGroupMember:
        """Where it computes, and which group it is in."""
        return WeightGroupMember(gpu=gpu_of(self._device), group_id=self._group.group_id if self._group else "")

    def open_rendezvous(self, num_receivers: int) -> ProcessGroupHandle:
        """Host the gathering of a group, on this node's own address."""
        self._meeting, handle = open_rendezvous(ray.util.get_node_ip_address(), num_receivers)
        return handle

    def join(self, meeting: ProcessGroupHandle, rank: int) -> None:
        """Join a group, and leave the one before.

        Raises:
            WorkerLostError: The other members did not come in time.
        """
        if self._group is not None:
            self._group.end()
        host = ray.util.get_node_ip_address()
        self._group = WeightGroup(meeting, rank, host, self._device, self._timeout)

    def sender(self, transport: Transport) -> WeightsSender:
        """What sends by this transport."""
        if transport == "object_store":
            return ObjectStoreSender(self._run_id)
        assert self._group is not None, "it has joined no group"
        return BroadcastSender(self._run_id, self._group)

    def load(self, engine: RolloutEngine, version: int, refs: ObjectRefs, transport: Transport) -> LoadedWeights:
        """Receive a version by this transport and load it into the engine; see `WeightsReceiver.load`."""
        if transport == "object_store":
            receiver: WeightsReceiver = ObjectStoreReceiver(self._run_id, self._timeout)
        else:
            assert self._group is not None, "it has joined no group"
            receiver = BroadcastReceiver(self._run_id, self._group)
        return receiver.load(engine, version, refs)


def gpu_of(device: torch.device) -> str:
    """The name of a GPU that no other has; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
