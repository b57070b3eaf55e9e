"""What is measured: the runs' settings, model and rows."""

from dataclasses import dataclass

from benchmarks.command import option
from benchmarks.models import size_of
from benchmarks.step.workspace import MODEL, Workspace
from infra.models.tiny import make_model

FIRST_STOP_TOKEN = 300  # after the tokenizer's own tokens; decodes to nothing
LEARNING_RATE = 1e-6
WARM_UP_STEPS = 2  # a run's first steps, during which the overlap starts

PATHS = {"synchronous": (), "overlapped": ("runtime.max_staleness=1",)}  # and the settings in which their runs differ


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement."""

    model: str = option("small", "tiny, small or mid")
    prompts: int = option(8, "prompts per step; with a peer, 16 or more make a step worth comparing")
    samples: int = option(8, "responses per prompt")
    prompt_tokens: int = option(0, "tokens of a prompt, about; 0: some ten")
    tokens: int = option(192, "maximum tokens per response; stop tokens end one after about a quarter of them")
    steps: int = option(8, "steps per run, of which the first two are not counted")
    repetitions: int = option(3, "runs per path; the paths take turns")
    threads: int = option(0, "threads of a worker; 0: as a run has them")
    beside: int = option(0, "busy processes on the same machine meanwhile")
    paths: tuple[str, ...] = option(tuple(PATHS), f"comma-separated: {', '.join(PATHS)}")
    overrides: tuple[str, ...] = option((), "settings of all runs, e.g. store.kind=shared", nargs="+")
    peer: str = option("", "run its trainer next to the paths", choices=("", "trl"), metavar="trl")


QUICK = Plan(model="tiny", prompts=2, samples=2, tokens=8, steps=4, repetitions=1)


def write_inputs(workspace: Workspace, plan: Plan) -> list[str]:
    """Write the model, and return the overrides that all runs share."""
    make_model(workspace.folder / MODEL, max_position_embeddings=4096, initializer_range=0.02, **size_of(plan.model))
    workspace.write_prompts(plan.prompt_tokens)
    return [
        f"steps={plan.steps}",
        f"model.path={MODEL}",
        f"data.max_prompt_tokens={max(1024, 2 * plan.prompt_tokens)}",
        f"rollout.num_prompts={plan.prompts}",
        f"rollout.samples_per_prompt={plan.samples}",
        f"rollout.max_response_tokens={plan.tokens}",
        f"rollout.stop_token_ids={stop_token_ids(plan)}",
        'correction.kind="truncated"',  # on every path, so that all do the same work
        f"optim.lr={LEARNING_RATE}",
        *plan.overrides,
    ]


def stop_token_ids(plan: Plan) -> list[int]:
    """Return the tokens that stop a response: sampling is nearly uniform, so about one in tokens / 4 does."""
    number = min(round(size_of(plan.model)["vocab_size"] * 4 / plan.tokens), 512)
    return [FIRST_STOP_TOKEN + index for index in range(number)]
