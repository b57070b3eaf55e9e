"""`sluice replay` and `sluice fork` of a run that keeps its columns."""

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from infra.storage.lineage import load_fork
from infra.stores.offline import read_step
from tests.support.commands import sluice_in_turn
from tests.support.sft import sft_toml
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

PARENT, FORK, LINKED = "kept", "kept-at-6", "linked"
KEPT = ("store.keep_steps=all", "checkpoint.every_steps=4", "checkpoint.keep_last=3", "kl.coef=0.01")
SCHEDULED = ("optim.updates_per_step=2", "optim.schedule=linear")  # with two, behavior log-probs are stored
STAGES = ["behavior", "reference", "advantage", "plan", "update", "weights"]
TOKENS = ("prompt_ids", "response_ids", "loss_mask")

COMMANDS = {
    "same": ("replay", PARENT, "--steps", "3:5", "optim.offload=false", "--json"),
    "ranks": ("replay", PARENT, "--steps", "3", "runtime.num_policy_ranks=2", "--json"),
    "changed": (
        "replay",
        PARENT,
        "--steps",
        "2:4",
        "advantage.kind=rloo",
        "reward.kind=length",
        "reward.target=12",
        "--json",
    ),
    "fork": ("fork", PARENT, "--at", "6"),
    "linked": ("fork", PARENT, "--at", "4", "--run-id", LINKED, "--note", "slower", "optim.lr=1e-3"),
    "bundle": ("bundle", PARENT, "5", "-o", "step.bundle", "--redact"),
    "reproduced": ("reproduce", "step.bundle", "--json"),
    "runs": ("runs", "--json"),
}
WITHOUT_PARENT = {
    "early": ("replay", FORK, "--steps", "4", "--json"),
    "early bundle": ("bundle", FORK, "4", "-o", "early.bundle"),
    "across": ("replay", FORK, "--steps", "5:7"),
    "asked": ("sql", FORK, "select step, count(*) as n from rows group by step order by step", "--json"),
}

Printed = dict[str, tuple[int, str]]


def json_of(printed: tuple[int, str]) -> Any:
    return json.loads(next(line for line in printed[1].splitlines() if line.startswith(("{", "["))))


def files_of(run: Path) -> dict[Path, float]:
    return {path: path.stat().st_mtime for path in run.rglob("*") if path.name != "driver.lock"}


@pytest.fixture(scope="module")
def printed(workplace: Workplace) -> Iterator[Printed]:
    """What the commands print of a run of 8 steps, of which the first 4 had a learning rate that ended with them."""
    workplace.sluice("train", "tiny.toml", "--run-id", PARENT, "steps=4", *KEPT, *SCHEDULED)
    workplace.sluice("resume", PARENT, "steps=8")
    before = files_of(workplace.run(PARENT).path)
    found = dict(zip(COMMANDS, sluice_in_turn(workplace, *COMMANDS.values()), strict=True))
    moved = workplace.run(PARENT).path.rename(workplace.folder / "moved")
    found |= zip(WITHOUT_PARENT, sluice_in_turn(workplace, *WITHOUT_PARENT.values()), strict=True)
    moved.rename(workplace.run(PARENT).path)
    yield found
    assert files_of(workplace.run(PARENT).path) == before
    assert not list((workplace.folder / "runs").rglob(".replay"))


def test_a_replayed_step_has_the_same_bits(printed: Printed) -> None:
    code, _ = printed["same"]
    first, second = json_of(printed["same"])["steps"]
    assert code == 0, printed["same"]
    assert [stage["stage"] for stage in first["stages"]] == STAGES
    assert [stage["stage"] for stage in second["stages"]] == STAGES[:-1]  # there is no checkpoint of version 5
    assert {stage["closeness"] for step in (first, second) for stage in step["stages"]} == {"same bits"}


def test_other_ranks_are_compared_too(printed: Printed) -> None:
    code, _ = printed["ranks"]
    (step,) = json_of(printed["ranks"])["steps"]
    found = {stage["stage"]: stage["closeness"] for stage in step["stages"]}
    assert code == 1
    assert list(found) == STAGES
    assert (found["advantage"], found["plan"]) == ("same bits", "differs")
    weights = next(stage for stage in step["stages"] if stage["stage"] == "weights")
    assert all(each["largest"] < 1e-3 for each in weights["differences"])  # they round differently


def test_other_settings_change_the_update(printed: Printed) -> None:
    code, _ = printed["changed"]
    report = json_of(printed["changed"])
    assert code == 0, printed["changed"]
    assert {"advantage.kind", "reward.kind"} <= set(report["changed"])
    first, second = report["steps"]
    assert [first["is_off_policy"], second["is_off_policy"]] == [False, True]
    for step in (first, second):
        assert -1 < step["update"]["cosine"] < 1
        assert step["advantages"]["num_rows"] == 16
        assert step["advantages"]["num_changed"] > 0
        assert {"loss", "reward"} <= set(step["metrics"])
        assert len(step["shifts"]) == 5
        assert step["shifts"] == sorted(step["shifts"], key=lambda shift: -max(abs(shift["a"]), abs(shift["b"])))


def test_a_fork_without_changes_ends_in_its_parents_weights(workplace: Workplace, printed: Printed) -> None:
    assert (printed["fork"][0], printed["fork"][1].rstrip()) == (
        0,
        f"made run {FORK} from {PARENT}@6: 2 updates repeated\ngo on with: sluice resume {FORK}",
    )
    workplace.sluice("resume", FORK)
    parent, fork = workplace.run(PARENT), workplace.run(FORK)
    assert fork.weights(8) == parent.weights(8)
    assert fork.step_metrics() == parent.step_metrics()
    assert fork.evaluations() == parent.evaluations()
    assert [(event.kind, event.step) for event in fork.metrics.events()] == [("fork", 6), ("resume", 6)]
    assert f"of run {PARENT}, after 6 steps" in (fork.path / "report.html").read_text()


def test_a_fork_at_a_checkpoint_shares_its_bytes(workplace: Workplace, printed: Printed) -> None:
    assert "nothing to repeat" in printed["linked"][1]
    linked = workplace.run(LINKED)
    shards = list(linked.path.glob("policy/step-000004/*.safetensors"))
    assert shards
    assert all(shard.samefile(workplace.run(PARENT).path / shard.relative_to(linked.path)) for shard in shards)
    fork = load_fork(linked)
    assert fork is not None
    assert fork.changes == {"note": ("", "slower"), "optim.lr": (0.01, 0.001)}
    assert (linked.config().optim.lr, len(linked.metrics.steps())) == (0.001, 4)
    rows = {run["run_id"]: run for run in json.loads(printed["runs"][1])}
    assert (rows[LINKED]["forked_from"], rows[PARENT]["forked_from"]) == (f"{PARENT}@4", None)


def test_a_bundle_needs_nothing_else(workplace: Workplace, printed: Printed) -> None:
    report = json_of(printed["reproduced"])
    assert (printed["bundle"][0], printed["reproduced"][0]) == (0, 0)
    assert report["versions"] == {}
    (step,) = report["steps"]
    assert [stage["stage"] for stage in step["stages"]] == STAGES[:-1]
    assert step["closeness"] == "same bits"
    columns = read_step(workplace.run(PARENT).path, 5, ["response_text", "prompt_text"])
    with zipfile.ZipFile(workplace.folder / "step.bundle") as bundle:
        content = b"".join(bundle.read(name) for name in bundle.namelist() if name.endswith(".arrow"))
    texts = {text for name in columns.column_names for text in columns[name].to_pylist() if len(text) > 3}
    assert texts
    assert not [text for text in texts if text.encode() in content]


def test_a_fork_has_the_steps_before_it_without_its_parent(printed: Printed) -> None:
    code, _ = printed["early"]
    (step,) = json_of(printed["early"])["steps"]
    assert code == 0, printed["early"]
    assert [stage["stage"] for stage in step["stages"]] == STAGES[:-1]  # there is no checkpoint of version 5
    assert {stage["closeness"] for stage in step["stages"]} == {"same bits"}
    assert printed["early bundle"][0] == 0, printed["early bundle"]
    assert [row["step"] for row in json_of(printed["asked"])] == [0, 1, 2, 3, 4, 5]
    code, line = printed["across"]
    assert code == 2
    assert f"steps 5 to 6 of run {FORK} are not of one run" in line
    assert "ask for 5:6 and 6:7" in line


def test_fine_tuning_on_the_best_samples_takes_them_token_for_token(workplace: Workplace, printed: Printed) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sft.md").read_text()
    (query,) = re.findall(r'sluice sql RUN "(select prompt_ids.*?)" --out best.parquet', page, re.DOTALL)
    workplace.sluice("sql", PARENT, query, "--out", "best.parquet")
    best = sorted(map(tokens_of, pq.read_table(workplace.folder / "best.parquet").to_pylist()))
    expected = []
    for step in range(8):
        rows = read_step(workplace.run(PARENT).path, step, ["group_id", "reward", *TOKENS]).to_pylist()
        for group in {row["group_id"] for row in rows}:
            ranked = sorted((row for row in rows if row["group_id"] == group), key=lambda row: -row["reward"])
            expected += [tokens_of(row) for row in ranked[:2] if row["reward"] >= 0.5]
    assert best == sorted(expected)
    (workplace.folder / "best.toml").write_text(sft_toml())
    settings = ("data.train_path=best.parquet", "data.eval_path=", "eval.every_steps=0", "steps=3")
    workplace.sluice("train", "best.toml", "--run-id", "best-of-n", *settings, "store.keep_steps=all")
    run = workplace.run("best-of-n")
    trained = [tokens_of(row) for step in range(3) for row in read_step(run.path, step, TOKENS).to_pylist()]
    assert len(trained) == 3 * 8
    assert {*trained} <= {*best}
    losses = [metrics["cross_entropy"] for metrics in run.step_metrics()]
    assert losses[-1] < losses[0]


def tokens_of(row: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return all of a row's tokens, and those that are trained on."""
    trained = [token for token, is_trained in zip(row["response_ids"], row["loss_mask"], strict=True) if is_trained]
    return (*row["prompt_ids"], *row["response_ids"]), tuple(trained)
