"""The thread that watches workers, without a Ray."""

import subprocess
import sys


def test_a_lost_ray_is_left_to_those_who_wait_for_it() -> None:
    code = """
import threading, time
from infra.ray.health import monitored_actors
with monitored_actors(["nobody"], timeout_seconds=0.1):  # this process isn't connected to Ray
    time.sleep(0.3)
    assert "actor-monitor" in {thread.name for thread in threading.enumerate()}
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
