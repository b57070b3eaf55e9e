"""A report page: its parts, and how they become one HTML file with everything inlined.

Texts may come from a model: the template escapes every value, labels of charts are escaped here, and a content security
policy lets the browser run no script but the page's own.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from flows.report.samples import SampleView
from infra.storage import places
from infra.storage.runs import open_folder


@dataclass(frozen=True)
class Chart:
    """A chart with its heading."""

    title: str
    figure: go.Figure
    wide: bool = False  # as wide as the page


@dataclass(frozen=True)
class Table:
    """A table; with `is_folded`, only its title is shown until it is opened."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    title: str = ""
    is_folded: bool = False


@dataclass(frozen=True)
class Panel:
    """A section of the page; `note` explains it, or says why it has nothing to show."""

    title: str
    note: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    samples: Sequence[SampleView] = ()


def label(text: str) -> str:
    """Return text for a chart, where plotly interprets some HTML tags."""
    return escape(text)


def write_page(place: str, title: str, verdict: str, alarms: Sequence[str] | None, panels: Sequence[Panel]) -> str:
    """Write a page, and return where it is.

    Args:
        place: The file, a local path or any fsspec URL.
        title: Its heading.
        verdict: One line.
        alarms: What stands out; shown below the verdict. None: nothing was looked for.
        panels: In order.
    """
    charts = [chart for panel in panels for chart in panel.charts]
    numbers = {id(chart): f"chart-{number}" for number, chart in enumerate(charts)}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html").render(
        title=title,
        verdict=verdict,
        alarms=alarms,
        panels=panels,
        chart_id=lambda chart: numbers[id(chart)],
        nonce=secrets.token_urlsafe(16),
        library=get_plotlyjs(),
        figures=",".join(f'"{numbers[id(chart)]}":{chart.figure.to_json()}' for chart in charts),
    )
    place = places.resolve(place)
    folder, name = places.split(place)
    open_folder(folder).write(name, page.encode())
    return place
