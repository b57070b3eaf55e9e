"""Every error that Sluice raises on purpose.

`UserError` is what a person can mend in a config, a data file or a model folder (exit code 2). The others say
what went wrong in a running pipeline.
"""


class PipelineError(Exception):
    """The base of all of Sluice's own errors."""


class UserError(PipelineError, ValueError):
    """Something the user gave is wrong; the message names the place, what was found and the fix."""


class ConfigError(UserError):
    """A config file, key or value is not usable."""


class DataError(UserError):
    """A data file is missing or unreadable, or one of its rows is not usable."""


class ModelError(UserError):
    """A model folder is missing, incomplete or disagrees with its tokenizer."""


class RewardImportError(UserError):
    """A reward function can't be found by its import path."""


class RunError(UserError):
    """A run directory is missing, or is not what the command needs."""


class ServiceError(UserError):
    """A local or configured service (Prefect server, Ray) can't be reached or started."""


class StoreError(PipelineError):
    """The base of the column store's errors."""


class ColumnError(StoreError):
    """A column is undeclared, or its dtype or row lengths are not as declared."""


class ColumnNotFoundError(StoreError):
    """A read names a column that nothing has produced."""


class ChunkNotFoundError(StoreError):
    """A read names a chunk that was never put, or was cleared."""


class StaleIncarnationError(ChunkNotFoundError):
    """A read names a chunk of an incarnation of the store that is gone."""


class ChunkCorruptedError(StoreError):
    """A chunk's stored bytes are not those that were put: damaged, cut off, or written by something else."""


class InvalidKeyError(StoreError):
    """A chunk's key is malformed, or is not of this store's run."""


class DuplicateChunkError(StoreError):
    """A chunk key was put again with different content."""


class CapacityError(StoreError):
    """A put would exceed the store's capacity."""


class LeaseError(StoreError):
    """A put names a step whose lease is not open."""


class LeaseExpiredError(LeaseError):
    """A put names a step whose lease was not renewed in time, so that its chunks were freed."""


class PlanError(PipelineError, ValueError):
    """A step can't be planned: a row is over the token budget, or there is nothing to train on."""


class ScoringError(PipelineError):
    """The packed forward is not exact for this model: sequences see each other, or a prompt is empty."""


class NonFiniteError(PipelineError):
    """A logit, loss or gradient is not finite; where it was in an update, the optimizer has not stepped.

    Attributes:
        rows: The rows of the step's batch that are to blame, as far as this process knows them.
    """

    def __init__(self, message: str, rows: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rows = rows


class RewardFailureError(PipelineError):
    """More rewards of one step failed than the config allows."""


class VersionError(PipelineError):
    """A worker holds another policy version than the one asked for."""


class WeightsError(PipelineError):
    """Published weights are not what was sent, or don't fit the model that they are loaded into."""


class CheckpointError(PipelineError):
    """A checkpoint is incomplete, or its files differ from its manifest."""


class WorkerLostError(PipelineError):
    """A Ray worker died; the step is run again by a new one."""
