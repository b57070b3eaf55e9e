"""What the pages name exists: paths, modules, commands and options, config keys, metrics, errors and tests."""

import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from flows.cli.main import app
from schemas import errors
from schemas.errors import MetricError
from schemas.metric_catalog import METRICS, metric_spec

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
GENERATED = ("configuration", "commands", "metrics", "columns")
PACKAGES = ("schemas", "rl_core", "infra", "tasks", "flows", "benchmarks", "tests")
INVENTED = {"rl_core/advantages/median.py", "optim.lrr"}  # a recipe's new file, and a misspelled key

CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
SOURCE_PATH = re.compile(rf"(?<![\w/.-])((?:{'|'.join(PACKAGES)})/[\w/.-]*\w)")
PYTHON_PATH = re.compile(r"(?<![\w/.-])(\w[\w-]*/[\w/-]+\.py)\b")
MODULE = re.compile(r"python -m ((?:" + "|".join(PACKAGES) + r")[\w.]*)")
COMMAND = re.compile(r"\bsluice ([a-z][\w-]*)([^\n#|]*)")
OPTION = re.compile(r"(?<!\S)(--[a-z][\w-]*)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
DOTTED = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z_]+)+)(?![\w./(:-])")
SLASHED = re.compile(r"(?<![\w./-])([a-z_]+/[a-z_]+)(?![\w./-])")


@pytest.fixture(params=PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def code(page: Path) -> list[str]:
    """Return the page's code blocks and code spans."""
    return [block or span for block, span in CODE.findall(page.read_text())]


@cache
def hooks() -> ModuleType:
    """Load `docs/hooks.py`, which makes the generated pages."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def commands() -> dict[str, Any]:
    return typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_paths_exist(code: list[str]) -> None:
    named = {path for part in code for path in SOURCE_PATH.findall(part) + PYTHON_PATH.findall(part)}
    assert not [path for path in sorted(named - INVENTED) if not (ROOT / path).exists()]


def test_links_lead_to_files(page: Path) -> None:
    generated = {ROOT / "docs" / "reference" / f"{name}.md" for name in GENERATED}
    paths = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
    targets = {path: (page.parent / path).resolve() for path in paths if path}
    assert not [path for path, target in targets.items() if not target.exists() and target not in generated]


def test_modules_exist(code: list[str]) -> None:
    named = {module for part in code for module in MODULE.findall(part)}
    assert not [module for module in named if importlib.util.find_spec(module) is None]


def test_commands_and_their_options_exist(code: list[str]) -> None:
    used = [use for part in code for use in COMMAND.findall(part.replace("\\\n", " "))]
    assert not [name for name, _ in used if name not in commands()]
    for name, rest in used:
        parts = [commands()[name], *getattr(commands()[name], "commands", {}).values()]  # a group's have their own
        options = {option for part in parts for parameter in part.params for option in parameter.opts}
        if name == "bench":  # each benchmark has options of its own
            benchmark = rest.split()[0].replace("-", "_") if rest.split() else "__init__"
            assert benchmark.isupper() or list((ROOT / "benchmarks").glob(f"{benchmark}*")), benchmark
        else:
            assert set(OPTION.findall(rest)) <= options | {"--help"}, f"sluice {name}{rest}"


def test_config_keys_exist(code: list[str]) -> None:
    page = hooks().configuration_page()
    sections = re.findall(r"^## `\[+(\w+)\]+`", page, re.MULTILINE)
    keys = {f"{name}.kind" for name in sections} | set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE))
    named = {key for part in code for key in DOTTED.findall(part) if key.split(".")[0] in sections}
    files = {name for name in named if name.endswith((".arrow", ".json", ".py", ".toml"))}
    free = {key for key in named if key.startswith("reward.parts.")}  # the user's own names
    assert not named - keys - files - free - INVENTED


def test_metrics_exist(code: list[str]) -> None:
    families = {name.split("/")[0] for name in METRICS if "/" in name}
    named = {name for part in code for name in SLASHED.findall(part) if name.split("/")[0] in families}
    unknown = []
    for name in named:
        try:
            metric_spec(name)
        except MetricError:
            unknown.append(name)
    assert not unknown


def test_errors_exist(code: list[str]) -> None:
    named = {name for part in code for name in re.findall(r"(?<![\w.])[A-Z]\w+Error\b", part)}
    assert not [name for name in named if not hasattr(errors, name)]


def test_tests_exist(code: list[str]) -> None:
    named = {name for part in code for name in re.findall(r"(?<![\w/])test_\w+(?!\w*\.py)\b", part)}
    defined = {name for path in ROOT.glob("tests/**/*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert not {name for name in named if not (name in defined or list(ROOT.glob(f"tests/**/{name}.py")))}


def test_pages_load_nothing_from_elsewhere() -> None:
    for page in ROOT.glob("docs/**/*.md"):
        assert "```mermaid" not in page.read_text(), f"{page}: the theme loads Mermaid from elsewhere; draw an SVG file"
        assert not re.search(r"!\[[^\]]*\]\(\w+://|<(script|iframe|img)\b", page.read_text()), page


def test_the_layer_diagram_has_every_package() -> None:
    drawn = set(re.findall(r"[\w/]+", (ROOT / "docs" / "img" / "layers.svg").read_text()))
    for layer in ("infra", "rl_core"):
        packages = {path.parent.name for path in (ROOT / layer).glob("*/__init__.py")}
        assert packages <= drawn, packages - drawn


def test_generated_pages_have_every_section_and_command() -> None:
    configuration, reference = hooks().configuration_page(), hooks().commands_page()
    assert "| [`grpo`](#advantage-grpo) |" in configuration
    assert all(f"## `sluice {name}`" in reference for name in commands())
    assert hooks().metrics_page().count("\n| `") == len(METRICS)
