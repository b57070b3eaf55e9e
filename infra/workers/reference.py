"""The reference worker: the starting weights, frozen."""

from infra.workers.scoring import ScoringWorker
from schemas.batch import BatchHandle
from schemas.plan import ForwardPlan
from schemas.step import ProcessGroupHandle, ScoreResult


class ReferenceWorker(ScoringWorker):
    """One rank of the reference."""

    role = "reference"

    def start(self, group: ProcessGroupHandle | None = None) -> None:
        """Load the starting weights, once; see `PolicyWorker.start` for the arguments and errors."""
        if self._incarnation:
            return
        with self._collective():
            self._load(self._config.model, group, trains=False)
        self._incarnation = self._group_id

    def score(self, batch: BatchHandle, plan: ForwardPlan) -> ScoreResult:
        """Put `reference_logprobs` of this rank's rows."""
        return self._score(batch, plan, "reference_logprobs", "reference", "reference", kl=self._config.kl.in_reward)
