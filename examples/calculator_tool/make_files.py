"""Make the questions, a tiny model, and chats from which it learns how tools are called: `make_files.py FOLDER SEED`.

The chats are of three kinds of students: they call the right tool and repeat its result, or misread a number and call a
tool at random, or guess.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).resolve().parents[1]))
import calculator
from make_model import SIZES

from infra.models.tiny import make_model, make_tokenizer
from rl_core.environments.tools import tool_schemas

TOOLS = {"+": calculator.add, "*": calculator.multiply}
RIGHT, MISREAD = 0.4, 0.3  # of the students; the others guess
TRAIN, HELDOUT = 2000, 256
STUDENTS = 8000

# The template shows a tool as `add(a, b)`. What is around a call's numbers has tokens of its own: a call is 9 of them.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name + '(' }}"
    "{{ tool.function.parameters.properties | join(', ') + ') ' }}{% endfor %}"
)
WORDS = ('<tool_call>{"name": "', "add", "multiply", '", "arguments": {"a": ', ', "b": ', "}}</tool_call>", "(a, b)")


class Question(NamedTuple):
    """A sum or a product of two numbers of two digits."""

    a: int
    sign: str
    b: int

    @property
    def answer(self) -> int:
        """The sum or product."""
        return TOOLS[self.sign](self.a, self.b)

    @property
    def chat(self) -> list[dict[str, str]]:
        """What the model is asked."""
        return [{"role": "user", "content": f"{self.a} {self.sign} {self.b} ="}]


def main(folder: Path, seed: int) -> None:
    """Write what `config.toml` names, but for the trained model."""
    if (folder / "random" / "config.json").exists():
        print(f"{folder / 'random'} exists")
        return
    folder.mkdir(parents=True, exist_ok=True)
    questions = [Question(a, sign, b) for a in range(10, 100) for sign in TOOLS for b in range(10, 100)]
    dice = random.Random(seed)
    dice.shuffle(questions)
    heldout, others = questions[:HELDOUT], questions[HELDOUT:]
    write_rows(folder / "heldout.jsonl", [row(each) for each in heldout])
    write_rows(folder / "train.jsonl", [row(each) for each in others[:TRAIN]])
    tools = tool_schemas([f"calculator:{tool.__name__}" for tool in TOOLS.values()])
    chats = [{"messages": respond(each, dice), "tools": tools} for each in others[:STUDENTS]]
    write_rows(folder / "turns.jsonl", chats)
    make_model(folder / "random", tokenizer=make_tools_tokenizer(), seed=seed, **SIZES)


def make_tools_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose chat template has tools, and tokens for the calls of these."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|tool|>"], special_tokens=True)
    tokenizer.add_tokens(list(WORDS))
    tokenizer.chat_template = TEMPLATE + tokenizer.chat_template
    return tokenizer


def respond(question: Question, dice: random.Random) -> list[dict[str, str]]:
    """Return a chat with a student."""
    student = dice.random()
    if student >= RIGHT + MISREAD:
        return [*question.chat, said(dice.randint(10, 9999))]
    called = question if student < RIGHT else misread(question, dice)
    return [
        *question.chat,
        said(write_call(called)),
        {"role": "tool", "content": str(called.answer)},
        said(called.answer),
    ]


def said(answer: int | str) -> dict[str, str]:
    """Return a student's turn."""
    return {"role": "assistant", "content": str(answer)}


def misread(question: Question, dice: random.Random) -> Question:
    """Return a question with one of its numbers replaced, and a sign at random."""
    a, b = dice.choice([(dice.randint(10, 99), question.b), (question.a, dice.randint(10, 99))])
    return Question(a, dice.choice(list(TOOLS)), b)


def write_call(question: Question) -> str:
    """Return the call that answers a question, as the parser `hermes` expects it."""
    tool = TOOLS[question.sign].__name__
    call = json.dumps({"name": tool, "arguments": {"a": question.a, "b": question.b}})
    return f"<tool_call>{call}</tool_call>"


def row(question: Question) -> dict[str, Any]:
    """Return a data row."""
    return {
        "data_source": "calculator",
        "prompt": question.chat,
        "reward_model": {"ground_truth": str(question.answer)},
    }


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as lines of JSON."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
