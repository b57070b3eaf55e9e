"""The check of the column store's capacity, as `sluice plan` does it, for commands that start a run."""

from flows.cli.footprint import measure_step
from infra.datasets import PromptDataset
from schemas.config.run import RunConfig


def check_capacity(config: RunConfig, prompts: PromptDataset) -> None:
    """Check that the column store can hold a simulated step.

    Args:
        config: The run.
        prompts: Its training prompts, as `flows.preflight.check` returns them.

    Raises:
        UserError: It can't, or the model or the data is not usable.
        PlanError: A row is over the token budget.
    """
    measure_step(config, data=prompts).check_capacity()
