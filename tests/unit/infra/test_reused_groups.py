"""Groups of stored steps, taken from a small run's columns."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from infra.history.reuse import check_parent, check_source, choose_groups, read_groups
from infra.storage.lineage import Fork, save_fork
from infra.storage.runs import RunDirectory
from schemas.errors import RunError
from schemas.rollout import ReusedGroup
from schemas.step import RunHandle, StepReport
from tests.support import small_run
from tests.support.configs import run_config
from tests.support.small_run import SAMPLES, columns_of, make_small_run

FINISHED: dict[str, Any] = {"policy_version": 4, "metrics": {}, "seconds": 1.0, "seconds_by_phase": {}}
ALL = [ReusedGroup(step=step, group=group) for step in (2, 3) for group in (0, 1)]  # all have variance


def test_groups_are_drawn_among_steps_of_the_age(tmp_path: Path) -> None:
    run = _run(make_small_run(tmp_path), num_groups=3, max_age=2)
    drawn = choose_groups(run, 4)
    assert len(drawn) == 3
    assert [group for group in ALL if group in drawn] == list(drawn)
    assert choose_groups(run, 4) == drawn
    seeds = [
        choose_groups(_run(RunDirectory(run.directory), seed=seed, num_groups=1, max_age=2), 4) for seed in range(9)
    ]
    assert len(set(seeds)) > 2
    assert choose_groups(_run(RunDirectory(run.directory), num_groups=9, max_age=1), 4) == tuple(ALL[2:])
    assert choose_groups(run, 0) == ()
    with pytest.raises(RunError, match=r"step 4 of run demo, whose columns are not kept any more; .* keeps: 2 to 3"):
        choose_groups(run, 6)


def test_rows_are_read_whole_with_their_numbers_in_the_new_step(tmp_path: Path) -> None:
    run = _run(make_small_run(tmp_path), num_groups=3, max_age=2)
    rows = read_groups(run, (ALL[1], ALL[2]), (40, 41))
    trained = [sample for sample in SAMPLES if sample[3] is not None]  # the reward of one row of group 0 failed
    assert rows["response_text"].to_pylist() == [text for group, text, *_ in trained if group == 1] + [
        text for group, text, *_ in trained if group == 0
    ]
    assert rows["group_id"].to_pylist() == [40, 40, 40, 41, 41]
    assert rows["policy_version"].to_pylist() == [2, 2, 2, 3, 3]
    assert "advantages" not in rows.schema.names


def test_a_fork_finds_the_steps_before_it_in_its_parent(tmp_path: Path) -> None:
    parent = make_small_run(tmp_path)
    fork = RunDirectory.create(run_config(tmp_path), "fork")
    save_fork(fork, Fork(parent=parent.url, run_id="demo", step=4, changes={}))
    run = _run(fork, num_groups=9, max_age=2)
    assert choose_groups(run, 4) == tuple(ALL)
    assert read_groups(run, (ALL[0],), (40,))["response_text"].to_pylist() == ["tac", "ta"]
    check_parent(run.config, parent, 4)
    with pytest.raises(RunError, match="step 1 of run demo"):
        check_parent(run.config, parent, 3)


def test_another_runs_steps_are_checked_before_the_run_starts(tmp_path: Path) -> None:
    source = make_small_run(tmp_path)
    for step in (1, 2, 3):
        source.metrics.append_step(StepReport(step=step, **FINISHED))
    run = _run(RunDirectory.create(run_config(tmp_path), "own"), num_groups=9, run="demo", steps=(2, 4))
    assert check_source(run.config, 99) is not None
    assert choose_groups(run, 0) == choose_groups(run, 5) == tuple(ALL)

    longest = 32  # 20 bytes of prompt, 12 of response
    with pytest.raises(RunError, match=rf"step 2 of run demo has a row of {longest} tokens, more than the model's"):
        check_source(run.config, longest - 1)
    for steps, message in {
        (2, 6): "has steps 4 to 5, which run demo has not finished",
        (1, 3): "step 1 of run",
    }.items():
        with pytest.raises(RunError, match=message):
            check_source(_run(source, num_groups=9, run="demo", steps=steps).config, 99)
    with pytest.raises(RunError, match="no run 'gone'"):
        check_source(_run(source, num_groups=9, run="gone", steps=(2, 4)).config, 99)
    stale = run.config.replace(
        runtime=run.config.runtime.replace(max_staleness=2), store=run.config.store.replace(keep_steps=9)
    )
    with pytest.raises(RunError, match=r"run demo has no runtime.max_staleness above 1, but this one has"):
        check_source(stale, 99)


def test_a_fork_takes_no_groups_with_other_columns_or_rewards(tmp_path: Path) -> None:
    parent = make_small_run(tmp_path)
    config = _run(parent, num_groups=9, max_age=2).config
    masked = config.replace(rollout=config.rollout.replace(sampling_mask=True, top_p=0.9))
    with pytest.raises(RunError, match=r"run demo has no rollout.sampling_mask, but this one has.*data.reuse=null"):
        check_parent(masked, parent, 4)
    rewarded = config.replace(reward={"kind": "math"})
    with pytest.raises(RunError, match=r"groups of run demo have another reward.*max_age = 2 steps; .*data.reuse=null"):
        check_parent(rewarded, parent, 4)
    check_parent(rewarded.replace(data=config.data.replace(reuse=None)), parent, 4)
    function = {"kind": "function", "path": "rewards:score"}
    parent.write_config(parent.config().replace(reward=function))
    check_parent(config.replace(reward={**function, "timeout_seconds": 9.0}), parent, 4)


def test_teachers_train_on_groups_with_equal_rewards_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_run, "SAMPLES", [(*sample[:3], 0.5, None) for sample in SAMPLES])
    parent = make_small_run(tmp_path)
    run = _run(parent, num_groups=9, max_age=2)
    assert choose_groups(run, 4) == ()
    taught = run.config.replace(distillation={"teachers": {"big": {"path": "teacher"}}})
    assert choose_groups(run.replace(config=taught), 4) == tuple(ALL)


def test_rows_of_another_run_need_a_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(small_run.DTYPES, "info", "string")
    source = make_small_run(tmp_path)
    for step in (2, 3):
        source.metrics.append_step(StepReport(step=step, **FINISHED))
    config = _run(RunDirectory.create(run_config(tmp_path), "own"), num_groups=9, run="demo", steps=(2, 4)).config
    for sources, lacking in ((["other"], True), (["words"], False), ([], False)):
        taught = config.replace(distillation={"teachers": {"big": {"path": "teacher", "data_sources": sources}}})
        with pytest.raises(RunError, match="rows of the data source 'words'") if lacking else nullcontext():
            check_source(taught, 99)


def _run(directory: RunDirectory, *, seed: int = 0, **reuse: object) -> RunHandle:
    """Return a run that takes groups of stored steps, with the files of `directory`."""
    config = run_config(
        Path(directory.runs_dir).parent,
        seed=seed,
        data={"reuse": reuse},
        correction={"kind": "truncated"},
        store={"keep_steps": "all"},
    )
    store = columns_of(directory)
    return RunHandle(
        run_id=directory.run_id,
        identity=directory.run_id,
        directory=directory.url,
        config=config,
        store_incarnation=store.incarnation,
    )
