"""The report as a table and as a chart."""

from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

COLORS = {
    "packed": "#1f4e79",
    "padded": "#b5583f",
    "row_by_row": "#e0a63c",
    "dense": "#4f9d9d",
    "dense_equal_count": "#9cc9c9",
}
TITLE = "real tokens per second, peak memory, and the speed relative to equal rows: of the same work, of the same count"
COLUMNS = ("model", "tokens", "fill", "pass", "path", "tok/s", "MB", "ideal", "count", "MFU")


def render(report: dict[str, Any]) -> Group:
    """Return the report as a table and text."""
    table = Table(*COLUMNS, title=TITLE, title_justify="left")
    for column in table.columns[5:]:
        column.justify = "right"
    for case in report["cases"]:
        table.add_row(
            case["model"],
            str(case["tokens"]),
            f"{case['fill']:.2f}",
            case["pass"],
            case["path"],
            f"{case['tokens_per_s']:.0f}",
            f"{case['peak_mb']:.0f}",
            f"{case['fraction_of_ideal']:.2f}",
            f"{case['fraction_of_equal_count']:.2f}",
            f"{case['mfu']:.2f}" if "mfu" in case else "-",
        )
    largest_difference = max(case["max_difference"] for case in report["agreement"])
    lines = [
        f"packed relative to equal rows, at least: {report['min_fraction_of_ideal']:.2f} for the same work, "
        f"{report['min_fraction_of_equal_count']:.2f} for the same count",
        f"packed relative to padded, times fill, at least: {report['min_speedup_x_fill']:.2f}",
        f"packed and padded log-probs differ by at most {largest_difference:.1e} nats",
        *(
            f"vocabulary {case['vocab_size']}, {case['tokens']} tokens: peak {case['peak_mb']:.0f} MB; "
            f"logits of {case['chunk_tokens']} tokens {case['chunk_logits_mb']:.0f}, of all {case['all_logits_mb']:.0f}"
            for case in report["vocabulary"]
        ),
    ]
    return Group(table, Text("\n".join(lines)))


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw each path's training speed by fill, at the largest number of tokens, one panel per model."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sluice"  # equal figures give equal files
    from matplotlib import pyplot as plt

    tokens = max(case["tokens"] for case in report["cases"])
    cases = [case for case in report["cases"] if case["tokens"] == tokens and case["pass"] == "train"]
    models = list(dict.fromkeys(case["model"] for case in cases))
    figure, panels = plt.subplots(1, len(models), figsize=(5 * len(models), 3.6), layout="constrained", squeeze=False)
    for axes, model in zip(panels[0], models, strict=True):
        fills = list(dict.fromkeys(case["fill"] for case in cases))
        for index, (name, color) in enumerate(COLORS.items()):
            speeds = [case["tokens_per_s"] for case in cases if (case["model"], case["path"]) == (model, name)]
            positions = [tick + 0.16 * (index - 2) for tick in range(len(fills))]
            axes.bar(positions, speeds, 0.15, color=color, label=name.replace("_", " "))
        axes.set_xticks(range(len(fills)), [f"{fill:.0%}" for fill in fills])
        axes.set_xlabel("fill: fraction of the padded rectangle that is real tokens")
        axes.set_ylabel("real tokens per second")
        axes.set_title(f"{model}: forward and backward, {tokens} tokens", loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=3, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
