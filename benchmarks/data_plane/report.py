"""The report as tables and as a chart."""

from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

OPERATIONS = {
    "put_ms": "put",
    "read_ms": "read",
    "permuted_read_ms": "permuted read",
    "append_ms": "append",
    "round_trip_ms": "put + read",
}
COLORS = ("#1f4e79", "#4f9d9d", "#e0a63c", "#b5583f")


def render(report: dict[str, Any]) -> Group:
    """Return the report as tables and text."""
    batch, large = report["batch"], report["large"]
    lines = [
        f"put + read: TransferQueue takes {report['ratio_vs_transfer_queue']:.1f} times as long, "
        f"the best padded path ({report['best_padded']}) {report['ratio_vs_best_padded']:.1f} times",
        f"stored bytes over valid bytes: {report['stored_ratio']:.3f}",
        f"{large['valid_bytes'] / 1e6:.0f} MB: put {large['put_ms']:.0f} ms, warm memcpy {large['memcpy_ms']:.0f} ms: "
        f"{100 * report['memcpy_fraction_400mb']:.0f} % of its speed; read {report['read_400mb_ms']:.1f} ms "
        f"(after {large['warm_ups']} warm-up rounds, since the first puts fault in cold pages)",
        f"orchestration: put {report['breakdown']['orchestration_put_ms']:.2f} ms, "
        f"read {report['breakdown']['orchestration_read_ms']:.2f} ms",
    ]
    title = (
        f"{batch['rows']} rows, {batch['tokens']} tokens, {batch['valid_bytes'] / 1e6:.1f} MB valid, "
        f"{batch['padded_bytes'] / 1e6:.1f} MB padded; medians of {batch['repetitions']}, in ms"
    )
    return Group(_paths_table(title, report["paths"]), _breakdown_table(report["breakdown"]), Text("\n".join(lines)))


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw every path's times as bars on a logarithmic scale, slowest first."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sluice"  # equal figures give equal files
    from matplotlib import pyplot as plt

    timed = {name: figures for name, figures in report["paths"].items() if figures["round_trip_ms"] is not None}
    names = sorted(timed, key=lambda name: timed[name]["round_trip_ms"])  # the axis counts upwards
    operations = [operation for operation in OPERATIONS if operation != "round_trip_ms"]
    height = 0.8 / len(operations)
    figure, axes = plt.subplots(figsize=(9, 0.4 + 0.85 * len(names)), layout="constrained")
    for index, (operation, color) in enumerate(zip(operations, COLORS, strict=True)):
        values = [timed[name][operation] for name in names]
        positions = [row + 0.4 - (index + 0.5) * height for row in range(len(names))]
        bars = axes.barh(positions, values, height, color=color, label=OPERATIONS[operation])
        axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=2, fontsize=7, color="#333333")
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_yticks(range(len(names)), names)
    axes.get_yticklabels()[names.index("sluice")].set_fontweight("bold")
    axes.set_xlabel("milliseconds, logarithmic; lower is better")
    batch = report["batch"]
    axes.set_title(
        f"One batch of {batch['rows']} rows and {batch['tokens'] // 1000} k tokens, from one process to another",
        loc="left",
        fontsize=11,
    )
    figure.legend(frameon=False, loc="outside lower center", ncols=len(operations), fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _paths_table(title: str, paths: dict[str, dict[str, Any]]) -> Table:
    table = Table("path", *OPERATIONS.values(), "MB", title=title, title_justify="left")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for name, figures in paths.items():
        times = [_number(figures[operation]) for operation in OPERATIONS]
        table.add_row(name, *times, f"{figures['bytes'] / 1e6:.1f}")
    return table


def _breakdown_table(breakdown: dict[str, Any]) -> Table:
    table = Table("sluice", "parts, in ms", title="time by part", title_justify="left")
    for operation, parts in breakdown.items():
        if isinstance(parts, dict):
            table.add_row(operation, ", ".join(f"{name} {value:.2f}" for name, value in parts.items()))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
