"""The benchmark of agents plays every way, and counts what is prefilled; no time is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
SMALL = ("--model", "tiny", "--rows", "8", "--turns", "3", "--milliseconds", "1", "--repeats", "1")


@pytest.mark.slow
def test_every_way_is_played_and_only_anew_prefills_more_than_the_new_tokens() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "flows.cli.main", "bench", "agents", *SMALL, "--json"],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    ways = json.loads(finished.stdout.splitlines()[-1])
    assert list(ways) == ["engine", "anew", "wave", "steps", "journal", "arrival"]
    assert ways["engine"]["of engine"] == 1
    for way, figures in ways.items():
        assert figures["tokens/s"] > 0
        assert (figures["prefilled"] > figures["new tokens"]) == (way == "anew")
