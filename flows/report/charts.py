"""The charts of a report, with one look. Steps are counted from 1, as in the terminal."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import plotly.graph_objects as go

from flows.report.page import Chart, label
from schemas.step import RunEvent, StepReport
from schemas.summary import LengthHistogram

HEIGHT, TALL = 260, 340
MAX_BLOCKS, MAX_LINE_POINTS = 300, 2000
COLORS = ("#0969da", "#cf222e", "#1a7f37", "#8250df", "#bc4c00", "#57606a", "#bf3989", "#1b7c83", "#9a6700", "#6e7781")
EVENT_COLORS = {"fork": "#8250df", "resume": "#57606a", "restart": "#cf222e"}


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    has_markers: bool = False


def line_chart(title: str, lines: Iterable[Line], events: Iterable[RunEvent] = ()) -> Chart:
    """Draw lines over steps, with a vertical line at each fork, resume and restart; of long ones, every n-th point."""
    figure, drawn = go.Figure(), list(lines)
    for number, line in enumerate(drawn):
        color = COLORS[number % len(COLORS)]
        is_single = len(line.x) == 1  # a line of one point would be invisible
        stride = -(-len(line.x) // MAX_LINE_POINTS) or 1
        shown = slice((len(line.x) - 1) % stride, None, stride)  # the last one is among them
        figure.add_scatter(
            x=list(line.x[shown]),
            y=list(line.y[shown]),
            name=label(line.name),
            mode="lines+markers" if line.has_markers or is_single else "lines",
            line={"color": color, "width": 1.6},
            showlegend=len(drawn) > 1 or not title.startswith(line.name),
        )
    return Chart(title, _styled(figure, events))


def length_heat_map(title: str, histograms: Mapping[int, LengthHistogram], events: Iterable[RunEvent]) -> Chart:
    """Draw the share of each bucket of lengths, by step."""
    steps, blocks = list(histograms), _blocks(len(histograms))
    counts = [_merged([histograms[steps[at]] for at in block]) for block in blocks]
    buckets = sorted({bucket for each in counts for bucket in each})
    figure = go.Figure(
        go.Heatmap(
            x=[steps[block[-1]] for block in blocks],
            y=[_range(*bucket) for bucket in buckets],
            z=[[each[bucket] / each.total() for each in counts] for bucket in buckets],
            colorscale="Blues",
            zmin=0,
            colorbar={"tickformat": ".0%", "thickness": 10},
            hovertemplate="step %{x}: %{z:.1%} with %{y} tokens<extra></extra>",
        )
    )
    styled = _styled(figure, events, height=TALL, yaxis={"type": "category"}, hovermode="closest")
    return Chart(_of_blocks(title, blocks), styled, wide=True)


def stacked_bars(title: str, steps: Sequence[int], seconds: Mapping[str, Sequence[float]]) -> Chart:
    """Draw each step's seconds as a bar of its phases."""
    figure, blocks = go.Figure(), _blocks(len(steps))
    for number, (name, values) in enumerate(seconds.items()):
        figure.add_bar(
            x=[steps[block[-1]] for block in blocks],
            y=[fmean(values[at] for at in block) for block in blocks],
            name=label(name),
            marker={"color": COLORS[number % len(COLORS)], "line": {"width": 0}},
        )
    styled = _styled(figure, (), barmode="stack", bargap=0.1, height=TALL)
    return Chart(_of_blocks(title, blocks), styled, wide=True)


def timeline(title: str, steps: Sequence[StepReport]) -> Chart:
    """Draw when each phase of a few consecutive steps was running, in seconds after the first one's start."""
    begin = steps[0].started_at or 0.0
    spans = [((step.started_at or 0.0) - begin + span.start, span, step) for step in steps for span in step.timeline]
    figure = go.Figure()
    for number, name in enumerate(dict.fromkeys(span.name for _, span, _ in spans)):
        own = [(start, span, step) for start, span, step in spans if span.name == name]
        figure.add_bar(
            y=[label(name)] * len(own),
            x=[span.seconds for _, span, _ in own],
            base=[start for start, _, _ in own],
            orientation="h",
            name=label(name),
            showlegend=False,
            marker={"color": COLORS[number % len(COLORS)]},
            customdata=[[step.step + 1, start] for start, _, step in own],
            hovertemplate="step %{customdata[0]}: %{x:.3f} s from %{customdata[1]:.3f} s<extra>%{y}</extra>",
        )
    starts = [(step.started_at or 0.0) - begin for step in steps]
    shapes = [_vertical(start, "#8c959f") for start in starts]
    notes = [
        {"x": start, "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "left", "showarrow": False, "text": text}
        for start, text in zip(starts, (f"step {step.step + 1}" for step in steps), strict=True)
    ]
    axes = {"xaxis": {"title": {"text": "seconds"}}, "yaxis": {"autorange": "reversed", "automargin": True}}
    styled = _styled(figure, (), height=TALL, barmode="overlay", hovermode="closest", shapes=shapes, **axes)
    styled.update_layout(annotations=notes, margin={"t": 24})
    return Chart(title, styled, wide=True)


def _styled(figure: go.Figure, events: Iterable[RunEvent], **layout: Any) -> go.Figure:
    shapes = [_vertical(event.step + 0.5, EVENT_COLORS[event.kind]) for event in events if event.kind in EVENT_COLORS]
    base = {
        "template": "plotly_white",
        "height": HEIGHT,
        "margin": {"l": 50, "r": 10, "t": 10, "b": 40},
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        "hovermode": "x unified",
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"exponentformat": "power", "rangemode": "tozero"},
        "shapes": shapes,
    }
    return figure.update_layout({**base, **layout})


def _vertical(x: float, color: str) -> dict[str, Any]:
    line = {"color": color, "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def _blocks(num_steps: int) -> list[range]:
    """Cut the steps of a long run into at most `MAX_BLOCKS` blocks: a browser is slow with many bars."""
    size = -(-num_steps // MAX_BLOCKS)
    return [range(first, min(first + size, num_steps)) for first in range(0, num_steps, max(size, 1))]


def _of_blocks(title: str, blocks: Sequence[range]) -> str:
    size = len(blocks[0]) if blocks else 1
    return title if size == 1 else f"{title}, {size} steps per column"


def _merged(histograms: Sequence[LengthHistogram]) -> Counter[tuple[int, int]]:
    """Add up histograms: first token count and first one above it -> number of rows."""
    counts: Counter[tuple[int, int]] = Counter()
    for each in histograms:
        counts.update(dict(zip(zip(each.edges, each.edges[1:], strict=False), each.num_rows, strict=True)))
    return counts


def _range(first: int, stop: int) -> str:
    return str(first) if stop == first + 1 else f"{first}–{stop - 1}"
