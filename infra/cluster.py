"""Ray: connecting the driver, the run's named actors, and calls whose errors keep their types."""

import logging
import os
import signal
import socket
import time
from typing import Any, Literal

from schemas.config.run import RunConfig
from schemas.errors import ConfigError, PipelineError, ServiceError, WorkerLostError
from schemas.step import RunHandle

logger = logging.getLogger(__name__)

NAMESPACE = "sluice"
KILL_TIMEOUT_SECONDS = 20
CONNECT_TIMEOUT_SECONDS = 10
Role = Literal["policy", "reference", "rollout"]


def connect(address: str, *, local: bool) -> None:
    """Connect this process to Ray, once.

    Args:
        address: `host:port` of the Ray head.
        local: Whether Sluice started that Ray, on loopback.

    Raises:
        ServiceError: Nothing answers at `address`.
    """
    import ray

    if ray.is_initialized():
        return
    if local:
        _keep_to_loopback()
    _require_answer(address)
    # Ray installs its own SIGTERM handler; Prefect's turns SIGTERM into a cancellation and must stay.
    handler = signal.getsignal(signal.SIGTERM)
    environment = {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])}
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            runtime_env={"env_vars": environment},
            logging_level=logging.WARNING,
            log_to_driver=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ServiceError(f"no Ray answers at {address}: {str(error).splitlines()[0]}") from None
    finally:
        signal.signal(signal.SIGTERM, handler)


def _keep_to_loopback() -> None:
    """Take this process for a loopback-only one, as the head does that `infra.services` starts."""
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False  # read from RAY_ENVIRONMENT, but when Ray was imported


def _require_answer(address: str) -> None:
    # Ray itself would try for minutes, and then exit the process.
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ServiceError(
            f"no Ray answers at {address!r} ({error}); check runtime.ray_address (host:port), or leave it out to "
            "start a local one"
        ) from None


def actor_name(run_id: str, role: Role, shard: int = 0) -> str:
    """The name under which a run's worker is found by every process of the cluster."""
    return f"{run_id}/{role}-{shard}"


async def get_worker(run: RunHandle, role: Role, shard: int = 0) -> Any:
    """The run's worker of this role: found by name, or created, and started."""
    worker = find_or_create(run, role, shard)
    await call(worker, "start")
    return worker


def find_or_create(run: RunHandle, role: Role, shard: int = 0) -> Any:
    """The run's worker of this role, which need not be started yet. One that died is created anew."""
    if (found := find_worker(run.run_id, role, shard)) is not None:
        return found
    import ray

    from infra.stores.plasma import ACTOR_OPTIONS

    options = {
        "name": actor_name(run.run_id, role, shard),
        "namespace": NAMESPACE,
        "lifetime": "detached",  # a killed driver leaves it; resume finds it with its weights
        "get_if_exists": True,
        "num_cpus": 0,
        "num_gpus": gpus_per_worker(run.config),
        "max_restarts": 0,
        "max_task_retries": 0,
    }
    actor: Any = ray.remote(**ACTOR_OPTIONS)(_worker_class(role))
    return actor.options(**options).remote(run, shard)


def find_worker(run_id: str, role: Role, shard: int = 0) -> Any | None:
    """The run's worker of this role, if it is there."""
    import ray

    try:
        return ray.get_actor(actor_name(run_id, role, shard), namespace=NAMESPACE)
    except ValueError:
        return None


def start_worker(worker_class: type, *args: Any) -> Any:
    """A worker without a name: it ends when its handle goes, or its driver does."""
    import ray

    return ray.remote(worker_class).options(num_cpus=0, max_restarts=0).remote(*args)


async def call(worker: Any, method: str, *args: Any) -> Any:
    """Await one actor call.

    Raises:
        PipelineError: What the worker raised, with its own type.
        WorkerLostError: The worker died.
    """
    return await answer(getattr(worker, method).remote(*args), method)


async def answer(sent: Any, method: str) -> Any:
    """Await the answer to a call of `method` that was sent; see `call`."""
    import ray

    try:
        return await sent
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PipelineError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise WorkerLostError(f"a worker died during {method!r}: {error}") from None


def kill_worker(run_id: str, role: Role, shard: int = 0) -> None:
    """End one worker of the run, if there is one, and wait until its name is free again."""
    import ray

    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if (worker := find_worker(run_id, role, shard)) is None:
            return
        ray.kill(worker)
        time.sleep(0.05)
    raise WorkerLostError(f"worker {actor_name(run_id, role, shard)} did not end within {KILL_TIMEOUT_SECONDS} s")


def kill_workers(run_id: str, config: RunConfig) -> None:
    """End all workers of the run and free their memory."""
    for role, count in num_workers(config).items():
        for shard in range(count):
            kill_worker(run_id, role, shard)


def num_workers(config: RunConfig) -> dict[Role, int]:
    """How many workers of each role a run has."""
    return {
        "policy": config.runtime.num_policy_ranks,
        "reference": config.runtime.num_reference_ranks if config.needs_reference_worker else 0,
        "rollout": config.rollout.num_workers,
    }


def check_resources(config: RunConfig) -> None:
    """See that the cluster has a GPU, or at least a core, for every rank.

    Raises:
        ConfigError: It has fewer.
    """
    import ray

    found, ranks = ray.cluster_resources(), config.runtime.num_policy_ranks
    if config.runtime.device == "cuda" and found.get("GPU", 0) < (wanted := _gpus_wanted(config)):
        raise ConfigError(
            f'runtime.device = "cuda" needs {wanted:g} GPUs for {_listed(config)}, but the Ray cluster has '
            f"{found.get('GPU', 0):g}; lower runtime.num_policy_ranks or runtime.gpus_per_worker, or add GPUs"
        )
    if not gpus_per_worker(config) and ranks > found.get("CPU", 0):
        raise ConfigError(
            f"runtime.num_policy_ranks = {ranks}, but the Ray cluster has {found.get('CPU', 0):g} cores; "
            "lower it, or add nodes"
        )


def gpus_per_worker(config: RunConfig) -> float:
    """The share of a GPU that each worker gets: none where the config or the cluster says so."""
    import ray

    runtime = config.runtime
    if runtime.device == "cpu":
        return 0
    enough = ray.cluster_resources().get("GPU", 0) >= _gpus_wanted(config)
    return runtime.gpus_per_worker if runtime.device == "cuda" or enough else 0


def _gpus_wanted(config: RunConfig) -> float:
    return sum(num_workers(config).values()) * config.runtime.gpus_per_worker


def _listed(config: RunConfig) -> str:
    return ", ".join(f"{count} {role}" for role, count in num_workers(config).items() if count)


def _worker_class(role: Role) -> type:
    if role == "policy":
        from infra.workers.policy import PolicyWorker

        return PolicyWorker
    if role == "reference":
        from infra.workers.reference import ReferenceWorker

        return ReferenceWorker
    from infra.workers.rollout import RolloutWorker

    return RolloutWorker
