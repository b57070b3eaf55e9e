"""Make the prompts, a tiny model, and games from which it learns the rules: `make_files.py FOLDER SEED`.

In these, a player guesses any number, which in one of five guesses contradicts what it was told before.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from flows.cli.demo import RECIPE
from infra.models.tiny import make_model

TOP, TURNS = 7, 3
QUESTION = f"Guess my number from 1 to {TOP}."
FOLLOWS_HINTS = 0.8
GAMES = 4000


def main(folder: Path, seed: int) -> None:
    """Write what `config.toml` names, but for the trained model."""
    if (folder / "random" / "config.json").exists():
        print(f"{folder / 'random'} exists")
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.jsonl", [row([ask()]) for _ in range(1000)])
    write_rows(folder / "heldout.jsonl", [row([ask()]) for _ in range(70)])
    player = random.Random(seed)
    write_rows(folder / "turns.jsonl", [{"messages": play(player)} for _ in range(GAMES)])
    make_model(folder / "random", seed=seed, **RECIPE.model)


def play(player: random.Random) -> list[dict[str, str]]:
    """Return a game as a chat, which ends with the last guess."""
    number, chat = player.randint(1, TOP), [ask()]
    low, high = 1, TOP
    for turn in range(1, TURNS + 1):
        follows = player.random() < FOLLOWS_HINTS
        guess = player.randint(low, high) if follows else player.randint(1, TOP)
        chat.append({"role": "assistant", "content": str(guess)})
        if guess == number or turn == TURNS:
            break
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        chat.append({"role": "user", "content": "higher" if guess < number else "lower"})
    return chat


def ask() -> dict[str, str]:
    """Return the message that a game begins with."""
    return {"role": "user", "content": QUESTION}


def row(chat: list[dict[str, str]]) -> dict[str, Any]:
    """Return a data row; the environment knows the answer."""
    return {"data_source": "guess", "prompt": chat, "reward_model": {"ground_truth": ""}}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as lines of JSON."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
