"""The steps of a fork from before it was made: whose they are, and where they are read."""

import shutil
from pathlib import Path

import pytest

from flows.replay.fork import make_fork, plan_fork
from infra.checkpoints import open_checkpoints
from infra.history.diff import diff_runs
from infra.history.garbage import collect_garbage
from infra.history.past_weights import History
from infra.history.row_table import read_trend
from infra.history.sql import RunQueries
from infra.storage.folder import Folder
from infra.storage.lineage import load_fork, owner_of, owner_of_steps
from infra.storage.runs import RunDirectory
from infra.stores.offline import open_run_columns, read_step
from rl_core.planning import plan_step
from schemas.errors import RunError
from schemas.step import EvalReport, StepReport
from tests.support.checkpoint_tensors import save
from tests.support.command import make_command
from tests.support.small_run import columns_of, finish_step, make_small_run


def fork_of(parent: RunDirectory, step: int, run_id: str, *overrides: str) -> RunDirectory:
    planned = plan_fork(parent, step, run_id, overrides=["steps=9", *overrides])
    make_fork(planned)
    return planned.directory


def go_on(run: RunDirectory, step: int) -> None:
    """Finish a step, and write the checkpoint after it."""
    finish_step(columns_of(run), step)
    report = StepReport(step=step, policy_version=step + 1, metrics={}, seconds=1.0, seconds_by_phase={})
    run.metrics.append_step(report)
    save(open_checkpoints(run, run.config().checkpoint), step + 1)


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run of four steps, which keeps the columns of steps 2 and 3, the checkpoints 2 and 4, and a plan."""
    monkeypatch.chdir(tmp_path)
    run = make_small_run(Path(), keep_steps="all")
    for step in range(4):
        report = StepReport(step=step, policy_version=step + 1, metrics={}, seconds=1.0, seconds_by_phase={})
        run.metrics.append_step(report)
    for version in (2, 4):
        save(open_checkpoints(run, run.config().checkpoint), version)
    run.plans.save(3, plan_step([5, 6, 7, 8], [4] * 4, [4] * 4, num_ranks=2, token_budget=12, seed=0, num_updates=2))
    return run


def test_a_fork_has_the_steps_before_it_without_its_parent(
    parent: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_step(parent.path, 2)
    fork = fork_of(parent, 4, "fork", "optim.lr=0.5")
    go_on(fork, 4)
    assert [(step.step, step.has_columns, step.stages) for step in diff_runs(parent, fork)][2:] == [
        (2, True, ()),
        (3, True, ()),
    ]
    shutil.rmtree(parent.path)
    assert read_step(fork.path, 2) == before
    assert open_run_columns(fork).steps() == read_trend(fork)["kept"] == [2, 3, 4]
    queries = RunQueries([fork])
    counted = queries.query("select run_id, step, count(*) as n from rows group by all order by step").to_pylist()
    assert counted == [{"run_id": "fork", "step": step, "n": 5} for step in (2, 3, 4)]
    assert queries.query("select distinct step from placements").to_pylist() == [{"step": 3}]
    assert queries.missing_steps().startswith("run fork has the metrics of steps 0 to 1, but no columns, as run demo")
    sluice = make_command(monkeypatch, capsys)
    assert sluice("inspect", "fork", "3").exit_code == 0


def test_its_early_steps_are_computed_as_the_parent_did(parent: RunDirectory) -> None:
    fork = fork_of(parent, 4, "fork", "optim.lr=0.5")
    go_on(fork, 4)
    shutil.rmtree(parent.path)
    owner = owner_of(fork, 3)
    assert (owner.run_id, owner.config().optim.lr == fork.config().optim.lr) == ("demo", False)
    start = History(owner).start(3)
    assert (start.version, start.has_checkpoint, [stored.step for stored in start.steps]) == (2, True, [2])
    assert History(fork).start(5).has_checkpoint
    assert owner_of_steps(fork, 2, 4).url == owner.url
    assert owner_of_steps(fork, 4, 5).url == fork.url
    with pytest.raises(RunError, match=r"steps 3 to 4 of run fork are not of one run: .* ask for 3:4 and 4:5"):
        owner_of_steps(fork, 3, 5)
    early = fork_of(fork, 2, "early")
    assert str(load_fork(early)) == "fork@2"
    assert early.config().optim.lr == fork.config().optim.lr
    assert open_checkpoints(early, early.config().checkpoint).complete_versions() == [2]


def test_a_fork_of_a_fork_has_the_steps_of_both(parent: RunDirectory) -> None:
    fork = fork_of(parent, 4, "fork")
    go_on(fork, 4)
    second = fork_of(fork, 5, "second")
    third = fork_of(fork, 4, "third")  # at the step at which its parent was forked
    for gone in (parent, fork):
        shutil.rmtree(gone.path)
    go_on(second, 5)
    assert open_run_columns(second).steps() == [2, 3, 4, 5]
    assert [owner_of(second, step).run_id for step in range(1, 7)] == ["demo"] * 3 + ["fork"] + ["second"] * 2
    assert [read_step(second.path, step).num_rows for step in range(2, 6)] == [5] * 4
    assert open_run_columns(third).steps() == [2, 3]
    assert History(owner_of(second, 4)).possible_versions() == [4, 5]


def test_no_byte_is_stored_twice_and_garbage_is_each_runs_own(
    parent: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fork = fork_of(parent, 4, "fork", "store.keep_steps=1")
    past = fork.path / "parent" / "demo"
    shared = [path for path in past.rglob("*") if path.suffix in (".arrow", ".safetensors")]
    assert {path.suffix for path in shared} == {".arrow", ".safetensors"}
    assert all(path.samefile(parent.path / path.relative_to(past)) for path in shared)
    for step in (4, 5):
        go_on(fork, step)
    size = columns_of(parent).bytes_by_step()[2]
    own = collect_garbage(fork, None, None, dry_run=False)
    assert (own.steps, own.num_bytes, own.shared_bytes, own.kept_steps) == ((4,), size, 0, 1)
    planned = make_command(monkeypatch, capsys)("gc", "demo", "--keep-steps", "1", "--dry-run").out
    assert (
        f"would remove 1 steps with {size:,} bytes ({size:,} of them not freed: other runs have them, too)" in planned
    )
    of_parent = collect_garbage(parent, 1, None, dry_run=False)
    assert (of_parent.steps, of_parent.num_bytes, of_parent.shared_bytes) == ((2,), size, size)
    assert open_run_columns(fork).steps() == [2, 3, 5]
    assert read_step(fork.path, 2).num_rows == 5


@pytest.mark.parametrize(
    ("overrides", "versions"),
    [
        (("optim.lr=0.5", "reward.max_failure_fraction=0.5", "eval.num_prompts=2"), [0, 4]),
        (("reward.kind=numeric",), []),
        (("data.chat_template_kwargs.enable_thinking=false",), []),
        (("rollout.max_response_tokens=9",), []),
        (("rollout.max_response_tokens=9", "eval.max_response_tokens=256"), [0, 4]),
        (("data.max_prompt_tokens=9",), [0, 4]),  # a longer prompt is an error
        (("data.max_prompt_tokens=9", "data.overlong=drop"), []),
    ],
)
def test_a_fork_with_another_reward_has_no_evaluation_of_its_first_version(
    parent: RunDirectory, overrides: tuple[str, ...], versions: list[int]
) -> None:
    for version in (0, 4):
        parent.metrics.append_eval(
            EvalReport(policy_version=version, num_prompts=4, accuracy=0.9, reward=0.9, num_failed=0, seconds=1.0)
        )
    fork = fork_of(parent, 4, "fork", *overrides)
    assert [report.policy_version for report in fork.metrics.evals()] == versions
    assert [report.step for report in fork.metrics.steps()] == [0, 1, 2, 3]


def test_a_fork_that_is_begun_again_has_nothing_of_before(parent: RunDirectory) -> None:
    left = Path("runs/fork/parent/demo/columns/step-000001/_batch.json")
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    fork = fork_of(parent, 4, "fork")
    assert not left.exists()
    assert open_run_columns(fork).steps() == [2, 3]


def test_a_fork_that_was_made_meanwhile_stays(parent: RunDirectory) -> None:
    planned = plan_fork(parent, 4, "fork", overrides=["steps=9"])
    fork = fork_of(parent, 4, "fork")  # by another process
    go_on(fork, 4)
    with pytest.raises(RunError, match="run fork was made by another process meanwhile, and is left as it is"):
        make_fork(planned)
    assert fork.metrics.num_steps() == 5
    assert open_checkpoints(fork, fork.config().checkpoint).complete_versions() == [4, 5]


def test_a_fork_removes_nothing_of_another_run_of_its_id(parent: RunDirectory) -> None:
    shared = f"checkpoint.url={Path.cwd()}/bucket"
    fork = fork_of(parent, 4, "fork", shared)
    with pytest.raises(
        RunError, match=rf"bucket/fork is in use by the run of the same id in {fork.url}; set checkpoint"
    ):
        fork_of(parent, 4, "fork", shared, "runtime.runs_dir=other")
    assert open_checkpoints(fork, fork.config().checkpoint).complete_versions() == [4]
    Path("runs/fork/config.json").unlink()  # as of one that was interrupted
    assert fork_of(parent, 2, "fork", shared).url == fork.url
    assert open_checkpoints(fork, fork.config().checkpoint).complete_versions() == [2]


@pytest.mark.parametrize("where", ["another file system", "a bucket"])
def test_without_hard_links_the_parent_is_read_in_place(
    parent: RunDirectory, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "a bucket":
        fork = fork_of(parent, 4, "in-place", "runtime.runs_dir=memory://forked-steps")
    else:
        monkeypatch.setattr(Folder, "link", lambda *_: False)
        fork = fork_of(parent, 4, "in-place")
        go_on(fork, 4)
    assert not fork.folder.sizes("parent")
    own = open_run_columns(fork).steps()[2:]
    assert read_step(fork.url, 2).num_rows == 5
    assert owner_of(fork, 3).url == parent.url
    parent.path.rename("moved")
    with pytest.raises(RunError, match=r"steps before 4 of run in-place are those of run demo, .* move it back there"):
        read_step(fork.url, 2)
    if own:
        assert open_run_columns(fork).steps() == own == [4]
        assert read_step(fork.url, 4).num_rows == 5
    Path("moved").rename(parent.path)
    assert open_run_columns(fork).steps() == [2, 3, *own]
