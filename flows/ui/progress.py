"""Text for steps, evaluations and finished runs; the metric catalog defines which metrics each view shows."""

from collections.abc import Mapping, Sequence

from schemas.config.run import RunConfig
from schemas.metric_catalog import View, metrics_of
from schemas.placement import WorkerPlace
from schemas.step import EvalReport, RunSummary, SourceReport, StepReport, averaged_steps


def metric_values(metrics: Mapping[str, float], view: View) -> dict[str, str]:
    """Return a view's metrics as text, in the catalog's order, without those that the step lacks."""
    return {spec.name: spec.show(metrics[spec.name]) for spec in metrics_of(view) if spec.name in metrics}


def progress_line(report: StepReport, num_steps: int) -> str:
    """Return a step as one line: the terminal's metrics, tokens per second, and seconds per phase."""
    shown = "  ".join(f"{name} {value}" for name, value in metric_values(report.metrics, "terminal").items())
    phases = " ".join(f"{name} {seconds:.2f}" for name, seconds in report.seconds_by_phase.items())
    speed = f"{report.tokens_per_second:,.0f} tok/s"
    return f"step {report.step + 1:>3}/{num_steps}  {shown}  {speed}  {report.seconds:.2f} s: {phases}"


def progress_table(report: StepReport) -> str:
    """Return a step's UI metrics as a Markdown table, with values on the right: cells may have no space between."""
    rows = [f"| {name} | {value} |" for name, value in metric_values(report.metrics, "ui").items()]
    return "\n".join(["| metric | value |", "|---|---:|", *rows])


def place_table(places: Sequence[WorkerPlace]) -> str:
    """Return where workers compute, one line each."""
    rows = [("worker", "node", "device", "threads")]
    rows += [(place.worker, place.node, place.device, str(place.threads)) for place in places]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def sharing_line(config: RunConfig) -> str:
    """Return how the workers of a colocated run share the memory of a GPU."""
    if config.time_shares_gpus:
        return (
            "colocated: workers take turns in a GPU's memory; engines sleep during scoring and update, policy and "
            "reference are in host memory during the rollout"
        )
    return (
        "colocated: engine, policy and reference all stay in a GPU's memory, as runtime.max_staleness = 1 has them "
        "compute at the same time"
    )


def variance_warning(reports: Sequence[StepReport], run: str) -> str | None:
    """Return what to say if all groups of a run's first steps have zero variance; None if one of them has some."""
    if not reports or any(report.metrics.get("groups/zero_variance") != 1 for report in reports):
        return None
    rewards = sorted({f"{report.metrics['reward']:.3f}" for report in reports})
    return (
        f"all groups of the first {len(reports)} steps have zero variance: the responses to a prompt got equal rewards "
        f"(mean {', '.join(rewards)}), so that nothing was learned from them; look at some with `sluice inspect "
        f"{run}`: either the reward doesn't tell them apart, or the prompts are too hard or too easy for the model"
    )


def eval_lines(report: EvalReport) -> list[str]:
    """Return one line per data source of an evaluation; none if they would only repeat the overall accuracy."""
    return [f"  {name}: {value}" for name, value in source_rows(report)]


def source_rows(report: EvalReport) -> list[tuple[str, str]]:
    """Return each data source's name and figures; none for a single source with one sample per prompt."""
    if len(report.sources) < 2 and report.samples_per_prompt == 1:
        return []
    return [(source.data_source, _source_figures(source, report.samples_per_prompt)) for source in report.sources]


def summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """Return the figures of a finished run, each with its name."""
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary.seconds_by_phase.items())
    averaged = averaged_steps(summary.steps)
    span = f"mean of first {averaged} → last {averaged} steps"
    changes = {
        f"reward, {span}": (summary.reward_first, summary.reward_last),
        f"cross-entropy, {span}": (summary.loss_first, summary.loss_last),
        "held-out loss, before → after": (summary.held_out_loss_before, summary.held_out_loss_after),
        "held-out accuracy, before → after": (summary.accuracy_before, summary.accuracy_after),
    }
    return [
        ("steps", str(summary.steps)),
        *(
            (name, f"{first:.3f} → {last:.3f}")
            for name, (first, last) in changes.items()
            if first is not None and last is not None
        ),
        ("seconds", f"{summary.seconds:.1f}"),
        ("tokens per second", f"{summary.tokens_per_second:,.0f}"),
        ("seconds by phase", phases),
        ("store bytes at the end", str(summary.store_bytes_at_end)),
    ]


def _source_figures(source: SourceReport, n: int) -> str:
    shown = {f"mean@{n}": source.mean_at_n, f"best@{n}": source.best_at_n, f"maj@{n}": source.maj_at_n}
    figures = [f"{name} {'-' if value is None else format(value, '.3f')}" for name, value in shown.items()]
    failed = f", {source.num_failed} rewards failed" if source.num_failed else ""
    return (
        f"{'  '.join(figures)}  ({source.num_prompts} prompts, {source.response_tokens:.1f} tokens, "
        f"{source.truncated:.0%} truncated{failed})"
    )
