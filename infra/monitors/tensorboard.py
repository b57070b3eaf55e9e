"""Optional metric sinks beside `metrics.jsonl`."""

from importlib.util import find_spec
from pathlib import Path

from schemas.errors import ConfigError
from schemas.step import EvalReport, StepReport


class TensorBoardMonitor:
    """TensorBoard event files under the run directory (extra `tensorboard`)."""

    def __init__(self, run_path: Path) -> None:
        self.require()
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_path / "tensorboard"))

    @staticmethod
    def require() -> None:
        """Check that TensorBoard is there.

        Raises:
            ConfigError: It is not installed.
        """
        if find_spec("tensorboard") is None:
            raise ConfigError(
                "runtime.tensorboard is true but TensorBoard is not installed; pip install 'sluice-rl[tensorboard]'"
            )

    def write(self, report: StepReport) -> None:
        """Write one step's metrics, phase seconds and store figures."""
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

    def write_eval(self, report: EvalReport) -> None:
        """Write an evaluation: its accuracy and each data source's figures, at the policy's version."""
        version = report.policy_version
        self._writer.add_scalar("eval/accuracy", report.accuracy, version)
        self._writer.add_scalar("eval/reward", report.reward, version)
        for source in report.sources:
            for name in ("mean_at_n", "best_at_n", "maj_at_n", "reward", "response_tokens", "truncated"):
                if (value := getattr(source, name)) is not None:
                    self._writer.add_scalar(f"eval/{source.data_source}/{name}", value, version)
        self._writer.flush()
