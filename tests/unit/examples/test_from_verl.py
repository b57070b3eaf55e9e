"""The tables of examples/from_verl: every key of the verl command is translated as the config says."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from infra.workers.layout import gpus_wanted
from schemas.config.load import load_config
from schemas.config.run import RunConfig

FOLDER = Path(__file__).parents[3] / "examples" / "from_verl"
NONE = "-"


class Row(NamedTuple):
    """One line of a table, without backticks."""

    verl: str
    verl_value: str
    key: str
    value: str
    note: str


def rows(title: str) -> list[Row]:
    """Return the rows of the table under a heading."""
    section = (FOLDER / "README.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [Row(*(cell.strip() for cell in line.replace("`", "").strip("|").split("|"))) for line in lines]


COMMAND = rows("Keys of `train_with_verl.sh`")
FURTHER = rows("Further keys")


def verl_command() -> dict[str, str]:
    """Return the keys and values of the verl command line."""
    words = shlex.split((FOLDER / "train_with_verl.sh").read_text(), comments=True)
    return dict(word.split("=", 1) for word in words if "=" in word)


def test_the_table_has_every_key_of_the_command_with_its_value() -> None:
    assert {row.verl: row.verl_value for row in COMMAND} == verl_command()
    assert len(COMMAND) == len({row.verl for row in COMMAND})


@pytest.mark.parametrize("row", [row for row in COMMAND if row.key != NONE], ids=lambda row: row.verl)
def test_the_config_has_the_translated_value(row: Row) -> None:
    fields(row.key)
    if row.value != NONE:
        assert toml(row.value) == _value(load_config(FOLDER / "config.toml"), row.key)


@pytest.mark.parametrize("row", [row for row in FURTHER if row.key != NONE], ids=lambda row: row.verl)
def test_the_stated_default_is_that_of_the_schema(row: Row) -> None:
    expected = None if row.value == "null" else toml(row.value)
    assert expected in [_default(row.key, field) for field in fields(row.key)]


def test_a_note_names_only_existing_keys() -> None:
    sections = "|".join(name for name in RunConfig.model_fields if name not in ("name", "seed", "steps"))
    for row in (*COMMAND, *FURTHER):
        verl_free = re.sub(r"\b(?:actor_rollout_ref|algorithm|custom_reward_function|trainer)\.[\w.]+", "", row.note)
        for key in re.findall(rf"\b(?:{sections})\.[a-z_.]+[a-z]", verl_free):
            if key not in verl_command():
                fields(key)


def test_where_defaults_differ_the_config_sets_those_of_verl() -> None:
    config = load_config(FOLDER / "config.toml")
    assert (config.optim.weight_decay, config.loss.kind) == (0.01, "clipped")
    assert config.loss.dual_clip == 3.0  # type: ignore[union-attr]


def test_the_commands_for_several_gpus_use_all_of_them() -> None:
    section = (FOLDER / "README.md").read_text().split("## Several GPUs\n")[1].replace("\\\n", " ")
    commands = re.findall(r"^sluice plan config.toml --cluster 8x8xH100 (.*)", section, re.MULTILINE)
    planned = [load_config(FOLDER / "config.toml", command.split()) for command in commands]
    assert [gpus_wanted(config) for config in planned] == [64, 64]
    placed = [(config.runtime.placement, config.rollout.gpus_per_worker) for config in planned]
    assert placed == [("colocated", 1), ("separate", 2)]
    assert [config.needs_reference_worker for config in planned] == [True, True]


def fields(key: str) -> list[FieldInfo]:
    """Return the fields that a dotted key names, in any kind of its sections; fail if there is none."""
    models: list[Any] = [RunConfig]
    *sections, name = key.split(".")
    for section in sections:
        models = [
            model
            for parent in models
            if section in parent.model_fields
            for model in _models(parent.model_fields[section].annotation)
        ]
    found = [model.model_fields[name] for model in models if name in model.model_fields]
    assert found, f"no key {key}"
    return found


def toml(text: str) -> object:
    """Read a table's value as TOML, else as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _value(config: RunConfig, key: str) -> object:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    if not isinstance(value, tuple):
        return value
    return [item.model_dump(exclude_none=True) if isinstance(item, BaseModel) else item for item in value]


def _default(key: str, field: FieldInfo) -> object:
    """Return a field's default; of a `kind`, the one that its section has by default."""
    section, _, name = key.partition(".")
    if name == "kind":
        return getattr(RunConfig.model_fields[section].get_default(call_default_factory=True), "kind", None)
    return field.get_default(call_default_factory=True)
