"""The pages' lists of methods are those of the registries and of the built-in configs."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from rl_core.advantages.estimators import ESTIMATORS
from rl_core.losses.surrogates import SURROGATES
from schemas.config.load import load_config
from schemas.config.loss import Aggregation, KlEstimator

ROOT = Path(__file__).parents[3]
ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text()
CONFIGS = {path.stem: path for path in (ROOT / "flows" / "configs").glob("*.toml") if not path.stem.startswith("demo")}


def table(heading: str) -> Iterator[list[str]]:
    """Yield the cells of the rows of the first table whose first column has this heading."""
    lines = ALGORITHMS.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_table_of_losses_has_every_kind() -> None:
    assert [codes(kind)[0] for kind, *_ in table("kind")] == list(SURROGATES.kinds)


def test_the_how_to_and_the_sentences_name_every_kind() -> None:
    page = (ROOT / "docs" / "how-to" / "algorithm.md").read_text()
    for begin, kinds in (("Estimators that are there: ", ESTIMATORS.kinds), ("Losses: ", SURROGATES.kinds)):
        (line,) = (line for line in page.splitlines() if line.startswith(begin))
        assert codes(line) == list(kinds)
    advantages = ALGORITHMS.partition("<!-- kinds: advantage -->")[2].partition("\n## ")[0]
    assert set(ESTIMATORS.kinds) <= set(codes(advantages))


@pytest.mark.parametrize(("key", "values"), [("loss.aggregation", Aggregation), ("kl.estimator", KlEstimator)])
def test_the_tables_of_values_have_every_value(key: str, values: object) -> None:
    assert [codes(value)[0] for value, *_ in table(f"`{key}`")] == list(get_args(values))


def test_the_table_of_methods_has_every_built_in_config() -> None:
    assert {codes(config)[0] for _, config, *_ in table("method")} == set(CONFIGS)


@pytest.mark.parametrize("row", table("method"), ids=lambda row: row[0])
def test_a_method_is_what_its_config_says(row: list[str]) -> None:
    _, name, advantage, loss, *_ = row
    config = load_config(CONFIGS[codes(name)[0]], ["model.path=unused", "data.train_path=unused.jsonl"])
    assert codes(advantage) == [config.advantage.kind]
    assert codes(loss) == [config.loss.kind, config.loss.aggregation]
    bounds = [getattr(config.loss, side) for side in ("clip_low", "clip_high")]
    if stated := re.search(r"`, ([\d.e-]+) and ([\d.e-]+);", loss):
        assert [float(number) for number in stated.groups()] == bounds


def test_the_readme_and_the_recipe_list_the_methods() -> None:
    """Their lists are in the order of the table."""
    methods = [re.sub(r" \(.*", "", method) for method, *_ in table("method")]
    recipe = (ROOT / "docs" / "how-to" / "algorithm.md").read_text()
    assert f"({', '.join(methods)})" in (ROOT / "README.md").read_text()
    assert f"{', '.join(methods[:-1])} and {methods[-1]} come with the package" in recipe


@pytest.mark.parametrize(
    ("key", "registered"),
    [("algorithm.adv_estimator", ESTIMATORS.kinds), ("policy_loss.loss_mode", SURROGATES.kinds)],
)
def test_names_that_are_the_same_in_verl_are_kinds(key: str, registered: tuple[str, ...]) -> None:
    lines = (ROOT / "examples" / "from_verl" / "README.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith("| `") and key in line.split("|")[1]]
    same = re.search(r"([^|;]*) ha(?:ve|s) the same names?", row)
    assert same is not None
    assert codes(same[1])
    assert set(codes(same[1])) <= set(registered)
