"""Draw a run's reward by step as an SVG file: `draw_curve.py RUN_FOLDER OUT.svg [TITLE]`."""

import sys
from pathlib import Path

import matplotlib
from matplotlib import pyplot

from infra.storage.runs import RunDirectory


def draw(run: RunDirectory, path: Path, title: str) -> None:
    """Write the mean reward of each step's samples, and that of each evaluation, from the run's `metrics.jsonl`."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sluice", "font.size": 9})
    steps, evals = run.metrics.steps(), run.metrics.evals()
    figure, axes = pyplot.subplots(figsize=(6.4, 2.8), layout="constrained")
    axes.plot(
        [report.step + 1 for report in steps], [report.metrics["reward"] for report in steps], label="training samples"
    )
    if evals:
        versions, rewards = [report.policy_version for report in evals], [report.reward for report in evals]
        axes.plot(versions, rewards, "o", label="held-out prompts")
    axes.set(xlabel="step", ylabel="mean reward", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.patch.set_facecolor("white")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    run, out = RunDirectory.open(sys.argv[1]), Path(sys.argv[2])
    draw(run, out, " ".join(sys.argv[3:]) or run.run_id)
    print(f"drew {out} from {run.metrics}")
