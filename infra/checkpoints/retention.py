"""Which checkpoint is the best one."""

from collections.abc import Sequence

from schemas.step import EvalReport


def best_version(evals: Sequence[EvalReport], versions: Sequence[int]) -> int | None:
    """Return the version with the highest held-out accuracy of those that were evaluated; the newest of equals."""
    measured = [report for report in evals if report.policy_version in versions]
    best = max(measured, key=lambda report: (report.accuracy, report.policy_version), default=None)
    return None if best is None else best.policy_version
