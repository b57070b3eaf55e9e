"""All errors that Sluice raises on purpose.

A `UserError` is one that the user can fix in a config, a data file or a model folder (exit code 2). The others report
a failure of a running pipeline.
"""


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


class RewardImportError(UserError):
    """A reward function can't be found by its import path."""


class RunError(UserError):
    """A run directory is missing, or not in the state that the command needs."""


class ServiceError(UserError):
    """A local or configured service (Prefect server, Ray) can't be reached or started."""


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


class LeaseError(StoreError):
    """A put names a step whose lease is not open."""


class LeaseExpiredError(LeaseError):
    """A put names a step whose lease was not renewed in time; its chunks were freed."""


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


class CheckpointError(PipelineError):
    """A checkpoint is incomplete, or its files differ from its manifest."""


class WorkerLostError(PipelineError):
    """A Ray worker died; a new one runs the step again."""
