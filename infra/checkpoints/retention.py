"""The choice of the checkpoint to keep as the best."""

from collections.abc import Sequence

from schemas.step import EvalReport


def best_version(evals: Sequence[EvalReport], versions: Sequence[int]) -> int | None:
    """Return the evaluated version with the highest held-out accuracy, the newest on a tie; None if none was."""
    measured = [report for report in evals if report.policy_version in versions]
    best = max(measured, key=lambda report: (report.accuracy, report.policy_version), default=None)
    return None if best is None else best.policy_version
