"""What is measured: the runs' settings, model and rows."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.step.workspace import LARGE_ROWS, MODEL, Workspace
from benchmarks.train.models import size_of
from infra.models.tiny import make_model

FIRST_STOP_TOKEN = 300  # after the tokenizer's own tokens; decodes to nothing
LEARNING_RATE = 1e-6
WARM_UP_STEPS = 2  # a run's first steps, during which the overlap starts


PATHS = {  # and the settings in which their runs differ
    "synchronous": (),
    "overlapped": ("runtime.max_staleness=1",),
    # Two rollout workers, and rows so large that each worker puts more than 1 MB.
    "large_chunks": ("rollout.num_workers=2", f"data.train_path={LARGE_ROWS}"),
}


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement.

    Attributes:
        model: One of the sizes of `benchmarks/train`.
        num_prompts: Prompts per step.
        samples_per_prompt: Responses per prompt.
        tokens: Maximum tokens per response; random stop tokens end one after about a quarter of them.
        steps: Steps per run.
        repetitions: Runs per path; the paths take turns.
        threads: `runtime.num_threads`; 0 as a run has it by default.
        beside: Busy processes of the benchmark's own, during the runs.
        paths: A selection of `PATHS`.
        peer: The trainer to run beside them; None: none.
    """

    model: str = "small"
    num_prompts: int = 8
    samples_per_prompt: int = 8
    tokens: int = 192
    steps: int = 8
    repetitions: int = 3
    threads: int = 0
    beside: int = 0
    paths: tuple[str, ...] = tuple(PATHS)
    peer: Literal["trl"] | None = None


PEER_PROMPTS = 16  # 128 rows a step
QUICK = Plan(model="tiny", num_prompts=2, samples_per_prompt=2, tokens=8, steps=4, repetitions=1)


def write_inputs(workspace: Workspace, plan: Plan) -> list[str]:
    """Write the model, and return the overrides that all runs share."""
    size = {**size_of(plan.model), "vocab_size": _vocab_size(plan)}
    make_model(workspace.folder / MODEL, max_position_embeddings=4096, initializer_range=0.02, **size)
    return [
        f"steps={plan.steps}",
        f"model.path={MODEL}",
        f"rollout.num_prompts={plan.num_prompts}",
        f"rollout.samples_per_prompt={plan.samples_per_prompt}",
        f"rollout.max_response_tokens={plan.tokens}",
        f"rollout.stop_token_ids={stop_token_ids(plan)}",
        'correction.kind="truncated"',  # on every path, so that all do the same work
        f"optim.lr={LEARNING_RATE}",
    ]


def stop_token_ids(plan: Plan) -> list[int]:
    """Return the tokens that stop a response: sampling is nearly uniform, so about one in tokens / 4 does."""
    number = min(round(_vocab_size(plan) * 4 / plan.tokens), 512)
    return [FIRST_STOP_TOKEN + index for index in range(number)]


def _vocab_size(plan: Plan) -> int:
    return int(max(size_of(plan.model)["vocab_size"], 1024))
