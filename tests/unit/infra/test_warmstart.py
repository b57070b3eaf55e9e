"""The warm start's prompts, without training."""

import json
from pathlib import Path

import pytest

from infra.models.tiny import CHAT_TEMPLATE, make_tokenizer
from infra.workers.warmstart import WarmstartWorker
from schemas.config.data import DataConfig
from schemas.config.model import ModelConfig
from schemas.config.warmstart import WarmstartConfig
from schemas.errors import DataError
from tests.support.tiny import make_tiny_data, make_tiny_model


def worker(folder: Path, *tools: str) -> WarmstartWorker:
    """A worker that has a tiny model, whose folder is `model`, and these tools."""
    if not (folder / "model").exists():
        make_tiny_model(folder / "model")
    data = DataConfig(train_path=str(make_tiny_data(folder / "rows.jsonl", 1)))
    model = ModelConfig(path=str(folder / "model"))
    return WarmstartWorker(
        WarmstartConfig(model=model, data=data, tools=tools, out_path=str(folder / "out"), steps=1, num_threads=1)
    )


def first_prompt(worker: WarmstartWorker) -> str:
    worker.start()
    return str(make_tokenizer().decode(worker._rows[0].prompt_ids))


def test_the_chat_template_shows_the_tools(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + CHAT_TEMPLATE
    make_tiny_model(tmp_path / "model", tokenizer=tokenizer)
    assert first_prompt(worker(tmp_path, "tests.support.games:add")) == "add<|user|>0 + 1 =<|assistant|>"
    assert first_prompt(worker(tmp_path)) == "<|user|>0 + 1 =<|assistant|>"


def test_a_template_that_shows_no_tools_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no variable `tools`"):
        worker(tmp_path, "tests.support.games:add").start()


def test_the_saved_config_has_the_models_own_dropout(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", attention_dropout=0.25)
    started = worker(tmp_path)
    started.start()
    saved, own = (json.loads(Path(path, "config.json").read_text()) for path in (started.save(), tmp_path / "model"))
    assert saved["attention_dropout"] == own["attention_dropout"] == 0.25
