"""On-policy distillation: the teachers, and how their log-probs of the policy's own samples become advantages."""

from string import Formatter
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from schemas.base import FrozenConfig, OptionalText
from schemas.config.model import ModelConfig

FEEDBACK = "feedback"
PROMPT_FIELDS = ("prompt", "answer", FEEDBACK)


def template_fields(template: str) -> set[str]:
    """Return the names in a template's braces."""
    return {name for _, name, _, _ in Formatter().parse(template) if name is not None}


def _is_template(template: str) -> str:
    rule = "{prompt}, {answer}, {feedback} and fields of extra_info are filled in; for other braces write {{ and }}"
    try:
        parsed = [
            (name, spec, conversion) for _, name, spec, conversion in Formatter().parse(template) if name is not None
        ]
    except ValueError as error:
        raise ValueError(f"not a template: {error}; {rule}") from None
    for name, spec, conversion in parsed:
        if not name.isidentifier() or spec or conversion:
            raise ValueError(f"{{{name}}} is no name of a field, or has a format; {rule}")
    if not any(name == "prompt" for name, *_ in parsed):
        raise ValueError("without {prompt} the teacher would not read the question; add it")
    return template


class TeacherConfig(FrozenConfig):
    """A model that scores the policy's samples: frozen weights, or the policy itself with another prompt."""

    path: OptionalText = None
    """Folder or hub name of a model with the policy's tokenizer; None: the policy's own weights, before the update."""

    data_sources: tuple[str, ...] = ()
    """The `data_source` names of the rows that it teaches; empty: of those that no other teacher names."""

    prompt: Annotated[OptionalText, AfterValidator(lambda text: text and _is_template(text))] = None
    """What it reads in place of a chat's last user message, `{prompt}`; None: the same prompt as the policy."""

    max_prompt_tokens: PositiveInt = 2048
    """Longest prompt that `prompt` makes, in tokens; `{feedback}` is cut to it, another such prompt is an error."""

    num_ranks: PositiveInt = 1
    """Data-parallel processes that it is sharded over, with GPUs of their own if there are some."""

    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and activations; auto: bfloat16 on CUDA, float32 on a CPU."""

    @property
    def model(self) -> ModelConfig | None:
        """The frozen model; None if it is the policy itself."""
        return None if self.path is None else ModelConfig(path=self.path, compute_dtype=self.compute_dtype)

    @property
    def num_workers(self) -> int:
        """The workers of its own: its ranks, or none if it is the policy itself."""
        return 0 if self.path is None else self.num_ranks

    @property
    def reads_feedback(self) -> bool:
        """Whether its prompt has what the environment answered."""
        return self.prompt is not None and FEEDBACK in template_fields(self.prompt)

    @model_validator(mode="after")
    def _differs_from_the_policy(self) -> "TeacherConfig":
        if self.path is None and self.prompt is None:
            raise ValueError(
                "a teacher without path and prompt is the policy itself, from which it would learn nothing; set path "
                'to a model, or prompt, such as "{prompt}\\n\\nThe answer is {answer}."'
            )
        return self


class DistillationConfig(FrozenConfig):
    """A divergence from teachers on the policy's own samples.

    Lu et al. 2025, "On-Policy Distillation" (Thinking Machines); Agarwal et al. 2023, arXiv:2306.13649.
    """

    weight: PositiveFloat = 1.0
    """Factor on the divergence of a token, in nats: `sampled` is a part of its advantage, the others of its loss."""

    divergence: Literal["sampled", "reverse_kl", "forward_kl", "js"] = "sampled"
    """Reverse KL by the sampled tokens alone; or over the teacher's `top_k` tokens that, the forward KL or JS."""

    top_k: PositiveInt = 32
    """How many of a teacher's most likely tokens `divergence` compares at each position; all others count as one."""

    reward_weight: NonNegativeFloat = 0.0
    """Factor on the reward's advantage; 0: the teachers alone train, and the reward is only reported."""

    teachers: Annotated[dict[Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")], TeacherConfig], Field(min_length=1)]
    """The teachers by name: one, or several that teach the rows of different data sources."""

    @property
    def reads_top(self) -> bool:
        """Whether the loss is of a teacher's most likely tokens."""
        return self.divergence != "sampled"

    @property
    def has_prompts(self) -> bool:
        """Whether a teacher reads other prompts than the policy."""
        return any(teacher.prompt is not None for teacher in self.teachers.values())

    def teacher_of(self, data_source: str) -> str | None:
        """Return the name of the teacher of a row of this data source; None if it has none."""
        default = next((name for name, teacher in self.teachers.items() if not teacher.data_sources), None)
        named = (name for name, teacher in self.teachers.items() if data_source in teacher.data_sources)
        return next(named, default)

    @model_validator(mode="after")
    def _teach_different_rows(self) -> "DistillationConfig":
        named = [source for teacher in self.teachers.values() for source in teacher.data_sources]
        if twice := sorted({source for source in named if named.count(source) > 1}):
            raise ValueError(f"two teachers name the data source {twice[0]!r}; a row has one teacher")
        general = [name for name, teacher in self.teachers.items() if not teacher.data_sources]
        if len(general) > 1:
            raise ValueError(
                f"the teachers {' and '.join(general)} name no data_sources, so that both would teach all other rows; "
                "name those of each but one"
            )
        return self
