"""The examples in docstrings run and print what they say."""

import doctest
from importlib import import_module

import pytest

MODULES = [
    "rl_core.advantages.estimators",
    "rl_core.columns.jagged",
    "rl_core.losses",
    "rl_core.planning.hardware",
    "rl_core.planning.plan",
    "rl_core.planning.throughput",
    "rl_core.registry",
    "rl_core.rewards.base",
    "rl_core.rollout.lengths",
    "rl_core.scoring.forward",
    "rl_core.views",
    "schemas.batch",
    "schemas.catalog",
    "schemas.config.load",
    "schemas.config.load",
    "schemas.metric_catalog",
    "schemas.metrics",
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
