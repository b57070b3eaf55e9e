"""Nodes of a Ray cluster of several raylets on this machine."""

import subprocess
import sys


def drain_node(address: str, node: str) -> None:
    """Tell Ray that a node will be gone in ten minutes, as a provider of spot machines does."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--address={address}", f"--node-id={node}"]
    told = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test", "--deadline-remaining-seconds=600"]
    subprocess.run([*command, *told], check=True)
