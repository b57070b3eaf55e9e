"""A supervised warm start: a few steps of next-token training on answers."""

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from schemas.base import Frozen
from schemas.config.data import DataConfig
from schemas.config.model import ModelConfig


class WarmstartConfig(Frozen):
    """Train `model` on the answers of `data` and write the result to `out_path`."""

    model: ModelConfig
    data: DataConfig
    out_path: str
    steps: PositiveInt
    num_rows: PositiveInt = 64  # rows per step
    lr: PositiveFloat = 2e-3
    final_lr_fraction: PositiveFloat = 0.1  # the learning rate falls linearly to this part of `lr`
    warmup_steps: NonNegativeInt = 20
    weight_decay: float = 0.01
    max_grad_norm: PositiveFloat = 1.0
    seed: NonNegativeInt = 0
    num_threads: NonNegativeInt = 0  # 0: the machine's cores
