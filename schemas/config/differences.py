"""How a config differs from the defaults, and from other configs, by dotted key."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from schemas.config.run import RunConfig

REQUIRED = "required"  # stands for the default of a key that has none


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
