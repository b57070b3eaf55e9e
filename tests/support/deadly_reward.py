"""A reward that kills the process that computes it, once, when a test has asked for it."""

import os
import signal
from pathlib import Path
from typing import Any


def short(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
    """Return the fraction of characters that are no vowels; kill this process if the file `info["kills"]` exists."""
    if "kills" in info and (order := Path(info["kills"])).exists():
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1 - sum(completion.count(vowel) for vowel in "aeiou") / max(1, len(completion))
