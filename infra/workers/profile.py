"""The recording of a worker's phase by torch's profiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from infra.storage.profiles import SUFFIX, write_trace
from infra.storage.runs import RunDirectory
from schemas.step import RunHandle


@contextmanager
def profiled(run: RunHandle, step: int, worker: str, phase: str) -> Iterator[None]:
    """Write a trace of the block to the run's directory, if the config profiles this step; else do nothing."""
    if step not in run.config.runtime.profile_steps:
        yield
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as recorded, record_function(phase):
        yield
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"trace{SUFFIX}"
        recorded.export_chrome_trace(str(path))
        write_trace(RunDirectory.of(run), step, worker, phase, path.read_bytes())
