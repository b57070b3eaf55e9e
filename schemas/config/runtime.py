"""Where and how a run executes."""

from pydantic import NonNegativeInt, PositiveInt

from schemas.base import Frozen


class RuntimeConfig(Frozen):
    """Services, threads, checkpoints and retries."""

    runs_dir: str = "runs"
    services_dir: str = ".sluice"  # state of the local services, where Sluice starts them
    ray_address: str | None = None  # None: a local Ray that Sluice starts
    prefect_api_url: str | None = None  # None: PREFECT_API_URL, else a local server that Sluice starts
    num_threads: NonNegativeInt = 0  # torch threads of each worker; 0: the machine's cores
    max_restarts: NonNegativeInt = 3  # times that a run may recover from dead workers
    checkpoint_every_steps: PositiveInt = 1
    keep_checkpoints: PositiveInt = 2
    tensorboard: bool = False  # also write TensorBoard event files (extra `tensorboard`)
