"""`sluice init`: what it writes is a config that `sluice plan` accepts."""

from pathlib import Path

import pytest

from schemas.config.load import load_config
from schemas.config.reward import FunctionReward
from tests.support.command import Command, assert_rejected, make_command
from tests.support.tiny import make_tiny_model, tiny_row, write_rows

FILES = ("--model", "model", "--data", "train.parquet")
MAX_LINES = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init")
    make_tiny_model(folder / "model")
    write_rows(folder / "train.parquet", [tiny_row(number) for number in range(6)])
    return folder


@pytest.fixture
def sluice(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(folder)
    return make_command(monkeypatch, capsys)


@pytest.mark.command("init", "plan")
def test_the_file_is_accepted_by_plan_fits_one_screen_and_is_not_overwritten(sluice: Command, folder: Path) -> None:
    made = sluice("init", *FILES)
    assert made.exit_code == 0, made.err
    assert made.out == "wrote run.toml; next: sluice plan run.toml\n"
    text = (folder / "run.toml").read_text()
    assert len(text.splitlines()) <= MAX_LINES
    planned = sluice("plan", "run.toml")
    assert planned.exit_code == 0, planned.err
    assert_rejected(sluice("init", *FILES), "run.toml exists", "--out")
    assert (folder / "run.toml").read_text() == text


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        (("3", "-1,200.5", "so it is 7 #### 42"), "numeric"),
        (("3", "Paris"), "exact"),
        (("3", "Catch 22"), "exact"),
        (("1 or 2", "3"), "exact"),
    ],
)
def test_the_reward_is_numeric_if_all_answers_are_numbers(
    sluice: Command, folder: Path, answers: tuple[str, ...], kind: str
) -> None:
    write_rows(folder / "answers.jsonl", [tiny_row(0, answer=answer) for answer in answers])
    assert not sluice("init", "--model", "model", "--data", "answers.jsonl", "-o", f"{answers[1]}.toml").exit_code
    config = load_config(folder / f"{answers[1]}.toml")
    assert (config.reward.kind, config.rollout.num_prompts) == (kind, len(answers))


def test_a_reward_of_the_users_own(sluice: Command, folder: Path) -> None:
    assert not sluice("init", *FILES, "--reward", "my_reward:score", "-o", "own.toml").exit_code
    reward = load_config(folder / "own.toml").reward
    assert isinstance(reward, FunctionReward)
    assert reward.path == "my_reward:score"
    assert_rejected(sluice("init", *FILES, "--reward", "judge", "-o", "new.toml"), "'judge'", "module:function")
    assert not (folder / "new.toml").exists()


def test_prompts_that_leave_no_room_for_a_response(sluice: Command, folder: Path) -> None:
    write_rows(folder / "long.jsonl", [tiny_row(0, prompt="1" * 600)])
    command = ("init", "--model", "model", "--data", "long.jsonl", "-o", "long.toml")
    assert_rejected(sluice(*command), "the longest prompt", "leaves none for a response")


def test_a_few_prompts_that_leave_no_room_for_a_response_are_dropped(sluice: Command, folder: Path) -> None:
    """Two of 20 leave less than half of the 512 positions; the others have 8 tokens."""
    prompts = ["1" * 470, "1" * 500, *["2 + 2?"] * 18]
    write_rows(folder / "outliers.jsonl", [tiny_row(0, prompt=prompt) for prompt in prompts])
    made = sluice("init", "--model", "model", "--data", "outliers.jsonl", "-o", "outliers.toml")
    assert made.exit_code == 0, made.err
    config = load_config(folder / "outliers.toml")
    assert (config.data.overlong, config.data.max_prompt_tokens) == ("drop", 8)
    assert config.rollout.max_response_tokens == 512 - 8
    assert "2 of 20 prompts have more than 8 tokens, up to " in made.out
    assert "dropped (data.overlong)" in made.out
    planned = sluice("plan", "outliers.toml")
    assert planned.exit_code == 0, planned.err
    write_rows(folder / "many.jsonl", [tiny_row(0, prompt=prompt) for prompt in prompts[:4]])  # half: none is dropped
    assert sluice("init", "--model", "model", "--data", "many.jsonl", "-o", "many.toml").exit_code == 0
    config = load_config(folder / "many.toml")
    assert config.data.overlong == "error"
    assert config.data.max_prompt_tokens + config.rollout.max_response_tokens == 512
