"""A monitor of actors: one that answers no ping for too long is killed, so that calls that wait for it fail."""

import getpass
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import psutil
import ray

from infra.ray.actors import find_actor
from schemas.errors import RayLostError
from schemas.placement import ActorInfo

_GROUP = "health"
_PINGS_PER_TIMEOUT = 10
_START_FACTOR = 5  # on the timeout until an actor's first answer: on a busy machine, its imports alone take a minute
_MAX_INTERVAL_SECONDS = 10.0
_JOIN_SECONDS = 5.0

ACTOR_OPTIONS: dict[str, Any] = {"concurrency_groups": {_GROUP: 1}}  # for `ray.remote` of a `Pingable`

logger = logging.getLogger(__name__)


class Pingable:
    """A mixin for actors of a run: they answer in a thread of their own, whatever else they do."""

    _owner, _started, _pinged = "", 0.0, 0.0

    @ray.method(concurrency_group=_GROUP)
    def ping(self) -> tuple[str, int]:
        """Return the node and the id of this process; only the run's driver calls this."""
        self._pinged = time.monotonic()
        return ray.get_runtime_context().get_node_id(), os.getpid()

    @ray.method(concurrency_group=_GROUP)
    def describe(self) -> ActorInfo:
        """Return what this process is and takes."""
        return ActorInfo(
            address=ray.util.get_node_ip_address(),
            gpus=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
            memory_bytes=psutil.Process().memory_full_info().uss,
            age_seconds=time.monotonic() - self._started,
            driverless_seconds=time.monotonic() - self._pinged,
            owner=self._owner,
        )

    def end_without_driver(self, owner: str, seconds: float, release: Callable[[], None]) -> None:
        """End this process once no driver has pinged it for so long.

        Args:
            owner: Who started the run.
            seconds: `timeouts.driver_seconds`.
            release: Called before, to free what the run holds outside of this process.
        """
        self._owner, self._started, self._pinged = owner, time.monotonic(), time.monotonic()
        threading.Thread(target=self._watch_driver, args=(seconds, release), name="driver-watch", daemon=True).start()

    def _watch_driver(self, seconds: float, release: Callable[[], None]) -> None:
        while (missed := time.monotonic() - self._pinged) < seconds:
            time.sleep(min(seconds - missed, _MAX_INTERVAL_SECONDS))
        logger.warning("no driver for %g s (timeouts.driver_seconds = %g): ending", missed, seconds)
        try:
            release()
        finally:
            os._exit(0)  # other threads may be in the middle of anything


def run_owner() -> str:
    """Return who runs this process, as a run's owner."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


@contextmanager
def monitored_actors(names: Sequence[str], timeout_seconds: float) -> Iterator[Callable[[], set[str]]]:
    """Watch the named actors during the block, whether or not they exist yet; kill one that doesn't answer in time.

    Yields what returns Ray's ids of the nodes on which they were when they answered last.

    An actor is not dead for Ray as long as its process exists: one that was stopped, or hangs without running Python,
    would let its callers wait forever. Killed, it fails their calls as any dead actor does.

    Args:
        names: The actors' names; each has a method `ping`, as a `Pingable` has.
        timeout_seconds: How long a ping may take; five times as long while the actor starts or waits for its GPU.
    """
    ended = threading.Event()
    monitor = _Monitor(names, timeout_seconds)
    thread = threading.Thread(target=monitor.run, args=(ended,), name="actor-monitor", daemon=True)
    thread.start()
    try:
        yield monitor.nodes
    finally:
        ended.set()
        thread.join(_JOIN_SECONDS)  # not longer: it may be waiting for a Ray that is gone


class _Ping(NamedTuple):
    actor: Any
    answer: Any  # its object ref


class _Monitor:
    def __init__(self, names: Sequence[str], timeout_seconds: float) -> None:
        self._names, self._timeout_seconds = names, timeout_seconds
        self._interval = min(timeout_seconds / _PINGS_PER_TIMEOUT, _MAX_INTERVAL_SECONDS)
        self._pings: dict[str, _Ping] = {}
        self._waits: dict[str, int] = {}  # intervals without an answer; not a time, as this process may be stopped, too
        self._processes: dict[str, tuple[str, int]] = {}  # each actor's node and process id, from its last answer

    def run(self, ended: threading.Event) -> None:
        """Ping until the event is set."""
        while not ended.wait(self._interval):
            for name in self._names:
                if ended.is_set():  # in the middle of it: this process may have left Ray
                    return
                try:
                    self._check(name)
                except (ray.exceptions.RayError, RayLostError) as error:  # its callers get the same error
                    logger.debug("%s does not answer: %s", name, error)
                    self._forget(name)
                except Exception:  # the others are pinged all the same, or all would end without a driver
                    logger.exception("worker %s can't be monitored", name)
                    self._forget(name)

    def nodes(self) -> set[str]:
        """Return the nodes of those that have answered."""
        return {node for node, _ in list(self._processes.values())}  # a copy: another thread adds to them

    def _check(self, name: str) -> None:
        ping = self._pings.get(name)
        if ping is None:
            if (actor := find_actor(name)) is not None:
                self._pings[name], self._waits[name] = _Ping(actor, actor.ping.remote()), 0
        elif ray.wait([ping.answer], timeout=0)[0]:
            self._processes[name] = ray.get(ping.answer)
            self._pings[name], self._waits[name] = _Ping(ping.actor, ping.actor.ping.remote()), 0
        else:
            self._waits[name] += 1
            limit = self._timeout_seconds * (1 if name in self._processes else _START_FACTOR)
            if (waited := self._waits[name] * self._interval) > limit:
                self._kill(name, ping.actor, waited)

    def _kill(self, name: str, actor: Any, waited: float) -> None:
        logger.warning(
            "worker %s has not answered for %g s (timeouts.worker_seconds = %g): killing it",
            *(name, waited, self._timeout_seconds),
        )
        node, process_id = self._processes.get(name, ("", 0))
        if node == ray.get_runtime_context().get_node_id():
            with suppress(ProcessLookupError, PermissionError):  # it is gone, or its Ray is another user's
                os.kill(process_id, signal.SIGKILL)  # Ray asks the process itself to exit, which a stopped one can't
        ray.kill(actor)
        self._forget(name)

    def _forget(self, name: str) -> None:
        for known in (self._pings, self._waits, self._processes):
            known.pop(name, None)
