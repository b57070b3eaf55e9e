"""Steps and evaluations as lines of text."""

from schemas.step import EvalReport, SourceReport, StepReport


def progress_line(report: StepReport, num_steps: int) -> str:
    """One step in one line: reward, response tokens, KL, tokens per second, seconds per phase."""
    metrics = report.metrics
    phases = " ".join(f"{name} {seconds:.2f}" for name, seconds in report.seconds_by_phase.items())
    kl = metrics.get("kl", metrics.get("reward/kl"))
    shown_kl = "" if kl is None else f"kl {kl:.4f}  "
    return (
        f"step {report.step + 1:>3}/{num_steps}  reward {metrics['reward']:.3f}  "
        f"response {metrics['response/tokens']:.1f} tok  {shown_kl}"
        f"{metrics['tokens'] / report.seconds:,.0f} tok/s  {report.seconds:.2f} s: {phases}"
    )


def eval_lines(report: EvalReport) -> list[str]:
    """One line per data source of an evaluation; none where they would say what its accuracy says."""
    return [f"  {name}: {value}" for name, value in source_rows(report)]


def source_rows(report: EvalReport) -> list[tuple[str, str]]:
    """Name and figures of each data source, where there are several or several samples of a prompt."""
    if len(report.sources) < 2 and report.samples_per_prompt == 1:
        return []
    return [(source.data_source, _source_figures(source, report.samples_per_prompt)) for source in report.sources]


def _source_figures(source: SourceReport, n: int) -> str:
    shown = {f"mean@{n}": source.mean_at_n, f"best@{n}": source.best_at_n, f"maj@{n}": source.maj_at_n}
    figures = [f"{name} {'-' if value is None else format(value, '.3f')}" for name, value in shown.items()]
    failed = f", {source.num_failed} rewards failed" if source.num_failed else ""
    return (
        f"{'  '.join(figures)}  ({source.num_prompts} prompts, {source.response_tokens:.1f} tokens, "
        f"{source.truncated:.0%} truncated{failed})"
    )
