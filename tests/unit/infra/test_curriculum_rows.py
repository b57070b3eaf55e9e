"""The rows that a curriculum's schedules choose, levels of difficulty, and the recorded results they depend on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from infra.datasets import PromptDataset, load_train_prompts
from infra.storage.runs import RunDirectory, find_schedules
from rl_core.rollout.curriculum import WHOLE, draw_sources
from schemas.config.data import DataConfig
from schemas.errors import DataError, RunError
from schemas.rollout import SourceResults, SourceSchedule
from schemas.step import RunHandle, StepReport
from tests.support.configs import run_config
from tests.support.dataset_rows import TOKENIZER, dataset_of
from tests.support.tiny import tiny_row, write_rows

LEVELS = {"kind": "levels", "field": "index", "starts": [0, 2, 2.5]}


@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    shares=st.lists(st.integers(0, WHOLE), min_size=3, max_size=3),
    num_prompts=st.integers(1, 12),
    shuffle=st.booleans(),
)
def test_each_source_goes_on_in_its_epochs(
    sizes: list[int], shares: list[int], num_prompts: int, shuffle: bool
) -> None:
    cuts = np.diff([0, *sorted(shares[: len(sizes) - 1]), WHOLE]).tolist()
    mixed = PromptDataset.mix([dataset_of(size) for size in sizes], [1.0] * len(sizes))
    taken = [[] for _ in sizes]
    for step in range(6):
        positions = [len(rows) for rows in taken]
        schedule = SourceSchedule(shares=tuple(cuts), credits=(0,) * len(sizes), positions=tuple(positions))
        rows = mixed.rows_for_groups(step, range(30), num_prompts, 3, shuffle, schedule)
        sources = np.searchsorted(np.cumsum(sizes), rows, side="right")
        assert np.array_equal(sources, draw_sources(schedule, 30))
        own = mixed.rows_for_groups(step, [num_prompts - 1], num_prompts, 3, shuffle, schedule)
        assert own.tolist() == rows[num_prompts - 1 : num_prompts].tolist()
        for source, first in enumerate(np.cumsum([0, *sizes[:-1]])):
            taken[source] += (rows[:num_prompts][sources[:num_prompts] == source] - first).tolist()
            own_rows = set(rows[:num_prompts].tolist())
            extra = rows[num_prompts:][sources[num_prompts:] == source].tolist()
            if shuffle:  # the further groups of dynamic sampling begin with rows that the step doesn't have
                others = sizes[source] - len(own_rows & set(range(first, first + sizes[source])))
                assert not set(extra[:others]) & own_rows
    for size, rows in zip(sizes, taken, strict=True):
        for epoch in range(len(rows) // size):
            assert sorted(rows[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_rows_are_split_into_levels(tmp_path: Path) -> None:
    rows = [tiny_row(number) for number in (3, 0, 2, 1, 2)]
    config = DataConfig(train_path=str(write_rows(tmp_path / "rows.jsonl", rows)), curriculum=LEVELS)
    prompts = load_train_prompts(config, TOKENIZER)
    assert [prompts[row].info["index"] for row in range(len(prompts))] == [0, 1, 2, 2, 3]
    assert config.source_names == ("index-0", "index-2", "index-2.5")
    schedule = SourceSchedule(shares=(0, WHOLE, 0), credits=(0, 0, 0), positions=(7, 1, 0))
    assert prompts.rows_for_groups(0, range(3), 3, 0, shuffle=False, schedule=schedule).tolist() == [3, 2, 3]


@pytest.mark.parametrize(
    ("extra", "starts", "message"),
    [
        ({"index": 1, "other": 2}, [0, 1, 5], "has no rows of level index-5; change data.curriculum.starts"),
        ({"other": 2}, [0, 1], "row 2: extra_info has no 'index', which data.curriculum.field names; it has other"),
        ({"index": "hard"}, [0, 1], "row 2: extra_info.index is 'hard'; expected a number of at least 0"),
        ({"index": True}, [0, 1], "row 2: extra_info.index is True; expected a number"),
        ({"index": -1}, [0, 1], "row 2: extra_info.index is -1; expected a number of at least 0"),
    ],
)
def test_rows_without_a_level_are_refused(tmp_path: Path, extra: dict, starts: list, message: str) -> None:
    rows = [tiny_row(0), tiny_row(1) | {"extra_info": extra}]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    config = DataConfig(train_path=path, curriculum=LEVELS | {"starts": starts})
    with pytest.raises(DataError, match=message):
        load_train_prompts(config, TOKENIZER)


TWO = [{"path": "a/rows.parquet"}, {"path": "b/rows.parquet"}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sources": TWO, "curriculum": {"kind": "sources"}}, "two of data.sources are named 'rows'"),
        ({"sources": TWO[:1], "curriculum": {"kind": "sources"}}, "of which there are 1"),
        ({"train_path": "a", "curriculum": {"kind": "sources"}}, "of which there are 0"),
        ({"sources": TWO, "curriculum": LEVELS}, "takes one file, but data.sources are set"),
        ({"train_path": "a", "curriculum": LEVELS | {"window": 0}}, "greater than 0"),
        ({"train_path": "a", "curriculum": LEVELS | {"windows": 3}}, "Extra inputs are not permitted"),
        ({"train_path": "a", "curriculum": LEVELS | {"min_factor": 0}}, "greater than 0"),
        ({"train_path": "a", "curriculum": LEVELS | {"starts": [1]}}, "at least 2 items"),
        ({"train_path": "a", "curriculum": LEVELS | {"starts": [1, 1]}}, "not ascending"),
        ({"train_path": "a", "curriculum": {"starts": [1, 2]}}, "Unable to extract tag"),
    ],
)
def test_unusable_curricula(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig(**fields)


def test_sources_of_one_file_name_can_be_named() -> None:
    named = [TWO[0] | {"name": "first"}, TWO[1]]
    assert DataConfig(sources=named, curriculum={"kind": "sources"}).source_names == ("first", "rows")


def test_schedules_follow_from_the_recorded_steps(tmp_path: Path) -> None:
    data = {"curriculum": LEVELS | {"window": 2}}
    config = run_config(tmp_path, data=data, runtime={"max_staleness": 1}, correction={"kind": "truncated"})
    directory = RunDirectory.create(config, "run")
    run = RunHandle(run_id="run", identity="run", directory=directory.url, config=config, store_incarnation="memory")
    schedules = []
    for step in range(4):
        if step > 1:
            directory.metrics.append_step(_report(step - 2, schedules[step - 2], solved=step))
        schedules.append(find_schedules(run, step)[step])
    directory.metrics.append_step(_report(2, schedules[2], solved=0))
    assert find_schedules(run, 3)[3] == schedules[3]  # sampled again, later
    assert len({schedule.shares for schedule in schedules}) == 3  # the first two have no results yet
    directory.metrics.truncate(1)
    assert find_schedules(run, 2)[2] == schedules[2]
    with pytest.raises(RunError, match="no curriculum results of step 1: the file was edited by hand"):
        find_schedules(run, 3)
    assert find_schedules(run.replace(config=run_config(tmp_path)), 3) == {}


def _report(step: int, schedule: SourceSchedule, solved: int) -> StepReport:
    sources = SourceResults(schedule=schedule, num_scored=(8, 8, 8), num_successes=(4, solved, 8))
    return StepReport(step=step, policy_version=step + 1, metrics={}, seconds=1.0, seconds_by_phase={}, sources=sources)
