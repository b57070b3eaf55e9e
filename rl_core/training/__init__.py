"""Training: one optimizer step from planned micro-batches of jagged rows, on one rank or sharded over several."""

from rl_core.training.rows import RankRows, score_rows
from rl_core.training.scoring_module import ScoringModule
from rl_core.training.sharding import shard
from rl_core.training.trainer import Trainer, training_columns

__all__ = ["RankRows", "ScoringModule", "Trainer", "score_rows", "shard", "training_columns"]
