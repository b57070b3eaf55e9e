"""The traces of torch's profiler in a run's directory: one per profiled step, worker and phase."""

from infra.storage.ledger import step_folder
from infra.storage.runs import RunDirectory

FOLDER, SUFFIX = "profile", ".json.gz"  # Chrome traces, which Perfetto opens as they are


def write_trace(directory: RunDirectory, step: int, worker: str, phase: str, content: bytes) -> None:
    """Write a trace, e.g. `profile/step-000002/policy-0-update.json.gz`; it replaces that of an earlier attempt."""
    directory.folder.write(f"{FOLDER}/{step_folder(step)}/{worker}-{phase}{SUFFIX}", content)


def find_traces(directory: RunDirectory) -> list[str]:
    """Return the names of a run's traces within its directory, by step, worker and phase."""
    return sorted(f"{FOLDER}/{name}" for name in directory.folder.within(FOLDER).sizes() if name.endswith(SUFFIX))
