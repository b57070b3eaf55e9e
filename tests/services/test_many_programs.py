"""The memory of the processes that serve many programs at once, which are real ones."""

import json
import subprocess
import sys

import pytest

# MiB, at 100 and 1,000: twice what was measured; a process that kept a thread or a buffer of 1 MiB for each would fail.
LIMITS = {"environment_process": {100: 20, 1000: 80}, "rollout_worker": {100: 40, 1000: 120}}


@pytest.mark.parametrize("num_programs", [100, pytest.param(1000, marks=pytest.mark.extended)])
def test_the_memory_of_what_serves_many_programs_is_bounded(num_programs: int) -> None:
    command = [sys.executable, "-m", "tests.support.many_programs", "memory", str(num_programs)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found = json.loads(ended.stdout)
    assert found["at_once"] == num_programs
    for name, most in LIMITS.items():
        assert found[name] - found[f"{name}_before"] < most[num_programs], (name, found)
