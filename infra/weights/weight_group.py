"""The process group in which weights are broadcast: NCCL between GPUs, gloo between CPUs.

It is separate from the process group in which the policy's ranks train.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from infra.ray.rendezvous import listen_on
from schemas.errors import WorkerLostError
from schemas.step import ProcessGroupHandle

_POLL_SECONDS = 0.0005


class WeightGroup:
    """One member's side of the group. After a failure, the members have to form a new group.

    Attributes:
        device: The device of broadcast tensors.
    """

    def __init__(
        self, group: ProcessGroupHandle, rank: int, host: str, device: torch.device, timeout_seconds: float
    ) -> None:
        """Join the group, and wait for the other members.

        Args:
            group: The group to join.
            rank: This member's rank; 0 is the sender.
            host: This node's address; nothing listens on any other.
            device: This member's own GPU, or the CPU; the same kind for all members.
            timeout_seconds: The longest wait for the other members, now and in each broadcast.

        Raises:
            WorkerLostError: The other members did not join in time.
        """
        self.device, self._rank, self._timeout = device, rank, timeout_seconds
        listen_on(host)
        try:
            self._backend = self._connect(group)
        except (dist.DistError, RuntimeError) as error:
            raise WorkerLostError(
                f"member {rank} of {group.num_ranks} could not join the weight group: {error}"
            ) from None

    def start(self, tensor: Tensor) -> "Transfer":
        """Begin to copy the sender's tensor to the receivers' (contiguous, on the group's device), in this order.

        Raises:
            WorkerLostError: A member is gone; this member has left the group.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        with self._lost_others():
            return Transfer(self, tensor, self._backend.broadcast([tensor], options))

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the sender's tensor to the receivers', and return when that is done; see `start`.

        Raises:
            WorkerLostError: A member is gone, or did not take part in time; this member has left the group.
        """
        self.start(tensor).wait()

    def receive(self, num_bytes: int) -> Tensor:
        """Return what the sender broadcasts: uint8 [num_bytes], on the group's device; see `broadcast`."""
        return self.start(torch.empty(num_bytes, dtype=torch.uint8, device=self.device)).wait()

    def barrier(self) -> None:
        """Wait until all members have called this.

        Raises:
            WorkerLostError: A member is gone, or did not take part in time; this member has left the group.
        """
        options = dist.BarrierOptions()
        options.asyncOp = True
        with self._lost_others():
            work = self._backend.barrier(options)
        self.wait(work)

    def wait(self, work: Any) -> None:
        """Wait for a collective that was begun.

        Raises:
            WorkerLostError: A member is gone, or did not take part in time; this member has left the group.
        """
        deadline = time.monotonic() + self._timeout
        with self._lost_others():
            while not work.is_completed():  # not `wait`: with NCCL, that only enqueues on the CUDA stream
                if time.monotonic() > deadline:
                    raise RuntimeError(f"timed out after {self._timeout:g} s")
                time.sleep(_POLL_SECONDS)
            work.wait()

    def leave(self) -> None:
        """Leave the group; the other members' broadcasts then fail or time out."""
        if self._backend is not None:
            self._backend.abort()
            self._backend = None  # gloo closes its connections only now

    @contextmanager
    def leave_on_error(self, besides: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        """Leave the group if the block fails, so that the other members don't wait for this one.

        Args:
            besides: Errors after which this member stays.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, besides):
                self.leave()
            raise

    @contextmanager
    def _lost_others(self) -> Iterator[None]:
        """Turn the backend's errors into `WorkerLostError`, and leave the group."""
        if self._backend is None:
            raise WorkerLostError("this member has left the weight group; form a new one")
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            self.leave()
            raise WorkerLostError(f"member {self._rank} of the weight group lost the others: {error}") from None

    def _connect(self, group: ProcessGroupHandle) -> Any:
        timeout = timedelta(seconds=self._timeout)
        address = TCPStore(group.host, group.port, group.num_ranks, is_master=False, timeout=timeout)
        store = PrefixStore(group.group_id, address)
        store.set(f"member-{self._rank}", "")
        store.wait([f"member-{rank}" for rank in range(group.num_ranks)], timeout)  # NCCL would wait forever
        if self.device.type == "cuda":
            return _open_nccl(store, self._rank, group.num_ranks, 2 * timeout)
        return dist.ProcessGroupGloo(store, self._rank, group.num_ranks, timeout)


class Transfer:
    """A broadcast that was begun; the tensor must not be used until it has ended."""

    def __init__(self, group: WeightGroup, tensor: Tensor, work: Any) -> None:
        self._group, self._tensor, self._work = group, tensor, work

    def wait(self) -> Tensor:
        """Wait until it has ended, and return the tensor.

        Raises:
            WorkerLostError: A member is gone, or did not take part in time; this member has left the group.
        """
        self._group.wait(self._work)
        return self._tensor


def _open_nccl(store: Any, rank: int, num_ranks: int, timeout: timedelta) -> Any:
    """Return a process group over NCCL whose watchdog doesn't kill this process if a member is lost."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"  # clean up only; read when the group is created
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # its only name, which torch.distributed uses itself
        return dist.ProcessGroupNCCL(store, rank, num_ranks, options)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
