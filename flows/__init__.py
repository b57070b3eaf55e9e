"""The flows, and the two ways to start them: the command line, and `train_run` and `run_pipeline` from Python."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import infra  # noqa: F401  it sets what torch and Ray read when they are imported

if TYPE_CHECKING:
    from flows.api import run_pipeline, run_pipeline_async, train_run, train_run_async

__all__ = ["run_pipeline", "run_pipeline_async", "train_run", "train_run_async"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("flows.api"), name)  # not at the top: torch and Prefect are imported with it
