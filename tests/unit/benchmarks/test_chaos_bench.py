"""The choice of the faults and the verdict; CI runs the campaign itself (`make chaos`)."""

from collections import Counter
from typing import Any

import pytest

from benchmarks.chaos.faults import FAULTS_PER_RUN, KINDS, MOMENTS, OF_AGENTS, choose_faults
from benchmarks.chaos.run import FAULTLESS, Plan, is_passed, measure
from schemas.errors import ConfigError

SEED = 0


def test_faults_are_a_function_of_the_seed_and_cover_everything() -> None:
    runs = choose_faults(SEED, 100)
    assert runs == choose_faults(SEED, 100) != choose_faults(SEED + 1, 100)
    assert [len(faults) for faults in runs] == [FAULTS_PER_RUN] * (100 // FAULTS_PER_RUN)
    faults = [fault for run in runs for fault in run]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert min(Counter(fault.kind for fault in faults).values()) >= 100 // len(KINDS) - 2
    assert {fault.moment for fault in faults} == {*MOMENTS, "start"}
    assert not any(fault.kind == "store" for run in runs[::2] for fault in run)


def test_runs_of_agents_have_faults_of_their_own() -> None:
    kinds = Counter(fault.kind for run in choose_faults(SEED, 40, OF_AGENTS) for fault in run)
    assert kinds == dict.fromkeys(OF_AGENTS.kinds, 10)


@pytest.mark.parametrize("option", [{"python": "python3"}, {"engine": True}])
def test_options_of_agents_are_refused_without_them(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="add --agents"):
        measure(Plan(**option))


@pytest.mark.parametrize("name", ["identical", *FAULTLESS])
def test_one_wrong_figure_fails_the_campaign(name: str) -> None:
    good = {"kills": 10, "resumes": 4, "identical": True, "faults": [], **dict.fromkeys(FAULTLESS, 0)}
    assert is_passed(good)
    assert not is_passed({**good, name: not good[name]})
