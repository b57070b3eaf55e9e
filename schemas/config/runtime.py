"""Services, processes, devices and retries of a run."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from schemas.base import FrozenConfig
from schemas.batch import SafeName
from schemas.config.approval import MetricLimit
from schemas.config.folders import DEFAULT_RUNS_DIR


class RuntimeConfig(FrozenConfig):
    """Services, processes, devices and retries."""

    runs_dir: str = DEFAULT_RUNS_DIR
    """Folder of the run directories."""

    services_dir: str = ".sluice"
    """Folder for the state of the local services that Sluice starts."""

    ray_address: str | None = None
    """Address of a Ray cluster; None: Sluice starts a local one."""

    prefect_api_url: str | None = None
    """URL of a Prefect API; None: `PREFECT_API_URL`, else Sluice starts a local server."""

    prefect_patience_seconds: NonNegativeFloat = 600
    """Seconds that a run waits for a Prefect server that doesn't respond any more; a local one is started again."""

    num_policy_ranks: PositiveInt = 1
    """Data-parallel processes of the policy, which is sharded over them."""

    num_reference_ranks: PositiveInt = 1
    """Data-parallel processes of the reference, if it has its own workers."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the workers; auto: CUDA if the Ray cluster has enough GPUs for all workers."""

    gpus_per_worker: Annotated[float, Field(gt=0, le=1)] = 1.0
    """GPUs reserved for each worker; workers share GPUs if less than 1."""

    weight_transport: Literal["auto", "shared_memory", "broadcast"] = "auto"
    """Transport of new weights to the rollout workers; auto: broadcast if every worker has its own GPU."""

    shared_memory: str | None = None
    """Folder of the files that the processes of a node map; None: `/dev/shm`, or one on disk if that is too small."""

    tls_certificate: str | None = None
    """PEM file, on every node, of a certificate for its address; the column store's connections are then encrypted."""

    tls_key: str | None = None
    """PEM file, on every node, of the certificate's key."""

    collective_timeout_seconds: PositiveFloat = 600
    """Seconds that a rank waits for the others in a collective before it fails."""

    worker_timeout_seconds: PositiveFloat = 300
    """Seconds after which a worker that doesn't answer is killed; its start may take five times as long."""

    max_staleness: Annotated[int, Field(ge=0, le=1)] = 0
    """0: on-policy; 1: one step off-policy, step k + 1 is sampled by version k while step k is trained."""

    num_threads: NonNegativeInt = 0
    """Torch threads of each worker; 0: one per core of the machine."""

    max_restarts: NonNegativeInt = 3
    """Number of times that a run may recover from lost workers."""

    pool: SafeName = "default"
    """The GPU pool: runs of deployments with the same pool take turns."""

    approve_when: tuple[MetricLimit, ...] = ()
    """Limits, e.g. `["kl > 0.2"]`: after a step beyond one, the run pauses until somebody decides in the Prefect UI."""

    approval_timeout_seconds: PositiveInt = 7 * 24 * 3600
    """Seconds that a paused run waits for an answer before it stops; it can be resumed then."""

    tracing: bool = False
    """Send OpenTelemetry spans to the collector that the `OTEL_*` variables name (extra `otel`)."""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both, or neither")
        return self
