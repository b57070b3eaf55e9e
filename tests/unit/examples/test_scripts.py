"""The code of examples that a user would copy: GSM8K's conversion, calls of tools, the wrapper of verl's reward."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(folder: str, code: str, *arguments: str) -> str:
    """Run Python code with an example's folder on its module path; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "examples" / folder), str(ROOT)))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gsm8k_rows_become_prompts_with_the_number_as_answer(tmp_path: Path) -> None:
    source, target = tmp_path / "train.jsonl", tmp_path / "made" / "rows.jsonl"
    solution = "She sold 2 * 600 = <<2*600=1200>>1200 clips.\n#### 1,200"
    source.write_text(json.dumps({"question": "How many clips?", "answer": solution}) + "\n")
    run("math_lora_vllm", "import runpy; runpy.run_module('convert', run_name='__main__')", str(source), str(target))
    (row,) = (json.loads(line) for line in target.read_text().splitlines())
    assert row["reward_model"] == {"ground_truth": "1200"}
    assert row["prompt"][0]["content"].startswith("How many clips? ")
    assert row["extra_info"] == {"solution": "She sold 2 * 600 = <<2*600=1200>>1200 clips."}


def test_the_calculator_s_students_call_tools_as_the_environment_answers() -> None:
    """Each turn but an answer is a call of a tool, of 9 tokens, that the environment answers as the student is told."""
    code = """
import asyncio, json, random
from make_files import Question, make_tools_tokenizer, respond
from rl_core.environments.tools import ToolEnvironment

tokenizer = make_tools_tokenizer()
environment = ToolEnvironment(None, 0, tools=["calculator:add", "calculator:multiply"], parser="hermes")
dice, seen = random.Random(0), []
for number in range(200):
    question = Question(dice.randint(10, 99), dice.choice("+*"), dice.randint(10, 99))
    _, first, *later = respond(question, dice)
    turn = first["content"]
    step = asyncio.run(environment.step(turn))
    assert step.done == (not later)
    if later:
        told, answer = later
        assert ([told["content"]], told["role"]) == (step.observation, "tool"), (turn, step)
        assert answer == {"role": "assistant", "content": told["content"]}
        assert len(tokenizer.encode(turn)) == 9, turn
    seen.append("guess" if step.done else "right" if told["content"] == str(question.answer) else "wrong")
print(json.dumps({kind: seen.count(kind) for kind in sorted(set(seen))}))
"""
    counts = json.loads(run("calculator_tool", code))
    assert sum(counts.values()) == 200
    assert all(counts[kind] > 40 for kind in ("guess", "right", "wrong"))  # 60, 80 and 60 are expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("12345678", {"reward": 1.0, "acc": 1.0}), ("12ab", {"reward": 0.25, "acc": 0.0}), ("", {"reward": 0, "acc": 0})],
)
def test_verl_s_reward_function_under_sluice_s_interface(completion: str, expected: dict[str, float]) -> None:
    info = {"data_source": "digits", "length": 8}
    code = f"import reward; print(reward.score('', {completion!r}, '0123456789', {info}))"
    assert run("from_verl", code).strip() == str({name: float(value) for name, value in expected.items()})


def test_a_verl_reward_function_that_returns_a_number() -> None:
    code = "import reward; reward.compute_score = lambda *_: 1; print(reward.score('', '', '', {'data_source': ''}))"
    assert run("from_verl", code).strip() == "{'reward': 1.0}"
