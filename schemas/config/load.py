"""Reading a run's config: a TOML file, then `section.key=value` overrides; every error names the key.

And how a config differs from the defaults, and from other configs, by dotted key.
"""

import ast
import difflib
import json
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from schemas.config.kinds import kind_of, union_members
from schemas.config.run import RunConfig
from schemas.errors import ConfigError

_NOTHING = ("None", "null")
# Words that some languages read as a truth value or nothing, and a chat template as a text, which is true.
_AMBIGUOUS = {"true", "false", "yes", "no", "on", "off", "none", "null", "nil", "y", "n"}
REQUIRED = "required"  # stands for the default of a key that has none
Config = TypeVar("Config", bound=BaseModel)


def parse_value(text: str, types: Sequence[object], override: str) -> Any:
    """Return the value that a text stands for.

    A key that takes text alone gets the text as it is, or what is between its quotes. Otherwise the text is read as a
    value of TOML (`true`, `[1, 2]`), JSON (`null`) or Python (`True`, `None`, `.5`); what is none of these is text.

    Args:
        text: The part behind the first `=`.
        types: The types that the key may have; empty: it isn't known.
        override: The whole override, for messages.

    Raises:
        ConfigError: It is a list or a table that can't be read, or may be meant as a truth value as well as text.

    Example:
        >>> [parse_value(text, [int, bool, str], "") for text in ("False", "false", "1e3", ".5", "2024-01-01", "x")]
        [False, False, 1000.0, 0.5, '2024-01-01', 'x']
        >>> [parse_value(text, [str, NoneType], "") for text in ("False", "2024", '"a b"', "None")]
        ['False', '2024', 'a b', None]
    """
    if types and all(map(_is_text, types)):
        return None if NoneType in types and text in _NOTHING else _unquoted(text)
    for read in (_read_toml, json.loads, _read_python):
        try:
            return _plain(read(text))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    key = override.partition("=")[0]
    if text[:1] in ("[", "{"):
        raise ConfigError(
            f"override {override!r} is neither TOML, JSON nor Python; put text into quotes, as in {key}=['a', 'b'] or "
            f"{key}={{name='a', flag=true}}"
        )
    if text.casefold() in _AMBIGUOUS and (Any in types or {bool, str} <= set(types)):
        raise ConfigError(
            f"override {override!r}: {text} would be a text, which counts as true; write true or false, or put the "
            f"text into quotes: '{key}=\"{text}\"'"
        )
    return text


def _is_text(each: object) -> bool:
    if get_origin(each) is Literal:
        return all(isinstance(value, str) for value in get_args(each))
    return each in (str, NoneType)


def _unquoted(text: str) -> str:
    """Return what is between a text's quotes, if it has some, by the rules of TOML or Python."""
    if len(text) < 2 or text[0] not in ("'", '"') or text[-1] != text[0]:
        return text
    for read in (_read_toml, _read_python):
        try:
            if isinstance(value := read(text), str):
                return value
        except (ValueError, SyntaxError):
            continue
    return text


def _read_toml(text: str) -> Any:
    if (tree := tomllib.loads(f"value = {text}")).keys() != {"value"}:
        raise ValueError("more than a value")
    return tree["value"]


def _read_python(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes such as \d in a quoted text
        return ast.literal_eval(text)


def _plain(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str | list | tuple | dict | None):  # a date, bytes, a set
        raise ValueError("not a type of a config")
    return value


def flat_values(config: RunConfig) -> dict[str, Any]:
    """Return every value of a config by its dotted key, as `section.key` in a TOML file."""
    return dict(_flat(config.model_dump(mode="json"), ""))


def non_defaults(config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return value and default of each key whose value isn't the default, by dotted key.

    A section's keys are compared with the defaults of its `kind`.

    Example:
        >>> values = {"steps": 9, "model": {"path": "tiny"}, "data": {"train_path": "train.jsonl"}}
        >>> values |= {"reward": {"kind": "exact"}, "advantage": {"kind": "rloo"}}
        >>> changed = non_defaults(RunConfig.model_validate(values))
        >>> changed["advantage.kind"], changed["steps"], "optim.lr" in changed
        (('rloo', 'grpo'), (9, 'required'), False)
    """
    return dict(_non_defaults(config, ""))


def differences(configs: Mapping[str, RunConfig]) -> dict[str, dict[str, Any]]:
    """Return the keys in which named configs differ, each with its value in every config that has it."""
    flat = {name: flat_values(config) for name, config in configs.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    found = {key: {name: values[key] for name, values in flat.items() if key in values} for key in keys}
    return {
        key: values
        for key, values in found.items()
        if len(values) < len(flat) or any(value != next(iter(values.values())) for value in values.values())
    }


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, item in value.items():
        yield from _flat(item, f"{key}.{name}" if key else name)


def _non_defaults(model: BaseModel, place: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name, field in type(model).model_fields.items():
        value, default, key = getattr(model, name), _default(field), f"{place}.{name}" if place else name
        if name == "kind":
            continue  # yielded with its section
        if isinstance(value, BaseModel) and default is not None:
            kind, default_kind = getattr(value, "kind", None), getattr(default, "kind", REQUIRED)
            if kind is not None and kind != default_kind:
                yield f"{key}.kind", (kind, default_kind)
            yield from _non_defaults(value, key)
        elif value != default:
            yield key, (model.model_dump(mode="json", include={name})[name], default)


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True, validated_data={})
    return REQUIRED if value is PydanticUndefined else value


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path` and apply `overrides` in order.

    Args:
        path: A TOML file with the keys of `RunConfig`.
        overrides: `section.key=value`; see `schemas.config.load.parse_value` for the value.

    Raises:
        ConfigError: The file or an override can't be read, or a key or value is invalid.

    Example:
        >>> from tempfile import NamedTemporaryFile
        >>> with NamedTemporaryFile("w", suffix=".toml") as file:
        ...     _ = file.write('steps=9\\nmodel.path="tiny"\\ndata.train_path="train.jsonl"\\nreward.kind="exact"')
        ...     file.flush()
        ...     config = load_config(Path(file.name), ["optim.lr=1e-4", "advantage.kind=rloo"])
        >>> config.steps, config.optim.lr, config.advantage.kind, config.loss.kind
        (9, 0.0001, 'rloo', 'clipped')
    """
    return parse_config(read_toml(path), overrides, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Read the values of a TOML file, which are not checked.

    Raises:
        ConfigError: The file can't be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors may write a byte order mark
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {path} can't be read: {error}") from None


def override_config(config: RunConfig, overrides: Sequence[str], name: str) -> RunConfig:
    """Apply `section.key=value` overrides to a config; `name` names it in error messages.

    A section's new `kind` starts from its own defaults: of the keys that are set, it keeps those that it has, too.

    Raises:
        ConfigError: An override can't be read, or a key or value is invalid.
    """
    tree: dict[str, Any] = {}
    for key, (value, _) in non_defaults(config).items():
        _set(tree, key, value)
    for override in overrides:
        _keep_common_keys(tree, override)
    return parse_config(tree, overrides, name)


def changed_keys(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the dotted keys that have different values in two configs, sorted."""
    return sorted(_changed(before.model_dump(mode="json"), after.model_dump(mode="json"), ""))


def parse_config(tree: dict[str, Any], overrides: Sequence[str], name: str) -> RunConfig:
    """Return the run's config of these values; see `parse_values`."""
    return parse_values(RunConfig, tree, overrides, name)


def parse_values(kind: type[Config], tree: dict[str, Any], overrides: Sequence[str], name: str) -> Config:
    """Return the config of these values, changed by `overrides` in order; `name` names it in error messages.

    Args:
        kind: The config's class.
        tree: The values as a TOML file has them; they are changed.
        overrides: `section.key=value` changes.
        name: What the values are of, e.g. a file.

    Raises:
        ConfigError: An override can't be read, or a key or value is invalid.
    """
    for override in overrides:
        _apply(tree, override, kind)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        problems = "; ".join(_explain(detail, kind) for detail in error.errors())
        raise ConfigError(f"{name}: {problems}") from None


def set_value(tree: dict[str, Any], key: str, value: Any, name: str) -> None:
    """Set the value of a dotted key in the values of a config; `name` names them in error messages.

    Raises:
        ConfigError: A part of the key is not a section.
    """
    if (found := _set(tree, key, value)) is not None:
        raise ConfigError(f"{name}: {key} can't be set, as {found} is a value, not a section")


def _changed(before: object, after: object, place: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from _changed(before.get(key), after.get(key), f"{place}.{key}" if place else key)
    elif before != after:
        yield place


def _apply(tree: dict[str, Any], override: str, kind: type[BaseModel]) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {override!r} is not of the form section.key=value, e.g. optim.lr=1e-4")
    if (value := _set(tree, key, parse_value(text, _walk(key.split("."), kind)[0], override))) is not None:
        raise ConfigError(f"override {override!r}: {value!r} is a value, not a section")


def _keep_common_keys(tree: dict[str, Any], override: str) -> None:
    """If an override gives a section another kind, drop the section's keys that this kind doesn't have."""
    key, _, text = override.partition("=")
    *place, name = key.split(".")
    section: Any = tree
    for part in place:
        section = section.get(part) if isinstance(section, dict) else None
    if name != "kind" or not isinstance(section, dict):
        return
    kind = parse_value(text, _walk([*place, name])[0], override)
    if section.get("kind") == kind:
        return
    kept = _fields_at([*place, str(kind)])
    for other in [other for other in section if other not in kept]:
        del section[other]


def _set(tree: dict[str, Any], key: str, value: Any) -> str | None:
    """Set the value of a dotted key; if a part of the key is not a section, return that part."""
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            return section
    tree[name] = value
    return None


def _explain(detail: ErrorDetails, kind: type[BaseModel]) -> str:
    place = [str(part) for part in detail["loc"]]
    key = _dotted(place, kind)
    if detail["type"] == "extra_forbidden":
        allowed = _fields_at(place[:-1], kind)
        close = difflib.get_close_matches(place[-1], allowed, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"unknown key {key}; {hint}allowed here: {', '.join(allowed)}"
    if detail["type"] == "union_tag_invalid":
        return f"{key}.kind = {detail['ctx']['tag']!r}: expected one of {detail['ctx']['expected_tags']}"
    if detail["type"] == "union_tag_not_found":
        return f"missing key {key}.kind"
    if detail["type"] == "tuple_type":
        return f"{key} = {detail['input']!r}: expected a list, such as {[detail['input']]}"
    if detail["type"] == "string_type":
        return f"{key} = {detail['input']!r}: expected text; put it into quotes"
    if detail["type"] == "finite_number":
        return f"{key} = {detail['input']!r}: expected a finite number"
    if detail["type"] == "missing":
        return f"missing key {key}"
    if detail["type"] == "value_error":  # raised by a config's own validator, whose message names the keys
        message = str(detail["ctx"]["error"])
        if not isinstance(detail["input"], dict):
            return f"{key} = {detail['input']!r}: {message}"
        return f"{key}: {message}" if place else message
    return f"{key} = {detail['input']!r}: {detail['msg']}"


def _fields_at(place: Sequence[str], kind: type[BaseModel] = RunConfig) -> list[str]:
    """Return the keys that a section may have."""
    return sorted({name for model in _models(_walk(place, kind)[0]) for name in model.model_fields})


def _dotted(place: Sequence[str], kind: type[BaseModel]) -> str:
    """Format the place as a dotted key, without the union tags that pydantic adds."""
    return ".".join(_walk(place, kind)[1]) or "the file"


def _walk(place: Sequence[str], kind: type[BaseModel] = RunConfig) -> tuple[list[object], list[str]]:
    """Return the types that a place may have, and its keys, without the `kind` that pydantic adds behind a union's."""
    types: list[object] = [kind]
    keys: list[str] = []
    for part in place:
        models = _models(types)
        tagged = [model for model in models if "kind" in model.model_fields and kind_of(model) == part]
        if len(models) > 1 and tagged:
            types = list(tagged)
            continue
        keys.append(part)
        fields = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        types = [inner for annotation in fields or _entries(types) for inner in union_members(annotation)]
    return types, keys


def _models(types: Sequence[object]) -> list[type[BaseModel]]:
    return [each for each in types if isinstance(each, type) and issubclass(each, BaseModel)]


def _entries(types: Sequence[object]) -> list[object]:
    """Return the types of the entries of lists and dicts."""
    containers = [each for each in types if get_origin(each) in (tuple, list, dict)]
    return [next(each for each in reversed(get_args(container)) if each is not ...) for container in containers]
