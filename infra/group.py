"""A worker of several ranks, seen from the driver: gathered, called and ended as one."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeGuard

from infra.cluster import Role, answer, call, find_or_create, find_worker, kill_worker, num_workers
from schemas.errors import PipelineError, VersionError, WorkerLostError
from schemas.step import RunHandle

GRACE_SECONDS = 5  # that the ranks have to tell what happened to them once one has failed


class WorkerGroup:
    """All ranks of the run's policy or reference.

    Args:
        run: The run.
        role: `policy` or `reference`.
        ranks: Their actors.
    """

    def __init__(self, run: RunHandle, role: Role, ranks: Sequence[Any]) -> None:
        self._run, self._role, self.ranks = run, role, tuple(ranks)

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all ranks; the answers are in the order of the ranks.

        A rank that fails leaves the others waiting for it, so all are ended then; they are created anew when the
        group is gathered again, from the newest checkpoint. A refused version is no failure.

        Raises:
            PipelineError: What the first rank to fail raised.
            WorkerLostError: One died, or lost the others, and no rank says why.
        """
        # All are sent before anything else may run: another call in between would reach the ranks in another order.
        calls = [asyncio.ensure_future(answer(sent, method)) for sent in self._send(method, *args)]
        try:
            return list(await asyncio.gather(*calls))
        except VersionError:
            raise
        except BaseException as error:
            await asyncio.wait(calls, timeout=GRACE_SECONDS)
            self.end()
            # A rank that stops with an error of its own takes the others with it: its error is the cause.
            causes = [answer for answer in await asyncio.gather(*calls, return_exceptions=True) if _is_cause(answer)]
            if isinstance(error, WorkerLostError) and causes:
                raise causes[0] from None
            raise

    def promise(self, method: str, *args: Any) -> tuple[list[Any], Awaitable[Any]]:
        """Call a method of all ranks that has several return values, those of rank 0 for other workers.

        Returns:
            Ray's promises of these, to be passed on, and the end of the other ranks' calls, to be awaited.
        """
        promised = self._send(method, *args)
        others = [answer(value, method) for values in promised[1:] for value in values]
        return promised[0], asyncio.gather(*others)

    def _send(self, method: str, *args: Any) -> list[Any]:
        return [getattr(rank, method).remote(*args) for rank in self.ranks]

    def end(self) -> None:
        """End all ranks, and wait until their names are free again."""
        for rank in range(len(self.ranks)):
            kill_worker(self._run.run_id, self._role, rank)


def find_group(run: RunHandle, role: Role) -> WorkerGroup | None:
    """The run's policy or reference if all its ranks are there; nothing is created."""
    ranks = [find_worker(run.run_id, role, rank) for rank in range(num_workers(run.config)[role])]
    return None if None in ranks else WorkerGroup(run, role, ranks)


def _is_cause(answer: object) -> TypeGuard[PipelineError]:
    return isinstance(answer, PipelineError) and not isinstance(answer, WorkerLostError)


async def get_group(run: RunHandle, role: Role) -> WorkerGroup:
    """The run's policy or reference: found by name, or created, and gathered.

    Ranks that belong to a group of which one is gone hold it no longer together: they are ended, and all are created
    anew. The policy then holds the newest checkpoint's version.

    Raises:
        PipelineError: What a rank raised when it loaded its weights.
    """
    ranks = [find_or_create(run, role, rank) for rank in range(num_workers(run.config)[role])]
    group = WorkerGroup(run, role, ranks)
    incarnations = set(await group.call("incarnation"))
    if len(incarnations) == 1 and "" not in incarnations:
        return group
    if incarnations != {""}:
        group.end()
        return await get_group(run, role)
    meeting = await call(ranks[0], "open_rendezvous", len(ranks))
    await group.call("start", meeting)
    return group
