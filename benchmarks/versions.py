"""The tests with the oldest and the newest packages that Sluice allows, each set in an environment of its own.

    make versions    # sluice bench versions --page docs/installation.md

The ranges are those of `pyproject.toml`: to try a newer version, widen its range first. A set is named by an end, or by
a package and an end, such as `torch-newest`: the other packages then have the versions of `constraints.txt`.
"""

import logging
import os
import re
import shutil
import subprocess
import tomllib
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from xml.etree import ElementTree

from packaging.requirements import Requirement

from benchmarks.command import Benchmark, Report, choose, option
from infra.engines.vllm.installation import OLDEST, find_vllm
from schemas.errors import RunError

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]
PACKAGES = ("prefect", "ray", "torch", "transformers")
ENDS = ("oldest", "newest")
FASTAPI = "fastapi<0.140"  # that of Prefect 3.8's time, whose server can't start with the newest
TEST_PACKAGES = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
EXTRAS = "lora,reasoning-gym,tensorboard"
_UNIT, _SERVICES, _RUNS = "tests/unit", "tests/services", "tests/end_to_end"
PARTS = {  # the tests that depend most on these packages; `vllm` with an engine in an environment of its own
    "scoring": tuple(
        f"{_UNIT}/rl_core/test_{name}.py" for name in ("scoring", "losses", "structure", "router_replay", "activations")
    ),
    "models": tuple(
        f"{_UNIT}/infra/test_{name}.py"
        for name in ("models", "engine", "families", "family_folders", "chat_templates", "checkpoint", "lora")
    ),
    "stages": (f"{_SERVICES}/test_services.py", f"{_SERVICES}/test_stages.py"),
    "runs": (f"{_RUNS}/test_train.py", f"{_RUNS}/test_kill.py"),
    "vllm": (f"{_SERVICES}/test_vllm_engine.py",),
}
MAX_REASON = 500  # characters of why a test failed
COLUMNS = ("set", *PACKAGES, "vLLM", *PARTS, "tried")
_LIST = "import json, sys; from importlib.metadata import version as v; print(*(v(name) for name in sys.argv[1:]))"


@dataclass(frozen=True)
class Plan:
    """What to try."""

    sets: tuple[str, ...] = option(ENDS, "oldest, newest, or one package's, such as torch-newest; comma-separated")
    parts: tuple[str, ...] = option(tuple(PARTS), f"the tests: {', '.join(PARTS)}; comma-separated")
    folder: str = option("build/versions", "where the environments are made, of up to 9 GB a set; default: %(default)s")
    page: str = option("", "a page with the table, whose rows of these sets are replaced")
    keep: bool = option(False, "use the environments that are there, and delete none")


@dataclass(frozen=True)
class Counts:
    """The outcomes of a part's tests."""

    passed: int  # number of tests that passed
    failed: tuple[str, ...]  # names of those that failed
    skipped: int  # number of those that were skipped
    reason: str = ""  # why the first one failed, in a line; empty if none has


def measure(plan: Plan) -> Report:
    """Return, per set, the versions that pip chose, the outcomes by part, and when it was.

    Raises:
        ConfigError: There is no such set or part.
        RunError: pip failed.
    """
    choose("sets", plan.sets, [*ENDS, *(f"{package}-{end}" for package in PACKAGES for end in ENDS)])
    choose("parts", plan.parts, PARTS)
    rows: Report = {}
    for name in plan.sets:
        rows[name] = row = _try(name, plan)
        if plan.page:
            page = Path(plan.page)
            page.write_text(replace_row(page.read_text(), cells(name, row)))
    return rows


def pins(name: str) -> list[str]:
    """Return what pip is asked for besides the project, for a set of versions."""
    package, _, end = name.rpartition("-")
    changed = (package,) if package else PACKAGES
    tried = (Requirement(line.partition("#")[0]) for line in _lines(ROOT / "constraints.txt"))
    fixed = [str(each) for each in tried if each.name in PACKAGES and each.name not in changed]
    oldest = [f"{each}=={_oldest(each)}" for each in changed] if end == "oldest" else []
    return fixed + oldest + ([FASTAPI] if any("prefect==" in each for each in oldest) else [])


def cells(name: str, row: Report) -> list[str]:
    """Return a set's row of the table."""
    versions, parts = row["versions"], row["parts"]
    outcomes = [_outcome(parts[part]) if part in parts else "–" for part in PARTS]
    return [f"`{name}`", *(versions.get(each, "–") for each in (*PACKAGES, "vllm")), *outcomes, str(row["tried"])]


def replace_row(page: str, row: Sequence[str]) -> str:
    """Return a page in whose table a row stands in place of the one that begins with the same cell, or last.

    Raises:
        RunError: The page has no such table.
    """
    line = f"| {' | '.join(row)} |\n"
    head = re.search(
        rf"^\| {' | '.join(COLUMNS)} \|\n\|[-| ]+\|\n((?:\|.*\n)*)".replace(" | ", r" \| "), page, re.MULTILINE
    )
    if head is None:
        raise RunError(f"the page has no table with the columns {', '.join(COLUMNS)}")
    rows = head[1].splitlines(keepends=True)
    same = [number for number, each in enumerate(rows) if each.startswith(f"| {row[0]} |")]
    rows = [line if number in same else each for number, each in enumerate(rows)] + ([] if same else [line])
    return page[: head.start(1)] + "".join(rows) + page[head.end(1) :]


def render(report: Report) -> str:
    """Return the table, and the names of the tests that failed."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(cells(name, row))} |" for name, row in report.items()]
    lines += [f"{name}: {test}" for name, row in report.items() for test in _failures(row)]
    lines += [f"{name}: {part} failed first with: {why}" for name, row in report.items() for part, why in _reasons(row)]
    return "\n".join(lines)


def is_passed(report: Report) -> bool:
    """Return whether no test failed."""
    return not any(_failures(row) for row in report.values())


def _try(name: str, plan: Plan) -> dict[str, object]:
    folder = Path(plan.folder).absolute()
    logger.info("%s: installing into %s", name, folder)
    started = perf_counter()
    python, engine = _environment(folder / name, plan), folder / f"{name}-vllm"
    _call([python, "-m", "pip", "install", "--quiet", "-e", f".[{EXTRAS}]", *TEST_PACKAGES, *pins(name)])
    versions = dict(zip(PACKAGES, _call([python, "-c", _LIST, *PACKAGES]).split(), strict=True))
    variables = {}
    if "vllm" in plan.parts:
        variables["ENGINE_PYTHON"] = str(engine / "bin" / "python")
        oldest = ["--version", "{}.{}".format(*OLDEST)] if name == "oldest" else []
        command = [python, "-m", "flows.cli.main", "engine", "install", "vllm", "--cpu", *oldest]
        _call([*command, "--folder", str(engine)])
        versions["vllm"] = find_vllm(variables["ENGINE_PYTHON"]).version
    logger.info("%s: installed in %.0f s: %s", name, perf_counter() - started, versions)
    parts = _test(python, plan.parts, folder / f"{name}.xml", variables)
    if not plan.keep:
        for each in (folder / name, engine):
            if each.exists():
                shutil.rmtree(each)
    tree = _call(["git", "describe", "--always", "--dirty"]).strip()
    outcomes = {part: asdict(counts) for part, counts in parts.items()}
    logger.info("%s: %s", name, outcomes)
    return {"versions": versions, "parts": outcomes, "tried": f"{datetime.now(UTC):%Y-%m-%d}, tree {tree}"}


def _environment(folder: Path, plan: Plan) -> str:
    """Make a virtual environment; return its interpreter."""
    if not (plan.keep and folder.exists()):
        venv.create(folder, clear=True, symlinks=True, with_pip=True)
    return str(folder / "bin" / "python")


def _test(python: str, parts: Sequence[str], results: Path, variables: Mapping[str, str]) -> dict[str, Counts]:
    """Run the tests of parts, two files at a time; nothing of what this process sets is theirs."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAY_", "PREFECT_"))}
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--import-mode=importlib", "-m", "not extended"]
    spread = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", f"--junitxml={results}"]
    command = [python, "-m", "pytest", *options, *spread, *(path for part in parts for path in PARTS[part])]
    done = subprocess.run(command, cwd=ROOT, env=outer | variables, capture_output=True, text=True, check=False)
    if not results.exists():
        raise RunError(f"{' '.join(command)} ended with {done.returncode} and no results: {done.stdout[-2000:]}")
    cases = list(ElementTree.parse(results).iter("testcase"))
    results.unlink()
    return {part: _count([case for case in cases if _is_of(case, part)]) for part in parts}


def _is_of(case: ElementTree.Element, part: str) -> bool:
    module = case.get("classname") or case.get("name") or ""  # a module that can't be imported is a name
    return module.startswith(tuple(path.removesuffix(".py").replace("/", ".") for path in PARTS[part]))


def _count(cases: Sequence[ElementTree.Element]) -> Counts:
    bad = tuple(f"{case.get('classname')}::{case.get('name')}" for case in cases if _has(case, "failure", "error"))
    skipped = sum(_has(case, "skipped") for case in cases)
    found = (case.find(kind) for case in cases for kind in ("failure", "error"))
    reason = next((" ".join(each.get("message", "").split())[:MAX_REASON] for each in found if each is not None), "")
    return Counts(len(cases) - len(bad) - skipped, bad, skipped, reason)


def _has(case: ElementTree.Element, *kinds: str) -> bool:
    return any(case.find(kind) is not None for kind in kinds)


def _oldest(package: str) -> str:
    """Return the lowest version of a package that the project allows."""
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        requirement = Requirement(text)
        if requirement.name == package:
            return next(each.version for each in requirement.specifier if each.operator in (">=", "=="))
    raise AssertionError(package)


def _lines(path: Path) -> Iterator[str]:
    return (line for line in path.read_text().splitlines() if line and not line.startswith("#"))


def _outcome(counts: Report) -> str:
    passed, failed = counts["passed"], counts["failed"]
    return f"{passed} passed" + (f", {len(failed)} failed" if failed else "")


def _failures(row: Report) -> list[str]:
    return [name for counts in row["parts"].values() for name in counts["failed"]]


def _reasons(row: Report) -> list[tuple[str, str]]:
    return [(part, counts["reason"]) for part, counts in row["parts"].items() if counts.get("reason")]


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


BENCHMARK = Benchmark(Plan(), Plan(sets=("newest",), parts=("scoring",)), measure, render, is_passed)
