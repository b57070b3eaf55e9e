"""The Ray actors that host the workers, without importing them."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from infra.processes import infrequent_gc
from infra.ray.actors import actor_name
from infra.ray.device import occupy, place_of_process
from infra.ray.health import Pingable
from infra.ray.tracing import received_trace
from infra.ray.worker_logs import LogBuffer, Reply
from infra.workers.placement import release
from schemas.placement import WorkerPlace, WorkerSlot
from schemas.step import RunHandle


class WorkerActor:
    """An actor that makes a worker in its own process and passes calls on to it.

    Ray imports an actor's class in every process that receives its handle, such as the driver. The workers' modules
    import torch and transformers, which takes seconds and hundreds of megabytes; the classes that `actor_class` makes
    need only this module.
    """

    worker = ""  # the worker's class, as "module:class"

    def __init__(self, *args: Any) -> None:
        self._logs = LogBuffer(actor_name().rpartition("/")[2])
        self._logs.install()
        module, _, name = self.worker.partition(":")
        with infrequent_gc():
            worker = getattr(import_module(module), name)
        self._worker = worker(*args)


class PlacedActor(Pingable, WorkerActor):
    """A run's worker: it computes in its slot only, and ends if its run has no driver for too long.

    Args:
        slot: The slot.
        run: The run.
        number: The worker's number in its role.
        secrets: Environment variables, set before anything is imported; Ray keeps them in memory alone.
    """

    def __init__(self, slot: WorkerSlot, run: RunHandle, number: int, secrets: Mapping[str, str]) -> None:
        os.environ.update(secrets)
        occupy(slot)
        super().__init__(run, number)
        self.end_without_driver(slot.owner, run.config.timeouts.driver_seconds, partial(release, run.identity))
        self._slot = slot

    def place(self) -> WorkerPlace:
        """Return where it computes."""
        return place_of_process(self._slot)


def actor_class(worker: str, *methods: str, base: type = WorkerActor) -> type:
    """Return the actor class of a worker's class, of the same name.

    Args:
        worker: The worker's class, as "module:class".
        *methods: Its methods that other processes call.
        base: `WorkerActor`, or a class of such actors.
    """
    forwards = {method: _forward(method) for method in methods}
    return type(worker.partition(":")[2], (base,), {"worker": worker, **forwards})


def _forward(method: str) -> Callable[..., Any]:
    def forward(self: WorkerActor, *args: Any, traceparent: str | None = None) -> Any:
        try:
            with received_trace(traceparent):
                result = getattr(self._worker, method)(*args)
        except Exception as error:
            self._logs.attach(error)
            raise
        lines = self._logs.take()
        return Reply(result, lines) if lines else result

    forward.__name__ = method
    return forward
