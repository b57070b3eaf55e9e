"""Metrics and their reductions."""

from typing import get_args

import pytest
from pydantic import TypeAdapter

from schemas.metrics import EffectiveFraction, Max, Mean, Metric, Metrics, Reduction, Single, Sum, merge_metrics, values
from tests.support.configs import kinds_of


def test_each_kind_has_its_own_reduction() -> None:
    parts = [
        {"loss": Mean(total=3, weight=1), "rows": Sum(value=2), "ratio_max": Max(value=1.5)},
        {"loss": Mean(total=1, weight=3), "rows": Sum(value=5), "ratio_max": Max(value=1.25), "only": Sum(value=1)},
    ]
    # A mean of means would be (3 + 1/3) / 2; the weighted mean is (3 + 1) / (1 + 3).
    assert values(merge_metrics(parts)) == {"loss": 1.0, "rows": 7, "ratio_max": 1.5, "only": 1}


def test_a_name_can_not_have_two_reductions() -> None:
    with pytest.raises(TypeError, match="'loss' is a sum here and a mean elsewhere"):
        merge_metrics([{"loss": Mean(total=1, weight=1)}, {"loss": Sum(value=1)}])


def test_a_single_value_is_not_merged() -> None:
    rounds = {"rounds": Single(value=2)}
    assert values(merge_metrics([rounds, {"rows": Sum(value=1)}])) == {"rounds": 2, "rows": 1}
    with pytest.raises(TypeError, match="metric 'rounds' is reported twice, as 2 and 3, but it is a single value"):
        merge_metrics([rounds, {"rounds": Single(value=3)}])
    with pytest.raises(TypeError, match="'rounds' is reported twice"):
        merge_metrics([rounds, rounds])
    with pytest.raises(TypeError, match="'rounds' is a mean here and a single elsewhere"):
        merge_metrics([rounds, {"rounds": Mean(total=1, weight=1)}])


def test_metrics_survive_a_round_trip() -> None:
    metrics: Metrics = {
        "mean": Mean(total=3, weight=2),
        "sum": Sum(value=2),
        "max": Max(value=1),
        "effective": EffectiveFraction(total=3, squares=5, count=2),
        "single": Single(value=4),
    }
    adapter = TypeAdapter(Metrics)
    assert adapter.validate_json(adapter.dump_json(metrics)) == metrics
    assert [metric.kind for metric in metrics.values()] == [*metrics] == list(get_args(Reduction))
    assert kinds_of(Metric) == get_args(Reduction)


def test_a_mean_of_weight_zero_is_zero() -> None:
    assert Mean(total=0, weight=0).value == 0


def test_the_effective_fraction_is_that_of_all_weights_together() -> None:
    # Weights 1 and 1, then 2: (1 + 1 + 2)^2 / (3 * (1 + 1 + 4)).
    first, second = EffectiveFraction(total=2, squares=2, count=2), EffectiveFraction(total=2, squares=4, count=1)
    assert first.value == 1.0
    assert values(merge_metrics([{"ess": first}, {"ess": second}])) == {"ess": 16 / 18}
    assert EffectiveFraction(total=0, squares=0, count=0).value == 0
