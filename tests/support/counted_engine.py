"""The engine of `examples/own_engine`, which notes what it and its worker take while it has a bucket of weights mapped.

Appends a line to the file that `NOTES` names: the bytes of both, where memory that both have counts once.
"""

import os
import socket
import sys
from pathlib import Path
from typing import Any

NOTES = "WEIGHT_NOTES"
PROGRAM = Path(__file__).parents[2] / "examples" / "own_engine" / "engine.py"


def pss_bytes(process: int) -> int:
    """Return the proportional set size of a process: of what several have mapped, each has its share."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024


if __name__ == "__main__":
    sys.path.append(str(PROGRAM.parent))
    import engine  # type: ignore[import-not-found]

    compare = engine.frames.compare

    def note(*arguments: Any) -> None:
        """Compare the checksum of a bucket, whose pages have all been read by then."""
        with open(os.environ[NOTES], "a") as file:
            print(pss_bytes(os.getppid()) + pss_bytes(os.getpid()), file=file)
        compare(*arguments)

    engine.frames.compare = note
    engine.frames.serve(socket.socket(fileno=int(sys.argv[1])), engine.PlainEngine())
