"""Make the prompts, and a tiny model that knows the rules of the game but plays it badly: `make_files.py FOLDER SEED`.

Its warm start is supervised, on games of a player who guesses any number, which in one of five guesses contradicts what
it was told before.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from flows.cli.demo import RECIPE
from infra.models.tiny import make_model
from infra.workers.warmstart import WarmstartWorker
from schemas.config.data import DataConfig
from schemas.config.model import ModelConfig
from schemas.config.warmstart import WarmstartConfig

TOP, TURNS = 7, 3
QUESTION = f"Guess my number from 1 to {TOP}."
FOLLOWS_HINTS = 0.8
GAMES, STEPS = 4000, 300


def main(folder: Path, seed: int, num_steps: int) -> None:
    """Write what `config.toml` names."""
    if (folder / "model" / "config.json").exists():
        print(f"{folder / 'model'} exists")
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.jsonl", [row([ask()], "") for _ in range(1000)])
    write_rows(folder / "heldout.jsonl", [row([ask()], "") for _ in range(70)])
    player = random.Random(seed)
    write_rows(folder / "games.jsonl", [each for _ in range(GAMES) for each in play(player)])
    worker = WarmstartWorker(
        WarmstartConfig(
            model=ModelConfig(path=str(make_model(folder / "random", seed=seed, **RECIPE.model))),
            data=DataConfig(train_path=str(folder / "games.jsonl")),
            out_path=str(folder / "model"),
            steps=num_steps,
            seed=seed,
        )
    )
    worker.start()
    for _ in range(num_steps):
        loss = worker.advance(1)
    print(f"wrote a model to {worker.save()}; its loss is {loss:.3f} nats per token")


def play(player: random.Random) -> list[dict[str, Any]]:
    """Return the turns of a game, each a chat with the next guess as its answer."""
    number, chat, rows = player.randint(1, TOP), [ask()], []
    low, high = 1, TOP
    for _ in range(TURNS):
        follows = player.random() < FOLLOWS_HINTS
        guess = player.randint(low, high) if follows else player.randint(1, TOP)
        rows.append(row(chat, str(guess)))
        if guess == number:
            break
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        hint = "higher" if guess < number else "lower"
        chat = [*chat, {"role": "assistant", "content": str(guess)}, {"role": "user", "content": hint}]
    return rows


def ask() -> dict[str, str]:
    """Return the message that a game begins with."""
    return {"role": "user", "content": QUESTION}


def row(chat: list[dict[str, str]], answer: str) -> dict[str, Any]:
    """Return a data row."""
    return {"data_source": "guess", "prompt": chat, "reward_model": {"ground_truth": answer}}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as lines of JSON."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else STEPS)
