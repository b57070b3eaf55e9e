"""The Ray actors that host the workers, without importing them."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


class WorkerActor:
    """An actor that makes a worker in its own process and passes calls on to it.

    Ray imports an actor's class in every process that receives its handle: in the driver, and in the column store's
    registry. The workers' modules import torch and transformers, which takes seconds and hundreds of megabytes; the
    classes that `actor_class` makes need only this module.
    """

    worker = ""  # the worker's class, as "module:class"

    def __init__(self, *args: Any) -> None:
        module, _, name = self.worker.partition(":")
        self._worker = getattr(import_module(module), name)(*args)


def actor_class(worker: str, *methods: str, mixins: tuple[type, ...] = ()) -> type:
    """Return the actor class of a worker's class, of the same name.

    Args:
        worker: The worker's class, as "module:class".
        *methods: Its methods that other processes call.
        mixins: Further base classes, such as `ChunkWriter`.
    """
    forwards = {method: _forward(method) for method in methods}
    return type(worker.partition(":")[2], (*mixins, WorkerActor), {"worker": worker, **forwards})


def _forward(method: str) -> Callable[..., Any]:
    def forward(self: WorkerActor, *args: Any) -> Any:
        return getattr(self._worker, method)(*args)

    forward.__name__ = method
    return forward
