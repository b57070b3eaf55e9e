"""The Grafana dashboard: it is made from the catalogs, and has the form that Grafana publishes."""

import importlib.util
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from schemas.metric_catalog import PanelName

FOLDER = Path(__file__).parents[3] / "deploy" / "grafana"


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads((FOLDER / "sluice.json").read_text())


def test_the_file_is_what_its_script_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    spec = importlib.util.spec_from_file_location("make", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    hint = "run: make dashboard"
    assert (FOLDER / "sluice.json").read_text() == make.dashboard(), hint


def test_grafanas_own_models_read_it_without_loss(dashboard: dict[str, Any]) -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder").JSONEncoder
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
    plugins.register_default_plugins()
    read = models.Dashboard.from_json(dashboard)
    assert json.loads(encoder(sort_keys=True).encode(read)) == dashboard


def test_rows_and_panels(dashboard: dict[str, Any]) -> None:
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == [*get_args(PanelName), "Store"]
    shown = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["description"] and panel["targets"] for panel in shown)
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "run_id"]
