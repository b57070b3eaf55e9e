"""Monitors: the trackers and files that a run's metrics are sent to, next to its own `metrics.jsonl`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from schemas.base import FrozenConfig


class _Monitor(FrozenConfig):
    package: ClassVar[str | None] = None  # the module that it needs, which the extra of the monitor's kind installs


class JsonlMonitor(_Monitor):
    """A file with one flat JSON object per step and per evaluation: `step`, and each metric by its name."""

    kind: Literal["jsonl"] = "jsonl"

    folder: str
    """Folder of the file, which is named `<run id>.jsonl`."""


class TensorBoardMonitor(_Monitor):
    """TensorBoard event files (extra `tensorboard`)."""

    package = "tensorboard"

    kind: Literal["tensorboard"] = "tensorboard"

    folder: str | None = None
    """Folder of a folder of event files, named by the run's id; None: `tensorboard/` in a local run directory."""


class WandbMonitor(_Monitor):
    """A run in Weights & Biases, whose id is the run's id (extra `wandb`)."""

    package = "wandb"

    kind: Literal["wandb"] = "wandb"

    project: str
    """Project of the run."""

    entity: str | None = None
    """User or team of the project; None: the account's default."""

    mode: Literal["online", "offline"] = "online"
    """Whether to send metrics, or to write them for `wandb sync`."""

    folder: str | None = None
    """Folder in which the library makes its folder `wandb`; None: a local run directory."""


class MlflowMonitor(_Monitor):
    """A run in MLflow, whose name and tag `sluice.run_id` are the run's id (extra `mlflow`)."""

    package = "mlflow"

    kind: Literal["mlflow"] = "mlflow"

    tracking_uri: str
    """The tracking server, e.g. `http://127.0.0.1:5000`, or a database, e.g. `sqlite:///mlflow.db`."""

    experiment: str
    """Experiment of the run; it is created if it doesn't exist."""


class TrackioMonitor(_Monitor):
    """A run in trackio's database on this machine, whose name is the run's id (extra `trackio`)."""

    package = "trackio"

    kind: Literal["trackio"] = "trackio"

    project: str
    """Project of the run."""


MonitorConfig = Annotated[
    JsonlMonitor | TensorBoardMonitor | WandbMonitor | MlflowMonitor | TrackioMonitor, Field(discriminator="kind")
]
