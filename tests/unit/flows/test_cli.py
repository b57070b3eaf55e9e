"""What a user who made a mistake sees: one clear line, exit code 2, and nothing started."""

import json
import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.__main__ import COMMANDS
from flows.cli import commands
from flows.lifecycle.session import connect
from infra.storage.runs import RunDirectory
from schemas.config.load import load_config
from schemas.config.runtime import ServicesConfig
from schemas.errors import ServiceError
from schemas.step import RunSummary, StepReport
from tests.support.command import Command, assert_rejected, make_command
from tests.support.tiny import make_tiny_model, tiny_row, write_rows
from tests.support.workplace import Workplace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Workplace(tmp_path_factory.mktemp("cli")).folder


@pytest.fixture
def sluice(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that calls the command in the folder."""
    monkeypatch.chdir(folder)
    return make_command(monkeypatch, capsys)


def test_an_unknown_key(sluice: Command) -> None:
    assert_rejected(sluice("train", "tiny.toml", "optim.lrr=1"), "unknown key optim.lrr", "did you mean 'lr'")


def test_an_absent_config(sluice: Command) -> None:
    assert_rejected(sluice("train", "absent.toml"), "absent.toml does not exist")


def test_a_missing_data_file(sluice: Command) -> None:
    assert_rejected(sluice("train", "tiny.toml", "data.train_path=gone.parquet"), "gone.parquet", "no such file")


def test_several_samples_that_would_be_the_same(sluice: Command) -> None:
    assert_rejected(
        sluice("train", "tiny.toml", "eval.samples_per_prompt=4"),
        "eval.samples_per_prompt = 4 with eval.temperature = 0",
        "set eval.temperature above 0",
    )


def test_weighted_sources(sluice: Command) -> None:
    sources = 'data.sources=[{path="train.parquet", weight=2}, {path="gone.jsonl"}]'
    assert_rejected(sluice("train", "tiny.toml", sources), "data.train_path and data.sources are both set")
    assert_rejected(sluice("train", "tiny.toml", sources, "data.train_path="), "gone.jsonl", "no such file")


def test_an_unreadable_data_file(sluice: Command, folder: Path) -> None:
    (folder / "broken.parquet").write_bytes(b"PAR1 but not really")
    assert_rejected(
        sluice("train", "tiny.toml", "data.eval_path=broken.parquet"), "broken.parquet", "can't be read as Parquet"
    )


def test_a_row_without_a_needed_column(sluice: Command, folder: Path) -> None:
    lines = [tiny_row(0), {key: value for key, value in tiny_row(1).items() if key != "reward_model"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert_rejected(sluice("train", "tiny.toml", "data.train_path=rows.jsonl"), "rows.jsonl, row 2", "'reward_model'")


def test_an_empty_prompt(sluice: Command, folder: Path) -> None:
    write_rows(folder / "empty.parquet", [tiny_row(0), tiny_row(1, prompt=" ")])
    assert_rejected(sluice("train", "tiny.toml", "data.train_path=empty.parquet"), "row 2", "the prompt is empty")


def test_a_prompt_that_is_too_long(sluice: Command) -> None:
    assert_rejected(
        sluice("train", "tiny.toml", "data.max_prompt_tokens=8"),
        "train.parquet, row 1: the prompt has 9 tokens",
        "data.max_prompt_tokens = 8",
        'data.overlong = "drop"',
    )


def test_a_row_that_can_not_fit_a_micro_batch(sluice: Command) -> None:
    assert_rejected(sluice("train", "tiny.toml", "packing.token_budget=16"), "packing.token_budget = 16", "at least 22")


def test_a_model_folder_without_a_tokenizer(sluice: Command, folder: Path) -> None:
    make_tiny_model(folder / "bare")
    for path in (folder / "bare").glob("tokenizer*"):
        path.unlink()
    assert_rejected(sluice("train", "tiny.toml", "model.path=bare"), "model.path bare", "tokenizer")


def test_a_model_folder_without_weights(sluice: Command, folder: Path) -> None:
    (make_tiny_model(folder / "light") / "model.safetensors").unlink()
    assert_rejected(sluice("train", "tiny.toml", "model.path=light"), "model.path light", "neither model.safetensors")


def test_ray_client_is_refused_with_the_way_to_submit_a_driver(sluice: Command) -> None:
    command = "bash -c 'cd FOLDER && exec sluice train CONFIG services.ray_address=auto'"
    submitted = f"submit it as a job: ray job submit --address http://HEAD:8265 -- {command}"
    for command in (("ps", "--address"), ("stop", "run-1", "--address")):
        assert_rejected(sluice(*command, "ray://head:10001"), "ray://head:10001 is of Ray Client", submitted)
    with pytest.raises(ServiceError, match="Ray Client, which was removed in"):
        connect(ServicesConfig(ray_address="ray://head:10001"))


def test_a_driver_without_the_token_of_its_cluster_is_told_what_to_set(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    with socket.create_server(("127.0.0.1", 0)) as head:  # Ray looks for its token before it sends anything
        address = f"127.0.0.1:{head.getsockname()[1]}"
        command = [sys.executable, "-m", "flows.cli.main", "ps", "--address", address]
        own = kept | {"HOME": str(tmp_path), "COLUMNS": "1000"}
        done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"can't connect to {address}: Token authentication is enabled but no auth" in done.stderr
    assert "; if Ray runs there, set RAY_AUTH_MODE=token and the cluster's RAY_AUTH_TOKEN (or " in done.stderr


def test_a_model_folder_that_is_not_there(sluice: Command) -> None:
    assert_rejected(sluice("train", "tiny.toml", "model.path=./nowhere"), "./nowhere", "no such folder")


def test_a_reward_in_a_file_that_another_module_hides(folder: Path, sluice: Command) -> None:
    (folder / "code.py").write_text("def score(prompt, completion, answer, info): return 1.0\n")
    try:
        result = sluice("train", "tiny.toml", "reward.path=code:score")
    finally:
        (folder / "code.py").unlink()
    assert_rejected(result, "code.py, as that comes first on the module path", "give your file another name")


@pytest.mark.parametrize(
    ("path", "message"),
    [("no_such_module:score", "No module named 'no_such_module'"), ("tiny_rewards:absent", "has no such function")],
)
def test_a_reward_that_can_not_be_imported(sluice: Command, path: str, message: str) -> None:
    assert_rejected(sluice("train", "tiny.toml", f"reward.path={path}"), f"reward.path '{path}'", message)


def test_a_limit_on_what_no_step_has(sluice: Command) -> None:
    refused = sluice("train", "tiny.toml", "approval.when=['reward < 0', 'eval/accuracy < 0.3']")
    assert_rejected(refused, "approval.when: eval/accuracy < 0.3:", "no step has it")


def test_a_prefect_that_does_not_answer(sluice: Command) -> None:
    assert_rejected(
        sluice(
            "train", "tiny.toml", "services.prefect_api_url=http://127.0.0.1:9/api", "services.ray_address=127.0.0.1:9"
        ),
        "no Prefect API responds at http://127.0.0.1:9/api",
    )


def test_a_step_that_the_store_can_not_hold(sluice: Command, tmp_path: Path) -> None:
    expected = ("the columns of one step take", "more than store.capacity_bytes = 2000; set it to at least")
    assert_rejected(sluice("train", "tiny.toml", "store.capacity_bytes=2000"), *expected)
    directory = RunDirectory.create(load_config(Path("tiny.toml"), [f"runtime.runs_dir={tmp_path}"]), "begun")
    assert_rejected(sluice("resume", str(directory.path), "store.capacity_bytes=2000"), *expected)


def test_a_run_that_was_extended_is_complete_only_with_a_summary_of_its_last_step(
    sluice: Command, tmp_path: Path
) -> None:
    """It may be killed after its last line, in the evaluation or the checkpoint that follow."""
    directory = RunDirectory.create(load_config(Path("tiny.toml"), [f"runtime.runs_dir={tmp_path}", "steps=2"]), "more")
    figures = {"reward_first": 0.5, "reward_last": 0.5, "accuracy_before": None, "accuracy_after": None, "seconds": 1.0}
    for number in range(2):
        directory.metrics.append_step(
            StepReport(step=number, policy_version=number + 1, metrics={}, seconds=1.0, seconds_by_phase={})
        )
        directory.write_summary(
            RunSummary(
                **{"run_id": "more", "steps": number + 1, "tokens_per_second": 1.0, "seconds_by_phase": {}, **figures},
                store_bytes_at_end=0,
                prefect_ui="",
            )
        )
    code, out, _ = sluice("resume", str(directory.path))
    assert (code, "run more is complete: 2 of 2 steps; nothing to resume" in out) == (0, True)
    again = ("train", "tiny.toml", "steps=2", "--run-id", "more", f"runtime.runs_dir={tmp_path}")
    assert_rejected(sluice(*again), "run 'more' exists; resume it with: sluice resume")
    assert "run more is complete: 2 of 2 steps; nothing to resume" in sluice(*again, "--resume").out
    assert_rejected(sluice("train", "tiny.toml", "--resume"), "--resume goes with --run-id")
    directory.write_summary(directory.summary().replace(steps=1))
    expected = ("the columns of one step take", "more than store.capacity_bytes = 2000; set it to at least")
    assert_rejected(sluice("resume", str(directory.path), "store.capacity_bytes=2000"), *expected)  # it is checked


def test_an_unknown_run_names_the_known_ones(sluice: Command, folder: Path) -> None:
    for command in ("resume", "report", "eval"):
        assert_rejected(sluice(command, "absent-run"), "no run 'absent-run'", "runs/ holds no runs")


def test_a_task_that_reasoning_gym_does_not_know(sluice: Command) -> None:
    assert_rejected(sluice("data", "no_such_task", "out.parquet"), "no_such_task")
    assert_rejected(sluice("data", "spell_backward", "out.parquet", "max_word_length=4"), "max_word_length")
    assert_rejected(sluice("data", "spell_backward", "out.parquet", "max_word_len"), "not of the form key=value")


def test_nothing_was_started_or_left(folder: Path) -> None:
    assert not (folder / ".sluice").exists()
    assert not (folder / "runs").exists()


@pytest.mark.command("data")
def test_data_that_is_held_out_stays_out(sluice: Command, folder: Path) -> None:
    from infra.datasets import load_prompts
    from infra.models.load import load_tokenizer
    from schemas.config.data import DataConfig
    from schemas.config.model import ModelConfig

    settings = ("max_word_len=3", "--size")
    assert sluice("data", "spell_backward", "held.parquet", *settings, "50")[0] == 0
    code, out, _ = sluice("data", "spell_backward", "rest.parquet", *settings, "300", "--exclude", "held.parquet")
    assert code == 0
    tokenizer = load_tokenizer(ModelConfig(path=str(folder / "model")))
    rows = {}
    for name in ("held", "rest"):
        data = load_prompts(str(folder / f"{name}.parquet"), DataConfig(train_path=name), tokenizer)
        rows[name] = {data[index].prompt_text for index in range(len(data))}
    assert not rows["held"] & rows["rest"]
    assert 0 < len(rows["rest"]) < 300
    assert "rows of spell_backward to rest.parquet" in out


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["demo"],
        ["train"],
        ["resume"],
        ["data"],
        ["eval"],
        ["inspect"],
        ["report"],
        ["runs"],
        ["plan"],
        ["export"],
        ["down"],
    ],
)
def test_every_command_explains_itself(sluice: Command, command: list[str]) -> None:
    code, out, _ = sluice(*command, "--help")
    assert code == 0
    assert "Usage: sluice" in out
    if command:
        assert len(out.splitlines()[3].strip()) > 30  # a sentence, not a name


def test_the_version(sluice: Command) -> None:
    code, out, _ = sluice("--version")
    assert code == 0
    assert out == f"sluice {version('sluice-rl')}\n"


def test_benchmarks_are_listed_and_others_refused() -> None:
    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "flows.cli.main", "bench", *arguments]
        return subprocess.run(command, cwd=commands.CHECKOUT, capture_output=True, text=True, check=False)

    listed = run()
    assert listed.returncode == 0
    assert all(f"\n  {name} " in listed.stdout for name in COMMANDS)
    refused = run("flight")
    assert refused.returncode == 2
    assert "invalid choice: 'flight' (choose from 'chaos', 'data-plane', " in refused.stderr


def test_benchmarks_without_a_checkout(sluice: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(commands, "CHECKOUT", tmp_path)
    assert_rejected(sluice("bench", "step"), "benchmarks need a checkout and the extra `bench`")


HEAVY = ("pydantic", "numpy", "pyarrow", "prefect", "ray", "torch", "transformers")


def test_help_imports_only_what_it_needs() -> None:
    code = f"import sys, flows.cli.main; print(set(sys.modules) & set({HEAVY}))"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("PREFECT_API_URL", "http://[::1/api", "Invalid IPv6 URL"),
        ("PREFECT_SERVER_API_PORT", "abc", "port: Input should be a valid integer"),
    ],
)
def test_settings_that_prefect_refuses_are_one_line(name: str, value: str, reason: str, tmp_path: Path) -> None:
    """In a process of its own: Prefect reads them when it is imported."""
    command = "import sys; sys.argv = ['sluice', 'train', 'x.toml']; from flows.cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", command], env={**os.environ, name: value}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    error = next(line for line in ended.stderr.splitlines() if line.startswith("error: "))
    assert error.startswith("error: Prefect refuses its settings: ")
    assert reason in error
    assert "Traceback" not in ended.stderr
