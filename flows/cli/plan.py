"""`sluice plan`: one step of a config, planned without starting anything."""

from rich.console import Console

from flows.cli.example import Example, example_lines, show_example
from flows.cli.plan_tables import footprint_parts, resource_parts
from flows.plan.footprint import Footprint, measure_step
from flows.plan.resources import Resources, plan_resources
from flows.plan.simulate import LengthShape
from flows.preflight import check
from schemas.base import Frozen
from schemas.config.run import RunConfig


class Plan(Frozen):
    """A step's footprint, what the run takes of its machines, and one of its prompts."""

    example: Example
    footprint: Footprint
    resources: Resources


def plan_config(
    console: Console,
    config: RunConfig,
    *,
    shape: LengthShape,
    fill: float,
    cluster: str | None = None,
    calibrate: bool = False,
    utilization: float = 0.4,
    as_json: bool = False,
) -> None:
    """Check a config, simulate one step, and print what it takes.

    Args:
        console: The console to print on.
        config: The run.
        shape: The distribution of the response lengths.
        fill: The mean response length, as a fraction of `rollout.max_response_tokens`.
        cluster: The cluster to plan for, see `rl_core.planning.hardware.parse_cluster`; None: this machine.
        calibrate: Whether to measure this machine's rates.
        utilization: The fraction of a GPU's published peaks that is reached.
        as_json: Whether to print one JSON value instead of tables.

    Raises:
        UserError: The config is not usable, or the step can't fit; in that case the plan is printed first.
    """
    prompts = check(config, runs_here=cluster is None)
    footprint = measure_step(config, shape, fill, prompts)
    resources = plan_resources(
        config,
        footprint,
        shape=shape,
        fill=fill,
        data=prompts,
        cluster=cluster,
        calibrate=calibrate,
        utilization=utilization,
    )
    example = show_example(config, prompts)
    if as_json:
        console.out(
            Plan(example=example, footprint=footprint, resources=resources).model_dump_json(indent=2), highlight=False
        )
    else:
        _print(console, config, example, footprint, resources)
    footprint.check_capacity()
    resources.check()


def _print(console: Console, config: RunConfig, example: Example, footprint: Footprint, resources: Resources) -> None:
    rows, *tables = footprint_parts(footprint)
    method = f"method: advantage {config.advantage.kind}, loss {config.loss.kind}, correction {config.correction.kind}"
    for part in (rows, *example_lines(example), f"{method}\n", *tables, *resource_parts(resources)):
        if isinstance(part, str):
            console.print(part, markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(part)
    excess = (resources.excess,) if resources.excess and resources.cluster.is_here else ()
    for warning in (*footprint.warnings, *resources.warnings, *excess):
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
