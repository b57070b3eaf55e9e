"""A run of two steps of version 0.2.0, as that version left it: its directory, without model and data."""

import tarfile
from pathlib import Path

RUN_ID = "old"
ARCHIVE = Path(__file__).parent / "stored_runs" / "0.2.0.tar.gz"


def unpack_run(runs_dir: Path) -> None:
    """Write the run's directory into a folder of runs."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(runs_dir, filter="data")
