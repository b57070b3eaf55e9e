"""The same agent with the `openai` client, whose answers come in chunks."""

import json
import os
import random
import sys
from typing import Any

import agent
from openai import OpenAI

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY


def ask(messages: agent.Messages) -> dict[str, Any]:
    """Return the model's next message."""
    chunks = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, stream=True)  # type: ignore[arg-type]
    return {"role": "assistant", "content": "".join(chunk.choices[0].delta.content or "" for chunk in chunks)}


if __name__ == "__main__":
    agent.ask = ask
    row = json.load(sys.stdin)
    guesses = agent.play(row["prompt"], random.Random(row["seed"]).randint(1, agent.TOP))
    print(json.dumps({"reward": float(guesses > 0), "metrics": {"guesses": guesses or agent.TURNS}}))
