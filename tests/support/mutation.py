"""Runs the tests against each fault of `tests.support.mutants`, in a copy of the checkout that it alone changes.

    python -m tests.support.mutation [--checkout DIR] [--mutants NAME ...] [--select "PYTEST ARGUMENTS"] [--json FILE]
    python -m tests.support.mutation --check

A mutant is caught if a test fails: one of those that it names, or else one of the selection. What survives is behavior
that no test looks at. The copies are made of the files as they are in the checkout, whether committed or not.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.support.mutants import MUTANTS, Mutant

LOG, REPORT = "mutation.log", "mutation.xml"  # in a copy
PASSED, NOT_RUN = 0, (4, 5)  # exit codes of pytest; of the latter: wrong arguments, no tests
ENDING_SECONDS = 60.0  # after its report; a process that a failed test has left may keep pytest from ending


class Outcome(NamedTuple):
    """What became of a mutant; `caught_by` is the first test that failed, None if it has survived."""

    name: str
    area: str
    caught_by: str | None
    seconds: float


def changed_text(mutant: Mutant, checkout: Path) -> str:
    """Return the text of a mutant's file with the fault in it.

    Raises:
        ValueError: The text that it replaces is not there exactly once.
    """
    text = (checkout / mutant.path).read_text()
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.path} has its text {count} times, expected once: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def problem_of(mutant: Mutant, checkout: Path) -> str:
    """Return why a mutant can't be run, without running it; empty if it can."""
    try:
        compile(changed_text(mutant, checkout), mutant.path, "exec")
        hints(mutant, checkout)
    except (OSError, SyntaxError, ValueError) as error:
        return f"{mutant.name}: {error}"
    return ""


def hints(mutant: Mutant, checkout: Path) -> list[list[str]]:
    """Return pytest's arguments for each of a mutant's hints; a file that was moved is found by its name.

    Raises:
        ValueError: There is no file of the name, or there are several.
    """
    found = [shlex.split(hint) for hint in mutant.tests]
    for arguments in found:
        if not (checkout / arguments[0]).is_file():
            moved = list((checkout / "tests").rglob(Path(arguments[0]).name))
            if len(moved) != 1:
                raise ValueError(f"there is no {arguments[0]}, and {len(moved)} other files have its name")
            arguments[0] = str(moved[0].relative_to(checkout))
    return found


def copy_files(checkout: Path, folder: Path) -> None:
    """Copy the files that git tracks, and new ones that it doesn't ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=checkout, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (checkout / name).is_file():  # else it was removed, or is a folder with a repository of its own
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, folder / name, follow_symlinks=False)


def environment_of(folder: Path) -> dict[str, str]:
    """Return variables with which this interpreter and all of its children import the packages of a copy."""
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-P", "-c", "import schemas; print(schemas.__file__)"]
    found = subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True, check=True).stdout
    assert Path(found).is_relative_to(folder), f"{found} would be tested instead of the packages in {folder}"
    return variables


def run_tests(arguments: Sequence[str], folder: Path, variables: dict[str, str]) -> str | None:
    """Run pytest in a copy; return the first test that failed, None if all have passed.

    Raises:
        ValueError: The arguments are not pytest's, or select no test.
    """
    shown, (log, report) = " ".join(arguments), (folder / name for name in (LOG, REPORT))
    command = [sys.executable, "-m", "pytest", "-x", "-q", f"--junitxml={report}", *arguments]
    report.unlink(missing_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=out, stderr=out, start_new_session=True)
    try:
        while process.poll() is None and not report.exists():
            time.sleep(0.1)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
    finally:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    if code in NOT_RUN:
        raise ValueError(f"pytest {shown} has run no test:\n{log.read_text()[-2000:]}")
    return None if code == PASSED else first_failure(report) or f"{shown}: pytest ended with {code}"


def first_failure(report: Path) -> str | None:
    """Return the first failed test of a report of pytest's; None if there is none, as pytest itself has died."""
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        if case.find("failure") is not None or case.find("error") is not None:
            return f"{case.get('classname')}::{case.get('name')}".removeprefix("::")
    return None


def run_mutant(mutant: Mutant, checkout: Path, selection: Sequence[str]) -> Outcome:
    """Run a mutant's own tests, then the selection, until one fails."""
    started, caught_by = time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        copy_files(checkout, folder)
        (folder / mutant.path).write_text(changed_text(mutant, folder))
        variables = environment_of(folder)
        for arguments in [*hints(mutant, folder), *([selection] if selection else [])]:
            if (caught_by := run_tests(arguments, folder, variables)) is not None:
                break
    return Outcome(mutant.name, mutant.area, caught_by, round(time.monotonic() - started, 1))


def table(outcomes: Sequence[Outcome]) -> str:
    """Return how many mutants of each area were caught, and which were not."""
    lines = [f"{'area':<14}{'mutants':>8}{'caught':>8}  survived"]
    for area in dict.fromkeys(outcome.area for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.area == area]
        survived = [outcome.name for outcome in own if outcome.caught_by is None]
        lines.append(f"{area:<14}{len(own):>8}{len(own) - len(survived):>8}  {', '.join(survived)}".rstrip())
    return "\n".join(lines)


def main() -> int:
    """Run what the command line asks for; return 1 if a mutant has survived, or can't be run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[2], help="default: this one")
    parser.add_argument("--mutants", nargs="+", choices=[mutant.name for mutant in MUTANTS], metavar="NAME")
    parser.add_argument("--select", default="", help="pytest's arguments, once a mutant's own tests have passed")
    parser.add_argument("--json", type=Path, help="where to write the outcomes")
    parser.add_argument("--check", action="store_true", help="only see that each mutant can be made, and compiles")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not options.mutants or mutant.name in options.mutants]
    problems = [problem for mutant in chosen if (problem := problem_of(mutant, options.checkout))]
    if problems or options.check:
        print("\n".join(problems) or f"{len(chosen)} mutants can be made")
        return int(bool(problems))
    outcomes: list[Outcome] = []
    for mutant in chosen:
        outcome = run_mutant(mutant, options.checkout, shlex.split(options.select))
        outcomes.append(outcome)
        verdict = f"caught by {outcome.caught_by}" if outcome.caught_by else "SURVIVED"
        print(f"{mutant.name:<48} {outcome.seconds:>7.1f} s  {verdict}", flush=True)
        if options.json:
            options.json.write_text(json.dumps([each._asdict() for each in outcomes], indent=2) + "\n")
    print(table(outcomes))
    return int(any(outcome.caught_by is None for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
