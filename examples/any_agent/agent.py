"""An agent: it asks a model for guesses of a number, over OpenAI's API, and knows nothing of Sluice.

Its standard input is the data row as JSON; the last line that it prints is its reward.
"""

import json
import os
import random
import sys
import urllib.request
from typing import Any

TOP, TURNS = 7, 3
Messages = list[dict[str, Any]]


def ask(messages: Messages) -> dict[str, Any]:
    """Return the model's next message."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
        return message


def play(messages: Messages, number: int) -> int:
    """Return after how many guesses the number was found; 0 if it wasn't."""
    for turn in range(1, TURNS + 1):
        reply = ask(messages)
        guess = reply["content"]
        if guess == str(number):
            return turn
        hint = "higher" if guess.isdecimal() and int(guess) < number else "lower"
        messages += [reply, {"role": "user", "content": hint if guess.isdecimal() else "say a number"}]
    return 0


if __name__ == "__main__":
    row = json.load(sys.stdin)
    guesses = play(row["prompt"], random.Random(row["seed"]).randint(1, TOP))
    print(json.dumps({"reward": float(guesses > 0), "metrics": {"guesses": guesses or TURNS}}))
