"""Updates of groups of samples: each prompt computed once in a micro-batch, and again with each sample.

Both trainers have the same weights and rows, and take turns. Rows have the lengths that the ratio asks for, responses
half of them to one and a half times. A group of one, and groups that are planned apart, have nothing to share.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from rich.console import Group

from benchmarks.command import Benchmark, Report, option, table
from benchmarks.gpu.passes import peak_bytes, reset_peak
from benchmarks.models import make_model, size_of
from rl_core.columns.jagged import jagged
from rl_core.planning import plan_step
from rl_core.planning.throughput import ModelWork
from rl_core.training import RankRows, ScoringModule, Trainer, training_columns
from schemas.config.run import RunConfig
from schemas.plan import UpdatePlan

logger = logging.getLogger(__name__)

DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement."""

    models: tuple[str, ...] = option(("6m", "27m"), "sizes of models, comma-separated")
    ratios: tuple[int, ...] = option((1, 4, 16), "tokens of a prompt for one of a response, comma-separated")
    samples: tuple[int, ...] = option((1, 8, 16), "samples of a prompt, comma-separated")
    response: int = option(64, "mean tokens of a response")
    rows: int = option(16, "rows of an update")
    token_budget: int = option(8192, "tokens of a micro-batch")
    repetitions: int = option(2, "updates of each; they take turns")
    threads: int = option(0, "threads; 0: torch's choice")


QUICK = Plan(models=("tiny",), ratios=(2,), samples=(1, 4), response=8, rows=8, token_budget=512, repetitions=1)


@dataclass(frozen=True)
class Case:
    """Rows of a step."""

    prompts: list[int]  # [N] tokens
    responses: list[int]  # [N] tokens
    groups: list[int]  # [N] numbers; rows with the same one have the same prompt

    @classmethod
    def of(cls, plan: Plan, ratio: int, samples: int) -> "Case":
        """Return groups of so many samples, whose prompts have `ratio` tokens for one of a response."""
        spread = np.random.default_rng(0).integers(plan.response // 2, plan.response * 3 // 2, plan.rows, endpoint=True)
        return cls(
            prompts=[ratio * plan.response] * plan.rows,
            responses=spread.tolist(),
            groups=(np.arange(plan.rows) // samples).tolist(),
        )

    def rows(self, vocabulary: int, columns: Sequence[str]) -> RankRows:
        """Return rows of random tokens, and all columns that an update reads."""
        rng, lengths = np.random.default_rng(1), np.array(self.responses)
        of_group = [rng.integers(vocabulary, size=self.prompts[0], dtype=np.int32) for _ in {*self.groups}]
        total = int(lengths.sum())
        logprobs = jagged(np.full(total, -1.0, np.float32), lengths)
        found: dict[str, pa.Array] = dict.fromkeys(columns, logprobs) | {
            "prompt_ids": jagged([of_group[group] for group in self.groups]),
            "response_ids": jagged(rng.integers(vocabulary, size=total, dtype=np.int32), lengths),
            "loss_mask": jagged(np.ones(total, np.bool_), lengths),
            "advantages": pa.array(rng.normal(size=len(lengths)), pa.float32()),
        }
        return RankRows(np.arange(len(lengths)), pa.record_batch(found))

    def update(self, plan: Plan, *, share_prompts: bool) -> UpdatePlan:
        """Plan one update."""
        options: dict[str, Any] = {"num_updates": 1, "num_ranks": 1, "token_budget": plan.token_budget, "seed": 0}
        sizes = self.prompts, self.responses, self.responses
        prefixes = (self.groups, self.prompts) if share_prompts else None
        return plan_step(*sizes, **options, groups=self.groups, prefixes=prefixes).updates[0]


def measure(plan: Plan) -> Report:
    """Measure in this process.

    Returns:
        `cases`, by name: `token_ratio`, tokens of the rows over those that are computed if prompts are shared;
        `work_ratio`, the same of operations (`ModelWork`), among which are those of the scoring head, as many either
        way; `speedup`, medians of seconds of an update; `of_work`, that over these; `memory_ratio`, peaks beyond
        weights, gradients and moments; and both trainers' `seconds` and `peak_mb`.
    """
    if plan.threads:
        torch.set_num_threads(plan.threads)
    cases: dict[str, dict[str, float]] = {}
    for model in plan.models:
        for ratio, samples in product(plan.ratios, plan.samples):
            name = f"{model}, {ratio}:1, n = {samples}"
            cases[name] = _compare(plan, model, Case.of(plan, ratio, samples))
            logger.info(
                "%s: %.2f times as fast, of %.2f times fewer operations",
                name,
                cases[name]["speedup"],
                cases[name]["work_ratio"],
            )
    return {"cases": cases, "plan": asdict(plan), "threads": torch.get_num_threads()}


def _compare(plan: Plan, model: str, case: Case) -> dict[str, float]:
    """Measure updates of both trainers in turn."""
    updates = {share: case.update(plan, share_prompts=share) for share in (False, True)}
    seconds: dict[bool, list[float]] = {share: [] for share in updates}
    peaks: dict[bool, list[float]] = {share: [] for share in updates}
    pairs = list(_trainers(plan, model, case))
    for share, trainer, rows in pairs:
        trainer.update(rows, updates[share])  # gradients and moments exist from now on; and warms up
    for share, trainer, rows in pairs * plan.repetitions:
        before, started = reset_peak(DEVICE), time.perf_counter()
        trainer.update(rows, updates[share])
        seconds[share].append(time.perf_counter() - started)
        peaks[share].append((peak_bytes(DEVICE) - before) / 1e6)
    apart, shared = (median(seconds[share]) for share in (False, True))
    tokens = {share: sum(micro.num_tokens for micro in update.ranks[0]) for share, update in updates.items()}
    work, lengths = ModelWork.of(pairs[0][1].module.model), (np.array(case.prompts), np.array(case.responses))
    operations = [
        work.update(*lengths, checkpointing=False, num_shared=num_shared)
        for num_shared in (0, tokens[False] - tokens[True])
    ]
    ratio = operations[0] / operations[1]
    return {
        "token_ratio": tokens[False] / tokens[True],
        "work_ratio": ratio,
        "speedup": apart / shared,
        "of_work": apart / shared / ratio,
        "memory_ratio": median(peaks[False]) / median(peaks[True]),
        "seconds": shared,
        "seconds_apart": apart,
        "peak_mb": median(peaks[True]),
        "peak_mb_apart": median(peaks[False]),
    }


def _trainers(plan: Plan, model: str, case: Case) -> Iterator[tuple[bool, Trainer, RankRows]]:
    """Yield both trainers, one after the other, with rows of their own."""
    for share in (False, True):
        config = _config(plan, share_prompts=share)
        module = ScoringModule(make_model(model, DEVICE, torch.float32), config.packing, config.rollout.temperature)
        rows = case.rows(size_of(model)["vocab_size"], training_columns(config))
        yield share, Trainer(module, config), rows


def _config(plan: Plan, *, share_prompts: bool) -> RunConfig:
    return RunConfig.model_validate(
        {
            "steps": 1,
            "model": {"path": "."},
            "data": {"train_path": "."},
            "reward": {"kind": "exact"},
            "packing": {"token_budget": plan.token_budget, "share_prompts": share_prompts},
            "rollout": {"max_response_tokens": 2 * plan.response},
        }
    )


def render(report: Report) -> Group:
    """Return a table of the cases."""
    shown = {
        "tokens": "token_ratio",
        "operations": "work_ratio",
        "speed": "speedup",
        "speed/operations": "of_work",
        "memory": "memory_ratio",
        "s": "seconds",
    }
    rows = {name: {short: case[key] for short, key in shown.items()} for name, case in report["cases"].items()}
    return table("updates with each prompt once: how many times fewer, faster and less", rows)


BENCHMARK = Benchmark(Plan(), QUICK, measure, render)
