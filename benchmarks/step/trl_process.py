"""The same steps in TRL's `GRPOTrainer`, in a process of its own: `python benchmarks/step/trl_process.py SETTINGS`.

SETTINGS is the JSON of a `PeerSettings`; the last line of the output is that of a `PeerSteps`. Where TRL offers a
choice, it is the faster one: no gradient checkpointing, and one update per step, which needs no pass for old log-probs.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow.parquet as pq
import torch


@dataclass(frozen=True)
class PeerSettings:
    """What one run does, as the runs of `sluice train` next to it."""

    model: str  # the model's folder
    data: str  # the Parquet file of prompts
    output: str  # an empty folder
    reward: str  # the reward function's source, a module with `few_vowels`
    num_prompts: int  # prompts per step
    samples_per_prompt: int  # responses per prompt
    tokens: int  # maximum tokens per response
    stop_token_ids: list[int]  # tokens that end a response
    steps: int  # steps
    threads: int  # of the process
    rows_per_forward: int  # rows of a micro-batch in the update
    kl_coef: float  # factor of the KL term in the loss
    lr: float  # learning rate
    seed: int  # seed of the samples


@dataclass(frozen=True)
class PeerSteps:
    """What was measured, by step."""

    seconds: list[float]  # of each step, from its rollout to its weights
    generate_seconds: list[float]  # of generation within it
    response_tokens: list[float]  # mean tokens of a response


def main(settings: PeerSettings) -> PeerSteps:
    """Train, and return the figures of each step."""
    torch.set_num_threads(settings.threads)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    model.generation_config.eos_token_id = settings.stop_token_ids
    rows = pq.read_table(settings.data).to_pylist()
    num_rows = settings.num_prompts * settings.samples_per_prompt
    marks = _Marks()
    model.generate = marks.timed(model.generate)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            marks.end_step()

        def on_log(self, _args: object, _state: object, _control: object, logs: dict[str, float], **__: object) -> None:
            if "completions/mean_length" in logs:
                marks.response_tokens.append(logs["completions/mean_length"])

    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(settings.model),
        reward_funcs=_load_reward(settings.reward),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows * settings.num_prompts]),
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=settings.output,
            use_cpu=True,
            bf16=False,
            seed=settings.seed,
            max_steps=settings.steps,
            per_device_train_batch_size=settings.rows_per_forward,
            gradient_accumulation_steps=num_rows // settings.rows_per_forward,
            num_generations=settings.samples_per_prompt,
            max_completion_length=settings.tokens,
            temperature=1.0,
            beta=settings.kl_coef,
            loss_type="grpo",
            learning_rate=settings.lr,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    marks.begin()
    trainer.train()
    return PeerSteps(marks.seconds, marks.generate_seconds, marks.response_tokens)


class _Marks:
    """The seconds of steps, and of generation within them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.generate_seconds: list[float] = []
        self.response_tokens: list[float] = []
        self._generating = 0.0

    def begin(self) -> None:
        self._started = time.perf_counter()

    def end_step(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._started)
        self.generate_seconds.append(self._generating)
        self._started, self._generating = now, 0.0

    def timed(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return generate(*arguments, **options)
            finally:
                self._generating += time.perf_counter() - started

        return run


def _load_reward(source: str) -> Callable[..., list[float]]:
    """Return TRL's kind of reward function: all completions of a batch at once."""
    module: dict[str, Any] = {}
    exec(source, module)

    def few_vowels(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
        return [float(module["few_vowels"](None, messages[0]["content"], None, None)) for messages in completions]

    return few_vowels


if __name__ == "__main__":
    measured = main(PeerSettings(**json.loads(sys.argv[1])))
    print(json.dumps(asdict(measured)))
