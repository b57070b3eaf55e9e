"""Sources of prompts with environments of their own: their rows, their tools, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from infra.datasets import load_run_prompts
from infra.models.tiny import CHAT_TEMPLATE, make_tokenizer
from schemas.config.run import RunConfig
from schemas.errors import DataError
from tests.support.configs import run_config
from tests.support.mixed_sources import ECHO, GREETING, NAMES, folder, mixed, sources
from tests.support.tiny import tiny_row, write_rows

__all__ = ["folder"]  # a fixture

TOOLS = {"kind": "tools", "tools": ["tests.support.games:add"]}


def test_held_out_rows_of_unknown_sources_are_refused(folder: Path) -> None:
    write_rows(folder / "other.jsonl", [tiny_row(0, data_source="other")])
    with pytest.raises(DataError, match=r"no training prompt has the data_source 'other'.*: echo, greeting, plain"):
        load_run_prompts(mixed(folder, "other.jsonl", **NAMES).config, make_tokenizer())
    both = mixed(folder, greeting=GREETING, echo=GREETING).config  # all the same: any held-out row has it
    prompts, held_out = load_run_prompts(
        both.replace(data=both.data.replace(eval_path=str(folder / "other.jsonl"))), make_tokenizer()
    )
    assert held_out is not None
    assert {prompts[0].environment, held_out[0].environment} == {0}


def test_held_out_rows_of_ambiguous_sources_are_refused(folder: Path) -> None:
    twice = sources(folder, greeting=GREETING) + sources(folder, greeting=ECHO)
    config = run_config(folder, data={"train_path": "", "sources": twice, "eval_path": str(folder / "held-out.jsonl")})
    write_rows(folder / "held-out-greeting.jsonl", [tiny_row(0, data_source="greeting")])
    config = config.replace(data=config.data.replace(eval_path=str(folder / "held-out-greeting.jsonl")))
    with pytest.raises(DataError, match="data_source 'greeting' have different environments"):
        load_run_prompts(config, make_tokenizer())


def test_the_chat_template_shows_each_source_its_own_tools(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ '<|pad|>' if tools else '' }}" + CHAT_TEMPLATE
    prompts, held_out = load_run_prompts(mixed(folder, greeting=TOOLS, echo=ECHO, plain=None).config, tokenizer)
    assert held_out is not None
    for row in [prompts[0], prompts[3], prompts[6], held_out[0], held_out[1]]:
        assert (row.prompt_ids[0] == tokenizer.pad_token_id) == (row.data_source == "greeting")
    assert [prompts[row].environment for row in (0, 3, 6)] == [0, 1, None]


def config_of(folder: Path, *, reward: str = "exact", **fields: Any) -> RunConfig:
    given = [{"path": "a.jsonl", **fields}, {"path": "b.jsonl"}]
    return run_config(folder, data={"train_path": "", "sources": given}, reward={"kind": reward})


def test_a_source_without_an_environment_has_the_runs(folder: Path) -> None:
    config = run_config(folder, data={"train_path": "", "sources": sources(folder, **NAMES)}, environment=ECHO)
    assert [each and each.path.rpartition(":")[2] for each in config.environment_by_source] == [
        "Greeting", "Echo", "Echo",
    ]  # fmt: skip
    assert len(config.environments) == 2
    assert config_of(folder).environments == ()


def test_unusable_environments_of_sources(folder: Path) -> None:
    with pytest.raises(ValidationError, match=r"but b\.jsonl has none; give that one of data\.sources an environment"):
        config_of(folder, reward="environment", environment=ECHO)
    with pytest.raises(ValidationError, match="differ in resume_rows or lockstep_steps"):
        run_config(
            folder,
            data={"train_path": "", "sources": sources(folder, echo=ECHO, plain={**ECHO, "resume_rows": "batch"})},
        )
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        config_of(folder, environment={**ECHO, "top": 7})
