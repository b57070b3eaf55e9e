"""The process group of a worker's ranks: gloo on the CPU, NCCL on CUDA, on the node's own address."""

import os
import socket
import uuid
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from schemas.errors import WorkerLostError
from schemas.step import ProcessGroupHandle


class Rendezvous:
    """The store through which ranks find each other; rank 0 hosts it, and must keep it as long as the group.

    Attributes:
        group: The handle of the new group.

    Args:
        host: This node's address, the only one that it listens on.
        num_ranks: Ranks that will join.
    """

    def __init__(self, host: str, num_ranks: int) -> None:
        listener = socket.create_server((host, 0))
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            host, port, num_ranks, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.group = ProcessGroupHandle(group_id=uuid.uuid4().hex, host=host, port=port, num_ranks=num_ranks)


def join(group: ProcessGroupHandle, rank: int, host: str, device: torch.device, timeout_seconds: float) -> DeviceMesh:
    """Join the process group of all ranks; return their one-dimensional device mesh.

    Raises:
        WorkerLostError: The other ranks did not join in time.
    """
    listen_on(host)
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store = TCPStore(group.host, group.port, group.num_ranks, is_master=False, timeout=timeout)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=group.num_ranks, timeout=timeout)
    except (dist.DistError, RuntimeError) as error:
        raise WorkerLostError(f"rank {rank} of {group.num_ranks} could not join its process group: {error}") from None
    return init_device_mesh(device.type, (group.num_ranks,))


def is_peer_failure(error: BaseException) -> bool:
    """Return whether an error means that another rank is gone or hangs."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def listen_on(host: str) -> None:
    """Restrict gloo and NCCL to the network interface with the node's address."""
    for variable, name in interface_variables(host).items():
        os.environ.setdefault(variable, name)


def interface_variables(host: str) -> dict[str, str]:
    """Return the environment variables that restrict gloo and NCCL to the network interface with this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}
