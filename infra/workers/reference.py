"""The reference worker: the starting weights, frozen."""

from infra.models import load_model
from infra.stores.base import ColumnStore
from infra.stores.open import open_store
from infra.stores.plasma import ChunkWriter
from infra.workers.policy import set_threads
from infra.workers.scoring import score_column
from rl_core.replay.attention import use_packed_attention
from rl_core.replay.probe import leak_probe
from schemas.batch import BatchHandle, ChunkKey
from schemas.rollout import PutResult
from schemas.step import RunHandle


class ReferenceWorker(ChunkWriter):
    """One rank of the reference.

    Args:
        run: The run it belongs to.
        rank: Its number.
        store: The column store; None connects to the run's.
    """

    def __init__(self, run: RunHandle, rank: int = 0, store: ColumnStore | None = None) -> None:
        self._run, self._rank, self._given_store = run, rank, store
        self._started = False

    def start(self) -> None:
        """Load the starting weights, once."""
        if self._started:
            return
        set_threads(self._run.config.runtime.num_threads)
        self._store: ColumnStore = self._given_store or open_store(self._run)
        self._model = load_model(self._run.config.model).requires_grad_(False)
        use_packed_attention(self._model)
        leak_probe(self._model)
        self._started = True

    def score(self, batch: BatchHandle) -> PutResult:
        """Put `reference_logprobs` of the batch's responses."""
        return score_column(
            self._model,
            self._store,
            batch,
            "reference_logprobs",
            ChunkKey(run_id=batch.run_id, step=batch.step, stage="reference", shard=self._rank),
            self._run.config.packing,
            self._run.config.rollout.temperature,
        )
