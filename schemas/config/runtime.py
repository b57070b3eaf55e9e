"""Where and how a run executes."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from schemas.base import Frozen


class RuntimeConfig(Frozen):
    """Services, threads, checkpoints and retries."""

    runs_dir: str = "runs"
    services_dir: str = ".sluice"  # state of the local services, where Sluice starts them
    ray_address: str | None = None  # None: a local Ray that Sluice starts
    prefect_api_url: str | None = None  # None: PREFECT_API_URL, else a local server that Sluice starts
    num_policy_ranks: PositiveInt = 1  # data-parallel processes that hold the policy, sharded
    num_reference_ranks: PositiveInt = 1  # the same of the reference, where there is one
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where the Ray cluster has the GPUs for all workers
    gpus_per_worker: Annotated[float, Field(gt=0, le=1)] = 1.0  # less than 1: workers share GPUs
    weight_transport: Literal["auto", "object_store", "broadcast"] = "auto"  # auto: broadcast between GPUs of their own
    collective_timeout_seconds: PositiveFloat = 600  # a rank that waits so long for the others gives up
    max_staleness: Annotated[int, Field(ge=0, le=1)] = 0  # 1: step k+1 is sampled by version k while step k is trained
    num_threads: NonNegativeInt = 0  # torch threads of each worker; 0: the machine's cores
    max_restarts: NonNegativeInt = 3  # times that a run may recover from dead workers
    tensorboard: bool = False  # also write TensorBoard event files (extra `tensorboard`)
