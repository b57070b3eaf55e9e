"""Every config field has a description, from which the configuration reference is generated."""

from collections.abc import Iterator
from typing import get_args

import pytest
from pydantic import BaseModel

from schemas.config.run import RunConfig


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models_in(field.annotation)
    for argument in get_args(annotation):
        yield from models_in(argument)


MODELS = {model.__name__: model for model in models_in(RunConfig)}


def test_all_sections_are_found() -> None:
    assert len(MODELS) > 35
    assert {"LoraConfig", "PromptSource", "DynamicSampling", "WeightedPart", "MaskedCorrection"} <= MODELS.keys()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_field_has_a_description(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        description = field.description or ""
        assert description, f"{model.__name__}.{name} has no docstring below it"
        assert description == " ".join(description.split()), f"{model.__name__}.{name}: {description!r}"
        assert description[0].isupper() or description[0] in "`k01", f"{model.__name__}.{name}: {description!r}"
        assert description.endswith("."), f"{model.__name__}.{name}: {description!r}"


def test_the_json_schema_has_the_descriptions() -> None:
    properties = RunConfig.model_json_schema()["properties"]
    assert properties["seed"]["description"] == "Seed of data order, sampling and plans."
