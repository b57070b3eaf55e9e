"""Files of reasoning-gym problems."""

import json
from pathlib import Path

import pytest

from infra.datasets.reasoning_gym import write_problems
from schemas.errors import ConfigError, DataError
from tests.support.dataset_rows import load
from tests.support.tiny import tiny_row, write_rows

WORDS = {"min_word_len": 3, "max_word_len": 3}


def write(path: Path, exclude: Path | None = None) -> int:
    return write_problems(path, "spell_backward", size=6, seed=0, settings=WORDS, exclude=exclude)


def questions(path: Path) -> list[str]:
    prompts = load(path)
    return [prompts[row].prompt_text for row in range(len(prompts))]


def test_the_name_decides_what_is_written(tmp_path: Path) -> None:
    assert write(tmp_path / "rows.parquet") == write(tmp_path / "rows.jsonl") == 6
    assert (tmp_path / "rows.parquet").read_bytes()[:4] == b"PAR1"
    assert len([json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]) == 6
    assert questions(tmp_path / "rows.jsonl") == questions(tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows.csv: its name decides .* end in \.parquet or \.jsonl"):
        write(tmp_path / "rows.csv")


@pytest.mark.parametrize(
    "chat",
    [
        lambda question: [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{question}\n"}],
        lambda question: [{"role": "user", "content": [{"type": "text", "text": question}]}],
        lambda question: question,
        lambda question: f"{question}\nThink step by step.",
        lambda question: f'Solve: "{question}"',
        lambda question: "  " + question.replace(" ", "  ").replace("\n", "\r\n"),
        lambda question: [
            {"role": "user", "content": "1 + 1"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": question},
        ],
    ],
)
def test_held_out_problems_are_found_by_the_users_text(tmp_path: Path, chat) -> None:
    write(tmp_path / "rows.jsonl")
    asked = questions(tmp_path / "rows.jsonl")
    held_out = write_rows(tmp_path / "held.jsonl", [tiny_row(0) | {"prompt": chat(text)} for text in asked[:4]])
    write(tmp_path / "rest.parquet", exclude=held_out)
    assert questions(tmp_path / "rest.parquet") == [text for text in asked if text not in asked[:4]]
    write_rows(held_out, [tiny_row(0) | {"prompt": chat(text)} for text in asked])
    with pytest.raises(DataError, match=r"held\.jsonl contains all 6 generated problems"):
        write(tmp_path / "rest.parquet", exclude=held_out)


def test_a_problem_that_only_begins_like_a_held_out_one_stays(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl")
    asked = questions(tmp_path / "rows.jsonl")
    write_rows(tmp_path / "held.jsonl", [tiny_row(0) | {"prompt": f"{text}s or x{text}"} for text in asked])
    assert write(tmp_path / "rest.parquet", exclude=tmp_path / "held.jsonl") == 6
