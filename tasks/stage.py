"""The decorators of a step's tasks: stages, whose results are committed to the run's ledger, and operations.

Both are retried only if a worker died. A stage's ledger key is explicit: Prefect's default key contains the flow run's
id, so a resumed run would repeat every stage.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any, ParamSpec, TypeVar

from prefect.assets import Asset
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.serializers import JSONSerializer
from prefect.settings import PREFECT_TASKS_DISABLE_CACHING, temporary_settings
from prefect.tasks import MaterializingTask, Task
from prefect.utilities.annotations import opaque
from pydantic import Field

from infra.storage import ledger
from infra.storage.runs import RunDirectory
from schemas.base import Frozen
from schemas.errors import WorkerLostError
from schemas.step import PolicyHandle, RunHandle

MAX_RETRIES = 2
SYNCED = ("rollout", "put")
P = ParamSpec("P")
R = TypeVar("R")
StageKey = Callable[[RunHandle, PolicyHandle, str], str]  # of a stage's name


class HandleSerializer(JSONSerializer[Any]):
    """Prefect's JSON serializer, whose format it writes: Prefect itself would make a Python object of every number."""

    type: str = Field(default="sluice-handle", frozen=True)

    def dumps(self, obj: Any) -> bytes:
        """Return the JSON of a handle; of anything else, such as an error, as Prefect writes it."""
        if not isinstance(obj, Frozen):
            return super().dumps(obj)
        name = f"{type(obj).__module__}.{type(obj).__qualname__}"
        return f'{{"__class__": "{name}", "data": {obj.model_dump_json()}}}'.encode()


async def worker_was_lost(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Return whether a task failed because its Ray worker died; only then is it retried."""
    try:
        await state.result(raise_on_failure=True)
    except WorkerLostError:
        return True
    except Exception:  # noqa: BLE001  the state's own failure, already recorded; it is only classified here
        return False
    return False


class OpaqueTask(MaterializingTask[P, R]):
    """A task in whose arguments Prefect does not search for futures: there are none, but a batch has many values.

    Its results are cached as it says, whatever the user's Prefect profile does with those of other tasks: they are the
    run's ledger. It materializes no asset, unless `materializing` says which.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        is_disabled = PREFECT_TASKS_DISABLE_CACHING.value()  # read when a task is made; to change it takes 0.1 s
        with temporary_settings({PREFECT_TASKS_DISABLE_CACHING: False}) if is_disabled else nullcontext():
            super().__init__(*args, assets=(), **kwargs)

    def named(self, task_run_name: str) -> "OpaqueTask[P, R]":
        """Return the same task with another name of its runs; Prefect's `with_options` makes one of its own class."""
        same = copy(self)
        same.task_run_name = task_run_name
        return same

    def materializing(self, asset: Asset, upstream: Sequence[Asset]) -> "OpaqueTask[P, R]":
        """Return the same task, which materializes an asset that is made of others."""
        same = copy(self)
        same.assets, same.asset_deps = [asset], list(upstream)
        return same

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task."""
        opaque_kwargs = {name: opaque(value) for name, value in kwargs.items()}
        return super().__call__(*map(opaque, args), **opaque_kwargs)  # type: ignore[arg-type]  # unwrapped by Prefect


class StageTask(OpaqueTask[P, R]):
    """A task that takes `run` and `policy` and commits its result to the ledger.

    Of `SYNCED`, it is on disk once the task returns: the columns that rest on it are. The others are computed again.

    Args:
        ledger_key: Returns the key of its entry for a run, a policy and its name.
    """

    def __init__(self, *args: Any, ledger_key: StageKey, **kwargs: Any) -> None:
        self._ledger_key = ledger_key
        super().__init__(*args, cache_key_fn=self._cache_key, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task, or read its result from the ledger."""
        run, policy, *_ = args
        return self._synced(run, self._ledger_key(run, policy, self.name), super().__call__(*args, **kwargs))

    async def _synced(self, run: RunHandle, key: str, call: Awaitable[R]) -> R:
        result = await call
        if self.name in SYNCED:
            await asyncio.to_thread(RunDirectory.of(run).ledger.sync, key)  # which Prefect doesn't
        return result

    def _cache_key(self, _: TaskRunContext, parameters: dict[str, Any]) -> str:
        return self._ledger_key(parameters["run"], parameters["policy"], self.name)


def stage(name: str, *, key: StageKey = ledger.stage_key) -> Callable[[Callable[P, R]], OpaqueTask[P, R]]:
    """Return a decorator for a task that takes `run` and `policy` and commits its result to the ledger."""
    return _decorator(StageTask, name, persist_result=True, result_serializer=HandleSerializer(), ledger_key=key)


def operation(name: str) -> Callable[[Callable[P, R]], OpaqueTask[P, R]]:
    """Return a decorator for a task that is safe to repeat; its result is not committed."""
    return _decorator(OpaqueTask, name, persist_result=False, cache_policy=NO_CACHE)


def _decorator(kind: type[OpaqueTask[P, R]], name: str, **options: Any) -> Callable[[Callable[P, R]], OpaqueTask[P, R]]:
    def decorate(function: Callable[P, R]) -> OpaqueTask[P, R]:
        return kind(
            function,
            name=name,
            retries=MAX_RETRIES,
            retry_delay_seconds=1,
            retry_condition_fn=worker_was_lost,
            refresh_cache=False,
            **options,
        )

    return decorate


def is_committed(run: RunHandle, policy: PolicyHandle, stage: str) -> bool:
    """Return whether the ledger holds all of this stage's result."""
    return RunDirectory.of(run).ledger.is_committed(ledger.stage_key(run, policy, stage))
