"""The ranks of one sharded worker, seen from the driver: called and killed as one."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from infra.ray.actors import kill_actors, resolve
from infra.ray.tracing import trace_arguments
from schemas.errors import PipelineError, VersionError, WorkerLostError

GRACE_SECONDS = 5  # for the other ranks to report their own errors once one has failed

logger = logging.getLogger(__name__)


class WorkerGroup:
    """All ranks of the run's policy, reference or a teacher.

    Args:
        ranks: The ranks' actors by name, in rank order.
        may_kill: Whether they are still this driver's, and not by now those of another one that has taken over.
    """

    def __init__(self, ranks: Mapping[str, Any], may_kill: Callable[[], bool]) -> None:
        self._names, self.ranks, self._may_kill = tuple(ranks), tuple(ranks.values()), may_kill

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all ranks; return the results in rank order.

        A rank that fails leaves the others waiting for it, so all are then killed; the next look-up of the group
        creates them again, from the newest checkpoint. A rejected version is not a failure.

        Raises:
            PipelineError: The first rank to fail raised it.
            WorkerLostError: A rank died, or lost the others, and no rank reports why.
        """
        # All calls are sent before anything else can run: a call in between might reach the ranks in different orders.
        trace, shared = trace_arguments(), [_shared(arg) for arg in args]
        refs = [getattr(rank, method).remote(*shared, **trace) for rank in self.ranks]
        calls = [asyncio.ensure_future(resolve(ref, method)) for ref in refs]
        try:
            return list(await asyncio.gather(*calls))
        except VersionError:
            raise
        except BaseException as error:
            await asyncio.wait(calls, timeout=GRACE_SECONDS)
            self.kill_after_error()
            # A rank that fails with an error of its own makes the others fail too: its error is the cause.
            done, waiting = await asyncio.wait(calls, timeout=GRACE_SECONDS)
            for each in waiting:  # of ranks that could not be killed, or are another driver's
                each.cancel()
            outcomes = [each.exception() for each in calls if each in done and not each.cancelled()]
            causes = [
                one for one in outcomes if isinstance(one, PipelineError) and not isinstance(one, WorkerLostError)
            ]
            if isinstance(error, WorkerLostError) and causes:
                raise causes[0] from None
            raise

    def kill(self) -> None:
        """Kill all ranks, and wait until their names are free again."""
        kill_actors(self._names)

    def kill_after_error(self) -> None:
        """Kill all ranks if they are this driver's; that it fails is logged, so that the error itself is raised."""
        if not self._may_kill():
            return
        try:
            self.kill()
        except PipelineError as error:  # whoever looks the group up finds what is left of it
            logger.warning("after another error: %s", error)


def _shared(arg: Any) -> Any:
    """Put a handle or a plan in Ray's object store: it is serialized once, and fetched once by each node."""
    import ray

    from schemas.base import Frozen  # not at the top: `sluice --help` does without pydantic

    return ray.put(arg) if isinstance(arg, Frozen) else arg
