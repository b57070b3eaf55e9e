"""Plans of pipelines of one sweep, and runs of it that are finished without training."""

from pathlib import Path

from flows.pipeline_plan import PipelinePlan, PlannedRun
from infra.storage.runs import RunDirectory
from schemas.config.pipeline import PipelineConfig
from schemas.config.run import RunConfig
from schemas.step import RunSummary
from tests.support.configs import run_config


def sweep_plan(folder: Path, num_runs: int, max_runs: int = 1) -> PipelinePlan:
    """Return the plan of a pipeline whose stage `grpo` has the runs `run-0`, `run-1`, ... in a folder."""
    stage = {"config": "tiny.toml", "sweep": {"seed": list(range(num_runs))}, "max_runs": max_runs}
    config = PipelineConfig.model_validate({"stages": {"grpo": stage}, "export": {"folder": str(folder)}})
    runs = [
        PlannedRun(run_id=f"run-{seed}", config=run_config(folder, seed=seed), changes={}) for seed in range(num_runs)
    ]
    return PipelinePlan(pipeline_id="one", config=config, runs={"grpo": tuple(runs)})


def finish(config: RunConfig, run_id: str) -> RunSummary:
    """Write the summary of a run, and return it."""
    numbers = dict.fromkeys(("reward_first", "reward_last", "seconds", "tokens_per_second"), 1.0)
    values = {
        "run_id": run_id,
        "steps": config.steps,
        "seconds_by_phase": {},
        "store_bytes_at_end": 0,
        "prefect_ui": "",
    }
    summary = RunSummary.model_validate({"accuracy_before": None, "accuracy_after": None, **values, **numbers})
    RunDirectory.create(config, run_id).write_summary(summary)
    return summary
