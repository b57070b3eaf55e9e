"""Rows and configs of supervised fine-tuning, and chat templates of the ways in which turns are written."""

import json
from pathlib import Path
from typing import Any

from infra.models.tiny import CHAT_TEMPLATE
from schemas.config.run import RunConfig
from tests.support.configs import run_config
from tests.support.tiny import write_rows

Chat = list[dict[str, Any]]

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
# Turns with tool calls, in the form of Qwen's, and the tools' JSON schemas.
CALLING = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<call>' + call['function']['name'] + ' ' }}{{ call['function']['arguments'] | tojson }}{% endfor %}"
    "{{ eos_token }}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKED_CALLING = CALLING.replace(
    "{{ message['content'] }}{% for call", "{% generation %}{{ message['content'] }}{% for call"
).replace("{{ eos_token }}{% else", "{{ eos_token }}{% endgeneration %}{% else")


def chat(*contents: str) -> Chat:
    """Return a chat of user and assistant in turn."""
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def calling(*calls: tuple[str, Any], content: str | None = None) -> dict[str, Any]:
    """Return a turn with tool calls, of a name and arguments each, as TRL's data sets have it."""
    made = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "tool_calls": made} | ({} if content is None else {"content": content})


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
