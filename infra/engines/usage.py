"""How much of an engine is in use."""

from dataclasses import dataclass

from schemas.metrics import Max, Mean, Metrics, Sum


@dataclass
class EngineUsage:
    """How much of an engine is in use, over decoding steps; to measure a generation, give the engine a new one."""

    num_steps: int = 0
    running: int = 0  # rows that a step decodes, summed over the steps
    waiting: int = 0  # rows that have no place yet, summed over the steps
    peak_cache: float = 0.0  # the largest fraction of the KV cache in use
    drafted: int = 0  # tokens that were run before they were sampled
    accepted: int = 0  # those of them that were sampled
    prefilled: int = 0  # tokens that were computed but not sampled: prompts, and what environments answered

    def add(self, running: int, waiting: int, cache: float) -> None:
        """Add one decoding step."""
        self.num_steps, self.running, self.waiting = self.num_steps + 1, self.running + running, self.waiting + waiting
        self.peak_cache = max(self.peak_cache, cache)

    @property
    def metrics(self) -> Metrics:
        """The mean numbers of rows, the peak of the cache, the prefilled tokens, and which drafts were accepted."""
        acceptance: Metrics = {"engine/draft_acceptance": Mean(total=self.accepted, weight=self.drafted)}
        return {
            "engine/running": Mean(total=self.running, weight=self.num_steps),
            "engine/waiting": Mean(total=self.waiting, weight=self.num_steps),
            "engine/cache": Max(value=self.peak_cache),
            "engine/prefill_tokens": Sum(value=self.prefilled),
            **(acceptance if self.drafted else {}),
        }
