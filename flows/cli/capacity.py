"""The checks of what a run needs, as `sluice plan` does them, for commands that start a run."""

import os

import torch

from flows.cli.footprint import measure_step
from infra.datasets import PromptDataset
from infra.workers.layout import decide_device
from schemas.config.run import RunConfig


def check_capacity(config: RunConfig, prompts: PromptDataset) -> None:
    """Check that the column store can hold a simulated step, and that this machine has the GPUs that are asked for.

    A cluster's GPUs are only known once it is connected to.

    Args:
        config: The run.
        prompts: Its training prompts, as `flows.preflight.check` returns them.

    Raises:
        UserError: It can't, or has too few, or the model or the data is not usable.
        PlanError: A row is over the token budget.
    """
    if config.runtime.ray_address is None and config.runtime.device == "cuda":
        decide_device(config, [torch.cuda.device_count()], os.cpu_count() or 1)
    measure_step(config, data=prompts).check_capacity()
