"""Training on one rank or sharded over several: `Trainer` updates from planned micro-batches, `score_rows` scores."""

from rl_core.training.rows import RankRows, score_rows, score_top
from rl_core.training.scoring_module import ScoringModule
from rl_core.training.sharding import shard
from rl_core.training.trainer import Trainer, mask_columns, policy_columns, training_columns

__all__ = [
    "RankRows",
    "ScoringModule",
    "Trainer",
    "mask_columns",
    "policy_columns",
    "score_rows",
    "score_top",
    "shard",
    "training_columns",
]
