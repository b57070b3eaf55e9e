"""The pages' lists of methods are those of the registries and of the built-in configs.

A test that fails says page and line, and what to add there.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import pytest

from rl_core.advantages.estimators import ESTIMATORS
from rl_core.losses.surrogates import SURROGATES
from schemas.config.load import load_config
from schemas.config.loss import Aggregation, KlEstimator

ROOT = Path(__file__).parents[3]
ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text()
FROM_VERL = "examples/from_verl/README.md"
CONFIGS = {path.stem: path for path in (ROOT / "flows" / "configs").glob("*.toml") if not path.stem.startswith("demo")}


def table(heading: str) -> Iterator[list[str]]:
    """Yield the cells of the rows of the first table whose first column has this heading."""
    for line in ALGORITHMS.splitlines()[line_of(heading) + 1 :]:
        if not line.startswith("|"):
            return
        yield cells(line)


def line_of(heading: str) -> int:
    """Return the number, from 1, of the line with a table's headings."""
    lines = enumerate(ALGORITHMS.splitlines(), 1)
    return next(number for number, line in lines if line.startswith(f"| {heading} |"))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def check_rows(heading: str, expected: Sequence[str]) -> None:
    """Check that a table has a row for each of the expected names, in their order."""
    found, first = [codes(name)[0] for name, *_ in table(heading)], line_of(heading) + 2
    columns = cells(ALGORITHMS.splitlines()[first - 3])
    for at, name in enumerate(expected):
        row = " | ".join([f"`{name}`", *(f"<{column}>" for column in columns[1:])])
        assert name in found, f"docs/algorithms.md lacks a row; insert as line {first + at}: | {row} |"
    rest = [name for name in found if name not in expected]
    assert not rest, f"docs/algorithms.md, from line {first}: remove the rows of {rest}, which don't exist any more"
    assert found == list(expected), f"docs/algorithms.md, from line {first}: put the rows in the order {list(expected)}"


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


METHODS = [re.sub(r" \(.*", "", method) for method, *_ in table("method")]


def test_the_table_of_losses_has_every_kind() -> None:
    check_rows("kind", SURROGATES.kinds)


@pytest.mark.parametrize(("key", "values"), [("loss.aggregation", Aggregation), ("kl.estimator", KlEstimator)])
def test_the_tables_of_values_have_every_value(key: str, values: object) -> None:
    check_rows(f"`{key}`", get_args(values))


def test_the_table_of_methods_has_every_built_in_config() -> None:
    missing = set(CONFIGS) - {codes(config)[0] for _, config, *_ in table("method")}
    assert not missing, f"docs/algorithms.md, from line {line_of('method') + 2}: add the rows of the configs {missing}"


@pytest.mark.parametrize("row", table("method"), ids=lambda row: row[0])
def test_a_method_is_what_its_config_says(row: list[str]) -> None:
    _, name, advantage, loss, *_ = row
    config = load_config(CONFIGS[codes(name)[0]], ["model.path=unused", "data.train_path=unused.jsonl"])
    assert codes(advantage) == [config.advantage.kind]
    assert codes(loss) == [config.loss.kind, config.loss.aggregation]
    bounds = [getattr(config.loss, side) for side in ("clip_low", "clip_high")]
    if stated := re.search(r"`, ([\d.e-]+) and ([\d.e-]+);", loss):
        assert [float(number) for number in stated.groups()] == bounds


def test_the_readme_lists_the_methods() -> None:
    check_listed("README.md", f"({', '.join(METHODS)})")


def test_the_how_to_lists_the_methods() -> None:
    check_listed("docs/how-to/algorithm.md", f"{', '.join(METHODS[:-1])} and {METHODS[-1]} come with the package")


def check_listed(page: str, words: str) -> None:
    """Check that a page names the methods, in the order of the table."""
    assert words in (ROOT / page).read_text(), f"{page} must have these words: {words}"


@pytest.mark.parametrize(
    ("key", "registered"),
    [("algorithm.adv_estimator", ESTIMATORS.kinds), ("policy_loss.loss_mode", SURROGATES.kinds)],
)
def test_names_that_are_the_same_in_verl_are_kinds(key: str, registered: tuple[str, ...]) -> None:
    lines = enumerate((ROOT / FROM_VERL).read_text().splitlines(), 1)
    ((number, row),) = [(at, line) for at, line in lines if line.startswith("| `") and key in line.split("|")[1]]
    same = re.search(r"([^|;]*) ha(?:ve|s) the same names?", row)
    assert same is not None
    assert codes(same[1])
    assert set(codes(same[1])) <= set(registered), f"{FROM_VERL}:{number} names kinds that don't exist"
