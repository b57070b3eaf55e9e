"""What the pages name exists: paths, modules, classes, commands and options, config keys, metrics, errors and tests."""

import ast
import importlib.util
import re
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import typer

from flows.cli.main import app
from schemas import errors
from schemas.config.advantage import AdvantageConfig
from schemas.config.changes import CHANGEABLE, FIXED, OF_PARTS, is_changeable
from schemas.config.loss import CorrectionConfig
from schemas.config.monitor import MonitorConfig
from schemas.config.reward import RewardConfig
from schemas.errors import MetricError
from schemas.metric_catalog import METRICS, metric_spec
from tests.support.configs import kinds_of

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
GENERATED = ("configuration", "commands", "metrics", "columns")
PACKAGES = ("schemas", "rl_core", "infra", "tasks", "flows", "benchmarks", "tests")
INVENTED = {"rl_core/advantages/median.py", "optim.lrr"}  # a recipe's new file, and a misspelled key
UNIONS = {
    "advantage": AdvantageConfig,
    "correction": CorrectionConfig,
    "reward": RewardConfig,
    "monitors": MonitorConfig,
}
OF_OTHERS = {  # members of other libraries' classes
    *("AgentLoopBase.run", "AgentLoopOutput.response_mask", "Dataset.save_to_disk"),
    "GRPOTrainer._generate_and_score_completions",
}

CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
SOURCE_PATH = re.compile(rf"(?<![\w/.-])((?:{'|'.join(PACKAGES)})/[\w/.-]*\w)")
PYTHON_PATH = re.compile(r"(?<![\w/.-])(\w[\w-]*/[\w/-]+\.py)\b")
MODULE = re.compile(r"python -m ((?:" + "|".join(PACKAGES) + r")[\w.]*)")
COMMAND = re.compile(r"\bsluice ([a-z][\w-]*)([^\n#|]*)")
OPTION = re.compile(r"(?<!\S)(--[a-z][\w-]*)")
MEMBER = re.compile(r"([A-Z]\w*[a-z]\w*)\.([a-z_]\w*)(?:\(.*\))?")
FILE = rf"`((?:{'|'.join(PACKAGES)})/[\w/]+\.py)`"
PLACED = re.compile(rf"`(\w[\w.]*)`(?:, in the stage \w+)?,? (?:in|of|\|) {FILE}")
LISTED = re.compile(rf"{FILE}: `(\w[\w.]*)`")
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


class Definition(NamedTuple):
    """What defines a name; only a class has members, its own, and bases."""

    members: set[str]
    bases: list[str]


@cache
def definitions() -> dict[str, dict[str, Definition]]:
    """Return the names that each module defines, by the module's path."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {
        str(path.relative_to(ROOT)): {
            name: _definition(statement) for statement in ast.parse(path.read_text()).body for name in _names(statement)
        }
        for path in paths
    }


def _definition(node: ast.stmt) -> Definition:
    if not isinstance(node, ast.ClassDef):
        return Definition(set(), [])
    stored = (part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store))
    attributes = {part.attr for part in stored if isinstance(part.value, ast.Name) and part.value.id == "self"}
    members = {name for statement in node.body for name in _names(statement)}
    return Definition(members | attributes, [base.id for base in node.bases if isinstance(base, ast.Name)])


def _names(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines: a function, a class, or variables."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return []
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]


@cache
def members_of(name: str) -> set[str]:
    """Return the members of the classes of this name, inherited ones included; none if there is no such class."""
    classes = [module[name] for module in definitions().values() if name in module]
    bases = {base for found in classes for base in found.bases}
    return set[str]().union(*(found.members for found in classes), *map(members_of, bases - {name}))


def is_defined(name: str, path: str) -> bool:
    owner, _, member = name.partition(".")
    return owner in definitions()[path] and (not member or member in members_of(owner))


def test_members_of_classes_exist(page: Path) -> None:
    """A span such as `RolloutShard.keep` names a method, a field or a property of that class."""
    named = {found.groups() for _, span in CODE.findall(page.read_text()) if (found := MEMBER.fullmatch(span))}
    assert not {f"{owner}.{name}" for owner, name in named if name not in members_of(owner)} - OF_OTHERS


def test_names_are_defined_where_the_page_says(page: Path) -> None:
    """That is: `NAME` in `PATH`, `PATH`: `NAME`, and a name and a path in cells of a table next to each other."""
    text = page.read_text()
    placed = PLACED.findall(text) + [(name, path) for path, name in LISTED.findall(text)]
    assert not [f"{name} in {path}" for name, path in placed if not is_defined(name, path)]


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


def test_the_table_of_changes_has_every_key_that_a_resume_may_change() -> None:
    table = (ROOT / "docs" / "fault-tolerance.md").read_text().partition("| may change |")[2].partition("\n\n")[0]
    keys, section = set[str](), ""
    for name in re.findall(r"`([\w.*]+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:])):
        key = name if is_changeable(name) or name in FIXED else f"{section}.{name}"  # of the section of the one before
        section = section if key != name else name.rpartition(".")[0]
        keys.add(key.removesuffix(".*"))
    assert {key for key in keys if not is_changeable(key)} == {*FIXED}
    assert set(CHANGEABLE) <= keys
    of_parts = {key for key in keys if OF_PARTS.fullmatch(key)}
    assert {key.rpartition(".")[2] for key in of_parts} == set(re.findall(r"[a-z_]{3,}(?=[|)]|$)", OF_PARTS.pattern))


def test_pages_load_nothing_from_elsewhere() -> None:
    for page in ROOT.glob("docs/**/*.md"):
        assert "```mermaid" not in page.read_text(), f"{page}: the theme loads Mermaid from elsewhere; draw an SVG file"
        assert not re.search(r"!\[[^\]]*\]\(\w+://|<(script|iframe|img)\b", page.read_text()), page


def test_the_layer_diagram_has_every_package() -> None:
    drawn = set(re.findall(r"[\w/]+", (ROOT / "docs" / "img" / "layers.svg").read_text()))
    for layer in ("infra", "rl_core"):
        packages = {path.parent.name for path in (ROOT / layer).glob("*/__init__.py")}
        assert packages <= drawn, packages - drawn


def test_the_tables_of_floors_have_every_package() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract.get("containers") == ["infra"]]
    floors = [set(re.findall(r"\w+", layer)) for layer in layers[:-1]]  # the last is a module
    table = (ROOT / "docs" / "architecture.md").read_text().partition("| floor | packages |")[2].partition("\n\n")[0]
    assert [set(re.findall(r"`(\w+)`", row)) for row in table.splitlines()[2:]] == floors
    (row,) = re.findall(r"^\| `infra` \|([^|]*)\|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert [set(re.findall(r"\w+", floor)) for floor in row.split("<-")][::-1] == floors


def test_pages_with_a_table_of_kinds_have_every_kind() -> None:
    named = [name for page in ROOT.glob("docs/**/*.md") for name in hooks().KINDS.findall(page.read_text())]
    assert set(named) == set(UNIONS)
    for name in named:
        rows = list(hooks()._kinds(name, "page.md"))[2:]
        assert [row.partition("](")[0] for row in rows] == [f"| [`{kind}`" for kind in kinds_of(UNIONS[name])]


def test_generated_pages_have_every_section_and_command() -> None:
    configuration, reference = hooks().configuration_page(), hooks().commands_page()
    assert "| [`grpo`](#advantage-grpo) |" in configuration
    assert all(f"## `sluice {name}`" in reference for name in commands())
    assert hooks().metrics_page().count("\n| `") == len(METRICS)
