"""The TensorBoard monitor."""

from importlib.util import find_spec
from pathlib import Path

from schemas.errors import ConfigError
from schemas.step import EvalReport, SourceReport, StepReport

_SOURCE_METRICS = ("mean_at_n", "best_at_n", "maj_at_n", "reward", "response_tokens", "truncated")


class TensorBoardMonitor:
    """A `Monitor` that writes TensorBoard event files (extra `tensorboard`).

    Args:
        folder: Where to write; a resumed run adds files to it.
    """

    def __init__(self, folder: Path) -> None:
        self.require()
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    @staticmethod
    def require() -> None:
        """Check that TensorBoard is installed.

        Raises:
            ConfigError: It is not installed.
        """
        if find_spec("tensorboard") is None:
            raise ConfigError(
                "runtime.tensorboard is true but TensorBoard is not installed; pip install 'sluice-rl[tensorboard]'"
            )

    def log_step(self, report: StepReport) -> None:
        """Log a step's metrics, phase durations, store traffic and peak store usage, at the step."""
        for name, value in report.metrics.items():
            self._writer.add_scalar(name, value, report.step)
        for phase, seconds in report.seconds_by_phase.items():
            self._writer.add_scalar(f"seconds/{phase}", seconds, report.step)
        for stage, traffic in report.traffic_by_stage.items():
            self._writer.add_scalar(f"store/{stage}_put_bytes", traffic.put_bytes, report.step)
            self._writer.add_scalar(f"store/{stage}_read_bytes", traffic.read_bytes, report.step)
        if report.store:
            self._writer.add_scalar("store/peak_bytes", report.store.peak_bytes, report.step)
        self._writer.flush()

    def log_evaluation(self, report: EvalReport) -> None:
        """Log an evaluation's accuracy and reward, and each data source's metrics, at the policy version."""
        self._writer.add_scalar("eval/accuracy", report.accuracy, report.policy_version)
        self._writer.add_scalar("eval/reward", report.reward, report.policy_version)
        for source in report.sources:
            self._log_source(source, report.policy_version)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _log_source(self, source: SourceReport, version: int) -> None:
        for name in _SOURCE_METRICS:
            if (value := getattr(source, name)) is not None:  # None: all rewards of the source failed
                self._writer.add_scalar(f"eval/{source.data_source}/{name}", value, version)
