"""What every node must have before a run's workers start there, and whether it is drained: asked of each by a task."""

import asyncio
import glob
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import ray
from ray.exceptions import RayTaskError, RuntimeEnvSetupError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from infra.storage.runs import DISTRIBUTION, RunDirectory, require_writable
from infra.workers.inputs import model_paths
from infra.workers.placement import leave_node, living_nodes
from schemas.base import Frozen
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, UserError, describe

MAX_CLOCK_SECONDS = 60  # by which clocks may differ: events have times
_ANSWER_SECONDS = 120  # for all nodes together; a process starts on each
_DRAIN_SECONDS = 3.0  # between two looks whether nodes are drained; Ray's own notice of a SIGTERM is 30 s
_MAX_DRAIN_SECONDS = 20.0
_DRAIN_SHARE = 0.1  # of the time, which looks may take: a small node starts a process for each


class NodeReport(Frozen):
    """What a node has."""

    version: str
    """Sluice's."""

    python: str
    time: float
    """Unix time."""

    missing: tuple[str, ...]
    """Of the paths that were asked for, those that it lacks."""

    run: str
    """The digest of the run's config there; empty if the run's directory is another one, or none."""

    max_files: int
    """How many files and sockets a process may have open, at most."""

    obstacle: str = ""
    """What keeps it from reading or writing the run's directory, if that is at a URL; empty if nothing does."""


def check_nodes(directory: RunDirectory, config: RunConfig) -> None:
    """Check that the other nodes have what a run's workers use: its directory and paths, and Sluice.

    If the run's directory is at a URL, this node's workers are checked, too: they have the environment that Ray was
    started in, with other credentials, perhaps.

    Raises:
        ConfigError: One lacks something; the message names the node.
    """
    own = ray.get_runtime_context().get_node_id() if directory.is_local else None
    nodes = {node: address for node, address in living_nodes().items() if node != own}
    paths = [path for path in (os.getcwd(), *paths_of(config)) if os.path.exists(path)]
    task, began = ray.remote(num_cpus=0, max_retries=0)(report_node), time.time()
    refs = {
        node: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            directory.url, paths
        )
        for node in nodes
    }
    num_files = 256 + 3 * config.runtime.num_policy_ranks  # two connections of each rank to each other one, and others
    done = ray.wait(list(refs.values()), num_returns=len(refs), timeout=_ANSWER_SECONDS)[0] if refs else []
    here = report_node(directory.url, [])
    for node, ref in refs.items():
        place = f"node {nodes[node]} ({node[:8]})"
        if ref not in done:
            raise ConfigError(f"{place} has not started a process within {_ANSWER_SECONDS} s; remove it")
        try:
            found = ray.get(ref)
        except (RayTaskError, RuntimeEnvSetupError) as error:
            cause = getattr(error, "cause", error)
            raise ConfigError(f"{place} can't run Sluice: {describe(cause)}; install it there") from None
        except TaskUnschedulableError:  # it is drained
            leave_node(node)
            continue
        except ray.exceptions.RayError:  # the node is gone by now
            continue
        if problem := find_problem(here, found, directory, began, num_files):
            raise ConfigError(f"{place} {problem}")


async def wait_for_drain(nodes: Callable[[], Iterable[str]]) -> set[str]:
    """Wait until other nodes are drained that the run uses; return Ray's ids of them.

    A node that is drained (before a spot machine ends, by an autoscaler, by Ray itself after a SIGTERM) lives until its
    deadline, as do the processes on it, but it takes no further work: a task for it fails at once. Ray has no other
    public sign of it (2.60). This process's own node isn't asked: who ends that one tells its processes.

    Args:
        nodes: Returns the ids of the nodes that the run uses at the time.

    Raises:
        RayLostError: Ray is gone.
    """
    looks = _Looks()
    while True:
        await asyncio.sleep(min(_MAX_DRAIN_SECONDS, max(_DRAIN_SECONDS, looks.seconds / _DRAIN_SHARE)))
        if found := await asyncio.to_thread(lambda: looks.find_drained(nodes())):
            return found


def leave_drained() -> None:
    """Place no further worker on the nodes that are drained, of all but this process's own; waits for some seconds.

    Raises:
        RayLostError: Ray is gone.
    """
    for node in _Looks().find_drained(living_nodes()):
        leave_node(node)


class _Looks:
    """Looks whether nodes are drained.

    Attributes:
        seconds: How long half of the nodes took to answer the last one: a node that never does slows down no look.
    """

    def __init__(self) -> None:
        # Made once, as Ray keeps each function until the job ends; by value, as the process there imports nothing.
        self._task = ray.remote(num_cpus=0, max_retries=0)(lambda: None)
        self._unanswered: dict[str, Any] = {}  # by node
        self.seconds = 0.0

    def find_drained(self, nodes: Iterable[str]) -> set[str]:
        """Return those of the nodes that are known to be drained; wait a little for answers that weren't waited for."""
        living, own, began = living_nodes(), ray.get_runtime_context().get_node_id(), time.monotonic()
        asked = {*nodes} & living.keys() - self._unanswered.keys() - {own}
        new = {
            node: self._task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), enable_task_events=False
            ).remote()
            for node in asked
        }
        if new:
            ray.wait([*new.values()], num_returns=(len(new) + 1) // 2, timeout=_DRAIN_SECONDS)
            self.seconds = time.monotonic() - began
            ray.wait([*new.values()], num_returns=len(new), timeout=max(0.0, _DRAIN_SECONDS - self.seconds))
        self._unanswered |= new
        return {node for node in [*self._unanswered] if self._is_drained(node)} & living_nodes().keys()

    def _is_drained(self, node: str) -> bool:
        if not ray.wait([self._unanswered[node]], timeout=0)[0]:
            return False
        try:
            ray.get(self._unanswered.pop(node))
        except TaskUnschedulableError:  # or it is gone, of which its workers' callers are told
            return True
        except ray.exceptions.RayError:  # it is gone, or the process there
            pass
        return False


def report_node(directory: str, paths: list[str]) -> NodeReport:
    """Return what this node has."""
    run, obstacle = RunDirectory(directory), ""
    try:
        require_writable(run.url)
        digest = run.config().digest if run.exists else ""
    except UserError as error:
        digest, obstacle = "", str(error)
    return NodeReport(
        version=version(DISTRIBUTION),
        python=".".join(map(str, sys.version_info[:2])),
        time=time.time(),
        missing=tuple(path for path in paths if not (os.path.exists(path) or glob.glob(path, recursive=True))),
        run=digest,
        max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        obstacle=obstacle,
    )


def find_problem(here: NodeReport, there: NodeReport, directory: RunDirectory, began: float, num_files: int = 0) -> str:
    """Return what keeps a run from using a node; empty if nothing does.

    Args:
        here: What the driver's node has, asked after all others.
        there: What the node has.
        directory: The run.
        began: Unix time on the driver's node before any was asked.
        num_files: How many files and sockets a worker may have open.
    """
    if (here.version, here.python) != (there.version, there.python):
        return (
            f"has Sluice {there.version} on Python {there.python}, the driver has {here.version} on {here.python}; "
            "install the same there"
        )
    if there.obstacle:
        return (
            f"can't use the run directory: {there.obstacle}; set them where its Ray is started, or install there what "
            "is missing"
        )
    if there.run != here.run:
        return (
            f"doesn't see the run directory {directory.url}; set runtime.runs_dir to a folder that the driver and all "
            "nodes share, such as a network file system, or to a URL"
        )
    if there.missing:
        return f"lacks {there.missing[0]}; copy it there, at the same path, or put it on a file system that is shared"
    if there.max_files < num_files:
        return (
            f"allows {there.max_files} open files, but {num_files} may be needed; raise the hard limit (ulimit -Hn) "
            "where its Ray is started"
        )
    for word, difference in (("ahead of", there.time - here.time), ("behind", began - there.time)):
        if difference > MAX_CLOCK_SECONDS:
            return f"has a clock {difference:.0f} s {word} the driver's, or more; synchronize them (NTP)"
    return ""


def paths_of(config: RunConfig) -> list[str]:
    """Return what workers read or run by its path: models, data, and interpreters that aren't found by their name."""
    programs = [getattr(config.rollout, key, None) for key in ("python", "program")]
    programs += [environment.python for environment in config.environments]
    found = [program for program in programs if program is not None and "/" in program]
    return [*model_paths(config), *config.data.paths, *found]
