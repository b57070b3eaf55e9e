"""The protocol of monitors."""

from typing import Protocol

from schemas.step import EvalReport, StepReport


class Monitor(Protocol):
    """Sends a run's metrics to a service or a tool.

    A new one is a module with a class like `TensorBoardMonitor`, a setting in the config, and a line in
    `infra.monitors.open`.
    """

    def log_step(self, report: StepReport) -> None:
        """Log one finished step: its metrics, phase durations, store traffic and store usage."""
        ...

    def log_evaluation(self, report: EvalReport) -> None:
        """Log one evaluation of a policy version on held-out prompts."""
        ...

    def close(self) -> None:
        """Deliver everything logged, and release what the monitor holds."""
        ...
