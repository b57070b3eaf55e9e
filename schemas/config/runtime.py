"""Processes, devices, services and timeouts of a run, how its weights are sent, and when it asks for approval."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from schemas.base import FrozenConfig, OptionalText
from schemas.batch import SafeName
from schemas.config import DEFAULT_RUNS_DIR
from schemas.errors import MetricError
from schemas.metric_catalog import metric_spec

EnvironmentVariable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
BlockReference = Annotated[str, Field(pattern=r"^\{\{ *prefect\.blocks\.[a-z0-9-]+\.[\w.\[\]-]+ *\}\}$")]
_LIMIT = re.compile(r"\s*(\S+)\s*([<>])\s*(\S+)\s*")


class MetricLimit(FrozenConfig):
    """A condition on a metric of a finished step, e.g. `kl > 0.2`; in a config it may be written as that text.

    Example:
        >>> limit = MetricLimit.model_validate("reward/failed_fraction > 0.25")
        >>> limit.is_exceeded({"reward/failed_fraction": 0.5}), limit.is_exceeded({})
        (True, False)
    """

    metric: str
    """A metric of the catalog that steps have, so none of `eval/`."""

    comparison: Literal["<", ">"]
    """The side of `value` on which the run pauses."""

    value: float
    """The limit, in the metric's unit."""

    def __str__(self) -> str:
        return f"{self.metric} {self.comparison} {self.value:g}"

    def is_exceeded(self, metrics: dict[str, float]) -> bool:
        """Return whether a step with these metrics needs approval; not if it lacks the metric."""
        found = metrics.get(self.metric)
        if found is None:
            return False
        return found > self.value if self.comparison == ">" else found < self.value

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        if (match := _LIMIT.fullmatch(given)) is None:
            raise ValueError(f"{given!r} is not of the form METRIC > NUMBER or METRIC < NUMBER, e.g. 'kl > 0.2'")
        return dict(zip(("metric", "comparison", "value"), match.groups(), strict=True))

    @field_validator("metric")
    @classmethod
    def _in_catalog(cls, name: str) -> str:
        try:
            metric_spec(name)
        except MetricError as error:
            raise ValueError(str(error)) from None
        return name


class RuntimeConfig(FrozenConfig):
    """Where the run is, its processes and devices, and its retries."""

    runs_dir: str = DEFAULT_RUNS_DIR
    """Folder of the run directories: a local path that all nodes share, or any fsspec URL, e.g. `s3://bucket/runs`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the workers; auto: CUDA if the Ray cluster has GPUs, of which there must be enough, else the CPU."""

    placement: Literal["separate", "colocated"] = "separate"
    """GPUs of the workers; separate: one each; colocated: a worker of each role shares one, and they take turns."""

    num_policy_ranks: PositiveInt = 1
    """Data-parallel processes of the policy, which is sharded over them."""

    num_policy_replicas: PositiveInt = 1
    """Copies of the sharded policy, of equally many ranks: with one per node, weights are gathered within nodes."""

    gradient_sync: Literal["last_micro_batch", "every_micro_batch"] = "last_micro_batch"
    """`last_micro_batch`: one reduce-scatter per update, at the cost of unsharded gradients."""

    num_reference_ranks: PositiveInt = 1
    """Data-parallel processes of the reference, if it has its own workers."""

    max_staleness: Annotated[int, Field(ge=0, le=8)] = 0
    """Maximum policy lag. 0: on-policy. n: responses are generated over n steps, each part with that step's weights."""

    num_threads: NonNegativeInt = 0
    """Torch threads of each worker; 0: the cores of its node, divided by the workers of its role there."""

    shared_memory: str | None = None
    """Folder of the files that the processes of a node map; None: `/dev/shm`, or one on disk if that is too small."""

    max_restarts: NonNegativeInt = 3
    """Number of times that a run may recover from lost workers without finishing a further step."""

    pool: SafeName = "default"
    """Runs that share a pool are queued, if they are started by deployments."""

    tracing: bool = False
    """Send OpenTelemetry spans to the collector that the `OTEL_*` variables name (extra `otel`)."""

    profile_steps: tuple[NonNegativeInt, ...] = ()
    """Steps, from 0, of which each worker writes traces of torch's profiler to the run's folder `profile`."""

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.num_policy_ranks % self.num_policy_replicas:
            raise ValueError(
                f"num_policy_ranks = {self.num_policy_ranks} is not a multiple of num_policy_replicas = "
                f"{self.num_policy_replicas}; every replica has equally many ranks"
            )
        return self


class ServicesConfig(FrozenConfig):
    """Ray and Prefect, and the encryption of the column store's connections."""

    dir: str = ".sluice"
    """Folder for the state of the local services that Sluice starts."""

    ray_address: str | None = None
    """Ray cluster: host:port of its head; auto: this machine's; None: a local one."""

    py_modules: tuple[str, ...] = ()
    """Python files, packages' folders or wheels that Ray copies to every node, such as reward functions."""

    prefect_api_url: str | None = None
    """URL of a Prefect API; None: `PREFECT_API_URL`, else Sluice starts a local server."""

    prefect_patience_seconds: NonNegativeFloat = 600
    """Seconds that a run waits for a Prefect server that doesn't respond any more; a local one is started again."""

    secrets: dict[EnvironmentVariable, BlockReference] = Field(default_factory=dict)
    """Environment variables from blocks of the Prefect server, e.g. `KEY = "{{ prefect.blocks.secret.judge }}"`."""

    tls_certificate: str | None = None
    """PEM file, on every node, of a certificate for its address; the column store's connections are then encrypted."""

    tls_key: str | None = None
    """PEM file, on every node, of the certificate's key."""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both, or neither")
        return self


class TimeoutsConfig(FrozenConfig):
    """How long the parts of a run wait for each other."""

    worker_seconds: PositiveFloat = 300
    """Seconds after which a worker that doesn't answer is killed; its start may take five times as long."""

    engine_seconds: PositiveFloat = 600
    """Seconds after which an engine's process that doesn't answer is killed; its start has no limit of its own."""

    collective_seconds: PositiveFloat = 600
    """Seconds that a rank waits for the others in a collective before it fails."""

    resource_seconds: NonNegativeFloat = 600
    """Seconds that a run waits for GPUs that others hold, or for a node in place of a lost one, before it stops."""

    driver_seconds: Annotated[float, Field(ge=60)] = 3600
    """Seconds, 60 or more, after which a run's workers and store end without a driver; it can be resumed then."""

    notice_seconds: PositiveFloat = 20
    """Seconds between a SIGTERM to the driver, or the drain of a node, and its end; give what your machines give."""


class WeightsConfig(FrozenConfig):
    """How new weights reach the rollout workers."""

    transport: Literal["auto", "shared_memory", "broadcast"] = "auto"
    """Transport of new weights to the rollout workers; auto: shared memory on one node, unless each has its own GPU."""

    bucket_bytes: Annotated[int, Field(ge=64)] = 256 * 2**20
    """Bytes of a bucket of weights, of which a receiver holds two; a larger tensor is a bucket of its own."""

    probe: bool = True
    """Compare an engine's log-probs of a known row with the trainer's after each load; a stale engine stops the run."""


class ApprovalConfig(FrozenConfig):
    """What is checked after each step, and when the run pauses for somebody's decision."""

    when: tuple[MetricLimit, ...] = ()
    """Limits, e.g. `["kl > 0.2"]`: after a step beyond one, the run pauses until somebody decides in the Prefect UI."""

    queries: OptionalText = None
    """SQL checks run after each step; returned rows are reported as failures. A folder of `*.sql` files."""

    on_failed_queries: bool = False
    """Whether the run also pauses, as with `when`, if such a query returns rows."""

    timeout_seconds: PositiveInt = 7 * 24 * 3600
    """Seconds that a paused run waits for an answer before it stops; it can be resumed then."""
