"""Rows and configs of supervised fine-tuning, and chat templates of the ways in which turns are written."""

import json
from pathlib import Path
from typing import Any

from infra.models.tiny import CHAT_TEMPLATE
from schemas.config.run import RunConfig
from tests.support.configs import run_config
from tests.support.tiny import write_rows

Chat = list[dict[str, str]]

MARKED = CHAT_TEMPLATE.replace(
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}",
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}",
)
# As of models that think: only the last turn has a block for it, and a line follows each end.
THINKING = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# A prompt ends with a closed block of reasoning, which no turn but the last one has.
PROMPTED_THINKING = THINKING.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|><think></think>' }}")
# A turn ends where the next message begins.
UNCLOSED = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Only the last turn has an end.
OPEN_ENDED = (
    "{% for message in messages %}{{ message['content'] + '\n' }}"
    "{% if loop.last and message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def chat(*contents: str) -> Chat:
    """Return a chat of user and assistant in turn."""
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def sums(number: int) -> dict[str, Any]:
    """Return a row of one or two turns."""
    contents = [f"{number} + 1 =", str(number + 1), *(("and 2 =", str(number + 3)) if number % 3 == 0 else ())]
    return {"messages": chat(*contents)}


def write_sums(folder: Path) -> None:
    """Write training and held-out rows, of one or two turns."""
    write_rows(folder / "rows.jsonl", [sums(number) for number in range(24)])
    write_rows(folder / "heldout.jsonl", [sums(number) for number in range(30, 35)])


def sft_config(folder: Path = Path(), path: str = "rows.jsonl", **overrides: Any) -> RunConfig:
    """Return the config of a small run on the rows of a file."""
    data = {"train_path": str(folder / path), **overrides.pop("data", {})}
    sft = {"num_rows": 8, "max_tokens": 200, **overrides.pop("sft", {})}
    base = run_config(folder, data=data)
    values = base.model_dump(include={"steps", "model", "data", "runtime"})
    return RunConfig.model_validate({**values, "sft": sft, **overrides})


def sft_toml() -> str:
    """Return the config of a small run in the working directory as TOML."""
    values = {
        "name": "sft",
        "steps": 6,
        "model.path": "model",
        "data.train_path": "rows.jsonl",
        "data.eval_path": "heldout.jsonl",
        "sft.num_rows": 8,
        "sft.max_tokens": 200,
        "optim.lr": 1e-2,
        "eval.every_steps": 2,
        "runtime.num_threads": 1,
    }
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
