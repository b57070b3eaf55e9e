"""Every metric that the stages emit is in the metric catalog, with its reduction, and the catalog has no other."""

import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import get_args

import numpy as np
import pyarrow as pa
import pytest

from infra.datasets.sft import SftDataset, token_columns
from infra.engines.base import Generation
from infra.environments.slot import Reply
from infra.environments.trajectory import TrajectoryBuilder, describe
from rl_core.advantages import prepare_updates
from rl_core.columns.jagged import jagged
from rl_core.losses import policy_loss
from rl_core.rollout.dynamic_sampling import count_generated, keep_rows
from rl_core.rollout.responses import describe_responses
from rl_core.rollout.reuse import reuse_metrics
from rl_core.training import RankRows, ScoringModule, Trainer, training_columns
from schemas.config.advantage import OverlongConfig
from schemas.config.loss import ClippedLoss, KlConfig, NoCorrection, TruncatedCorrection
from schemas.config.rollout import DynamicSampling, TransformersRollout
from schemas.errors import MetricError
from schemas.metric_catalog import METRICS, PanelName, View, charts_of, find_metric, metric_spec, metrics_of
from schemas.metrics import Metrics
from schemas.rollout import ReusedGroup, RolloutHandle, RolloutShard
from tests.support.configs import run_config
from tests.support.packed import random_batch, tiny_qwen3
from tests.unit.rl_core.loss_inputs import CORRECTIONS, LOSSES, row_inputs

LENGTHS = [4, 8, 10, 10]
KEPT = {"keep_steps": "all"}


def shard(number: int, rewards: tuple[float | None, ...]) -> RolloutShard:
    """Create a shard of two groups of two rows; a None reward failed."""
    return RolloutShard(
        shard=number,
        worker=0,
        groups=(2 * number, 2 * number + 1),
        rewards=rewards,
        group_ids=(2 * number, 2 * number, 2 * number + 1, 2 * number + 1),
        prompt_lengths=(3,) * 4,
        **describe_responses(
            [np.arange(length) for length in LENGTHS],
            [np.ones(length, np.bool_) for length in LENGTHS],
            ["stop", "stop", "length", "length"],
        ),
        parts={"format": (1.0, 0.0, 1.0, None)},
        seconds={"generate": 2.0, "reward": 1.0},
    )


def rollout_metrics() -> Iterator[Metrics]:
    config = TransformersRollout(
        num_prompts=2, samples_per_prompt=2, max_response_tokens=10, dynamic_sampling=DynamicSampling()
    )
    rounds = [[shard(0, (1.0, 0.0, 1.0, 1.0))], [shard(1, (1.0, 0.0, None, 1.0))]]
    generated = count_generated(rounds, config)
    yield generated
    yield RolloutHandle(step=3, policy_version=2, shards=keep_rows(config, rounds), generated=generated).metrics
    rows = pa.record_batch(token_columns([], np.dtype(np.int32)))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema):
        pass
    yield SftDataset(sink.getvalue(), [1, 3], [1.0, 2.0], 0).epoch_metrics(3, 8, ["a", "b"])
    reuse = run_config(data={"reuse": {"num_groups": 2, "max_age": 1}}, correction=TruncatedCorrection(), store=KEPT)
    reused = tuple(ReusedGroup(step=2, group=group) for group in (0, 1))
    yield reuse_metrics(reuse, 3, [shard(0, (1.0, 0.0, 1.0, 0.0)).replace(reused=reused)])
    row = TrajectoryBuilder(0, np.array([1, 2]), 0, None)
    row.add_turn(Generation(np.array([3, 4]), np.zeros(2, np.float32), "stop"), "4")
    row.add_answer(Reply(("lower",), 0.5, metrics={"hints": 1.0}, seconds=0.1))
    yield describe([row.finish("done")])


def advantage_metrics() -> Iterator[Metrics]:
    config = run_config(
        rollout=TransformersRollout(num_prompts=2, samples_per_prompt=2, max_response_tokens=10),
        overlong=OverlongConfig(buffer_tokens=4, mask_truncated=True),
        kl=KlConfig(coef=0.1, in_reward=True),
    )
    rollout = RolloutHandle(step=0, policy_version=0, shards=(shard(0, (1.0, 0.0, None, 1.0)),))
    yield prepare_updates(config, 0, rollout, [0.5] * 4).metrics


def loss_metrics() -> Iterator[Metrics]:
    inputs = row_inputs([2.0, 0.5], [1.0], [2], importance=[2.0, 1.0], reference=[0.0, 1.0], entropy=[1.0, 2.0])
    for loss, correction in product(LOSSES.values(), CORRECTIONS.values()):
        yield policy_loss(
            inputs, loss, KlConfig(coef=0.1), correction, norm_tokens=1, num_loss_tokens=2, num_live_sequences=1
        )[1]
    observed = row_inputs([2.0, 0.5], [1.0], [2], [True, False])
    counts = {"norm_tokens": 1, "num_loss_tokens": 1, "num_live_sequences": 1, "num_observation_tokens": 1}
    yield policy_loss(observed, ClippedLoss(observation_coef=0.1), KlConfig(), NoCorrection(), **counts)[1]


def update_metrics() -> Iterator[Metrics]:
    distillation = {"teachers": {"big": {"path": "teacher"}}, "divergence": "js", "top_k": 3}
    config = run_config(kl=KlConfig(coef=0.1), correction=TruncatedCorrection(), distillation=distillation)
    batch, lengths = random_batch([2, 3], [4, 5]), np.array([4, 5])
    logprobs = jagged(np.full(9, -1.0, np.float32), lengths)
    columns = {
        "prompt_ids": jagged(batch.prompt_ids.numpy().astype(np.int32), np.array([2, 3])),
        "response_ids": jagged(batch.response_ids.numpy().astype(np.int32), lengths),
        "loss_mask": jagged(np.ones(9, np.bool_), lengths),
        "advantages": pa.array([0.5, -0.5], pa.float32()),
    }
    columns |= {name: logprobs for name in training_columns(config) if name.endswith("logprobs")}
    columns["teacher_top_logprobs"] = jagged(np.full((9, 3), -1.5, np.float32), lengths)
    columns["teacher_top_ids"] = jagged(np.tile(np.arange(3, dtype=np.uint16), (9, 1)), lengths)
    module = ScoringModule(tiny_qwen3(num_hidden_layers=1), config.packing, 1.0)
    rollout = RolloutHandle(step=0, policy_version=0, shards=(shard(0, (1.0, 0.0, 1.0, 0.0)).keep([0]),))
    plan = prepare_updates(config, 0, rollout).plan
    yield Trainer(module, config).update(RankRows(np.arange(2), pa.record_batch(columns)), plan.updates[0])


STAGES = {
    "rollout": [rollout_metrics],
    "advantage": [advantage_metrics],
    "update": [loss_metrics, update_metrics],
}


@cache
def emitted(stage: str) -> dict[str, set[str]]:
    """Return the names of the stage's metrics with their reductions."""
    reductions: dict[str, set[str]] = {}
    for metrics in (metrics for source in STAGES[stage] for metrics in source()):
        for name, metric in metrics.items():
            reductions.setdefault(name, set()).add(metric.kind)
    return reductions


@pytest.mark.parametrize("stage", STAGES)
def test_every_metric_is_in_the_catalog_with_its_reduction(stage: str) -> None:
    for name, reductions in emitted(stage).items():
        spec = metric_spec(name)
        assert (spec.name, spec.stage, {spec.reduction}) == (name, stage, reductions)


def test_every_metric_of_the_catalog_is_emitted() -> None:
    names = {name for stage in STAGES for name in emitted(stage)}
    assert {"reward_format", "rollout/generate_seconds", "rollout/reward_seconds"} <= names
    of_stages = {name for name, spec in METRICS.items() if spec.stage in STAGES}
    assert {"turns/ended_done", "environment/hints"} <= names
    assert names >= {name for name in of_stages if "<" not in name}


def test_families_share_an_entry() -> None:
    assert metric_spec("reward_format") == METRICS["reward_<part>"].replace(name="reward_format")
    assert find_metric("rollout/generate_seconds") == (METRICS["rollout/<phase>_seconds"], {"phase": "generate"})
    assert find_metric("eval/a/b/reward") == (METRICS["eval/<source>/reward"], {"source": "a/b"})
    assert find_metric("eval/a\n数学/reward")[1] == {"source": "a\n数学"}
    assert find_metric("eval/reward") == (METRICS["eval/reward"], {})


def test_series_have_names_of_their_own() -> None:
    series = [spec.series for spec in METRICS.values()]
    assert len(set(series)) == len(series)
    assert not [name for name in series if not re.fullmatch(r"sluice(_[a-z0-9]+)+", name)]


@pytest.mark.parametrize("name", ["rewards", "reward_", "rollout/_seconds", "generate_seconds", ""])
def test_an_unknown_metric_is_rejected(name: str) -> None:
    with pytest.raises(
        MetricError, match=f"metric '{name}' is not in the catalog; declare it in schemas/metric_catalog"
    ):
        metric_spec(name)


@pytest.mark.parametrize("view", ["terminal", "report", "ui"])
def test_views_are_in_the_order_of_the_catalog(view: View) -> None:
    names = [spec.name for spec in metrics_of(view)]
    assert names[0] == "reward"
    assert len(names) > 3
    assert names == [name for name in METRICS if name in names]
    assert view == "report" or all("<" not in name for name in names)


def test_each_metric_of_the_report_is_charted_once_in_its_panel() -> None:
    charts = {panel: charts_of(panel) for panel in get_args(PanelName)}
    assert all(charts.values())
    charted = [(panel, spec) for panel in charts for chart in charts[panel] for spec in chart]
    assert all(spec.panel == panel for panel, spec in charted)
    assert sorted(spec.name for _, spec in charted) == sorted(spec.name for spec in metrics_of("report"))
    for chart in (chart for panel in charts for chart in charts[panel]):
        assert len({(spec.name.partition("/")[0], spec.unit) for spec in chart}) == 1


def test_meanings_are_sentences() -> None:
    for spec in METRICS.values():
        assert spec.meaning.endswith(".")
        assert spec.meaning[0].isupper() or spec.meaning.startswith("k3")
