"""All errors that Sluice raises on purpose.

A `UserError` is one that the user can fix in a config, a data file or a model folder (exit code 2). The others report
a failure of a running pipeline.
"""

import errno
import re

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PipelineError(Exception):
    """The base of all of Sluice's own errors."""


class UserError(PipelineError, ValueError):
    """An input from the user is wrong; the message names the place, the actual value and the fix."""


class ConfigError(UserError):
    """A config file, key or value is invalid."""


class DataError(UserError):
    """A data file is missing or unreadable, or one of its rows is invalid."""


class ModelError(UserError):
    """A model folder is missing, incomplete or inconsistent with its tokenizer."""


class ChatTemplateError(UserError):
    """A model's chat template rejects a chat, or can't continue one of several turns token by token."""


class BrokenChatTemplateError(ChatTemplateError):
    """A model's chat template fails on a chat by an error of its own."""


class RewardImportError(UserError):
    """A reward function can't be found by its import path."""


class EnvironmentImportError(UserError):
    """An environment's class or a tool can't be found by its import path, or lacks what it needs."""


class RunError(UserError):
    """A run directory is missing, or not in the state that the command needs."""


class BundleError(UserError):
    """A bundle can't be written; or it is damaged, unsafe, or of a newer format."""


class QueryError(UserError):
    """A query of a run's steps is rejected, or has no result."""


class ServiceError(UserError):
    """A local or configured service (Prefect server, Ray, a judge) can't be reached or started."""


class StoreError(PipelineError):
    """The base of all errors of the column store."""


class ColumnError(StoreError):
    """A column is undeclared, or its dtype or row lengths are not as declared."""


class ColumnNotFoundError(StoreError):
    """A read names a column that no stage has produced."""


class ChunkNotFoundError(StoreError):
    """A read names a chunk that was never put, or was cleared."""


class StaleIncarnationError(ChunkNotFoundError):
    """A read names a chunk of an earlier incarnation of the store, which no longer exists."""


class ChunkCorruptedError(StoreError):
    """A chunk's stored bytes are not those that were put: damaged, truncated, or not written by Sluice."""


class InvalidKeyError(StoreError):
    """A chunk key is malformed, or belongs to another run than the store's."""


class DuplicateChunkError(StoreError):
    """A second put of a chunk key has different content."""


class CapacityError(StoreError):
    """A put would exceed the store's capacity."""


class StepNotOpenError(StoreError):
    """A put names a step that is not open: it was cleared, or never opened."""


class PlanError(PipelineError, ValueError):
    """A step can't be planned: a row exceeds the token budget, or no row has a token to train on."""


class ScoringError(PipelineError):
    """Rows can't be scored exactly: the model lets packed sequences attend to each other, or a prompt is empty."""


class NonFiniteError(PipelineError):
    """A logit, loss or gradient is not finite; in an update, the optimizer has not stepped.

    Attributes:
        rows: The offending rows of the step's batch, as far as this process knows them.
    """

    def __init__(self, message: str, rows: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rows = rows


class MetricError(PipelineError):
    """A metric is not in the catalog."""


class RewardFailureError(PipelineError):
    """More rewards of one step failed than the config allows."""


class VersionError(PipelineError):
    """A worker holds another policy version than the requested one."""


class WeightsError(PipelineError):
    """Received weights differ from those that were sent, or don't fit the model that they are loaded into."""


class StaleWeightsError(WeightsError):
    """After a load, an engine's log-probs are not the trainer's: some of its weights are stale or wrong."""


class CheckpointError(PipelineError):
    """A checkpoint is incomplete, or its files differ from its manifest."""


class WorkerLostError(PipelineError):
    """A Ray worker died; a new one runs the step again."""


class EngineLostError(WorkerLostError):
    """A process of a rollout engine died or failed, and the engine has closed; its worker is created again."""


class RunStoppedError(PipelineError):
    """Somebody stopped the run when it asked for approval, or nobody answered; it can be resumed."""


class GateError(PipelineError):
    """The last model of a pipeline is not what its gate asks for; it is not promoted."""


class RunTakenOverError(PipelineError):
    """Another driver has taken over the run, so this one must not write to it any more."""


class WorkerFailedError(PipelineError):
    """A worker raised an error that is not one of Sluice's own, such as out of memory or a full disk."""


class GpuMemoryError(WorkerFailedError):
    """A GPU has too little memory for what a worker computes on it.

    Attributes:
        gpu_bytes: The GPU's memory; 0: not known.
    """

    def __init__(self, message: str, gpu_bytes: int = 0) -> None:
        super().__init__(message)
        self.gpu_bytes = gpu_bytes


class ResourcesError(PipelineError):
    """The cluster's resources stay in use, or are gone; the run can be resumed once they are free."""


class RayLostError(PipelineError):
    """The Ray cluster is gone; the run can be resumed with another one."""


class ServerLostError(PipelineError):
    """The Prefect server did not respond again in time."""


_GPU_MEMORY = re.compile(r"total capacity of ([\d.]+) ([KMGT]?)iB")  # in torch's message
_COLOR = re.compile(r"\x1b\[[0-9;]*m")  # Ray colors its messages


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is torch's of a full GPU; torch is not imported here."""
    return type(error).__name__ == "OutOfMemoryError"


def gpu_bytes_in(error: BaseException) -> int:
    """Return the GPU's memory, as torch's error of a full one says it; 0 if it doesn't.

    >>> gpu_bytes_in(MemoryError("CUDA out of memory. GPU 0 has a total capacity of 1.50 KiB of which 0 is free."))
    1536
    """
    found = _GPU_MEMORY.search(str(error))
    return round(float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")) if found else 0


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error says that a file system has no space, or that a quota is used up."""
    return isinstance(error, OSError) and error.errno in _NO_SPACE


def describe(error: BaseException) -> str:
    """Return any error as one line: its type, the first line of its message, and what to do where that is known."""
    lines = _COLOR.sub("", str(error)).splitlines()
    first = next((line.strip() for line in lines if line.strip()), "no message")
    if is_disk_full(error):
        return f"the disk is full ({first}): free some space, or move the run to another disk"
    if is_out_of_memory(error):
        return f"{first} Lower packing.token_budget or rollout.batch_prompts, or add ranks (OutOfMemoryError)"
    return f"{type(error).__name__}: {first}"
