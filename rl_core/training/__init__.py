"""Training: one optimizer step from planned micro-batches of jagged rows, on one rank or sharded over several."""

from rl_core.training.replay_module import ReplayModule
from rl_core.training.rows import RankRows, score_rows
from rl_core.training.sharding import shard
from rl_core.training.trainer import Trainer, training_columns

__all__ = ["RankRows", "ReplayModule", "Trainer", "score_rows", "shard", "training_columns"]
