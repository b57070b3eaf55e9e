"""What every node must have before a run's workers start there; checked on each of them by a task."""

import glob
import os
import resource
import sys
import time
from importlib.metadata import version

import ray
from ray.exceptions import RayTaskError, RuntimeEnvSetupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from infra.storage.runs import DISTRIBUTION, RunDirectory, require_writable
from infra.workers.inputs import model_paths
from infra.workers.placement import living_nodes
from schemas.base import Frozen
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, UserError, describe

MAX_CLOCK_SECONDS = 60  # by which clocks may differ: events have times
_ANSWER_SECONDS = 120  # for all nodes together; a process starts on each


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
        except ray.exceptions.RayError:  # the node is gone by now
            continue
        if problem := find_problem(here, found, directory, began, num_files):
            raise ConfigError(f"{place} {problem}")


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
