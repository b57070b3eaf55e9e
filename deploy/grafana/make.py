"""Print the Grafana dashboard, `deploy/grafana/sluice.json`: `make dashboard` writes it.

Its rows and panels are those of the report, from the metric catalog, and a row of the column store's own series.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args

from grafana_foundation_sdk.builders.common import StackingConfig, VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, StackingMode, VisibilityMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableRefresh

from infra.stores.prometheus import SERIES as STORE_SERIES
from schemas.metric_catalog import METRICS, PanelName, charts_of

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
UNITS = {"second": "s", "byte": "bytes", "token/second": "short"}
WIDTH, HEIGHT = 8, 7  # of 24 columns


class Series(NamedTuple):
    """A panel's series."""

    expression: str
    meaning: str
    unit: str
    label: str | None = None  # in which its members differ


STORE = (
    ("num_bytes", "peak_bytes", "capacity_bytes"),
    ("open_steps",),
    ("put_bytes",),
    ("read_bytes",),
    ("num_rows",),
)
ROWS: Mapping[str, Sequence[Sequence[str]]] = {  # the metrics of each panel
    **{panel: [[spec.name for spec in chart] for chart in charts_of(panel)] for panel in get_args(PanelName)},
    "Store": STORE,
}
STACKED = "step/<phase>_seconds"


def series_of(row: str, name: str) -> Series:
    """Return the series of a metric, or in the row `Store` of a figure of the column store."""
    chosen = '{run_id=~"$run_id"}'
    if row == "Store":
        store = STORE_SERIES[name]
        exported = f"ray_{store.name}_total" if store.is_counter else f"ray_{store.name}"
        expression = f"sum by (run_id, stage) (rate({exported}{chosen}[$__rate_interval]))"
        unit = "bytes" if name.endswith("_bytes") else "short"
        if not store.is_counter:
            return Series(f"max by (run_id) ({exported}{chosen})", store.meaning, unit)
        return Series(expression, f"{store.meaning} Per second.", "binBps", "stage")
    spec = METRICS[name]
    label = name.partition("<")[2].partition(">")[0] or None
    labels = "run_id" if label is None else f"run_id, {label}"
    unit = UNITS.get(spec.unit, "short")
    return Series(f"max by ({labels}) (ray_{spec.series}{chosen})", spec.meaning, unit, label)


def panel_of(row: str, names: Sequence[str]) -> Panel:
    """Return the panel of some metrics over time."""
    every = {name: series_of(row, name) for name in names}
    legend = VizLegendOptions().show_legend(True).placement(LegendPlacement.BOTTOM).display_mode(LegendDisplayMode.LIST)
    panel = Panel().title(", ".join(names)).description(" ".join(each.meaning for each in every.values()))
    panel = panel.unit(every[names[0]].unit).datasource(SOURCE).span(WIDTH).height(HEIGHT).legend(legend)
    panel = panel.show_points(VisibilityMode.AUTO).fill_opacity(10 if STACKED in names else 0)
    if STACKED in names:
        panel = panel.stacking(StackingConfig().mode(StackingMode.NORMAL))
    for number, (name, series) in enumerate(every.items()):
        parts = ["{{run_id}}", *([f"{{{{{series.label}}}}}"] * bool(series.label)), *([name] * (len(every) > 1))]
        query = Dataquery().expr(series.expression).legend_format(" ".join(parts)).ref_id(chr(ord("A") + number))
        panel = panel.with_target(query.datasource(SOURCE).range())
    return panel


def dashboard() -> str:
    """Return the dashboard's JSON."""
    run = METRICS["step"].series
    made = (
        Dashboard("Sluice")
        .uid("sluice")
        .tags(["sluice", "grpo"])
        .refresh("30s")
        .time("now-6h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            QueryVariable("run_id")
            .label("Run")
            .datasource(SOURCE)
            .query(f"label_values(ray_{run}, run_id)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
        )
    )
    for row, panels in ROWS.items():
        made = made.with_row(Row(row))
        for names in panels:
            made = made.with_panel(panel_of(row, names))
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


if __name__ == "__main__":
    print(dashboard(), end="")
