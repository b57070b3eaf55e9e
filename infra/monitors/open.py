"""Open the monitors that a config enables."""

from infra.monitors.base import Monitor
from infra.monitors.tensorboard import TensorBoardMonitor
from infra.storage.runs import RunDirectory
from schemas.config.run import RunConfig


def open_monitors(directory: RunDirectory, config: RunConfig) -> list[Monitor]:
    """Open the run's monitors.

    Args:
        directory: The run's directory.
        config: The run's configuration.

    Raises:
        ConfigError: A monitor's package is not installed.
    """
    return [TensorBoardMonitor(directory.path / "tensorboard")] if config.runtime.tensorboard else []


def require_monitors(config: RunConfig) -> None:
    """Check that the packages of the config's monitors are installed.

    Raises:
        ConfigError: One is not.
    """
    if config.runtime.tensorboard:
        TensorBoardMonitor.require()
