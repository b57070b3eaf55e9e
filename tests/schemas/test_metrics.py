"""Metrics and their reductions."""

import pytest

from schemas.metrics import Max, Mean, Sum, merge_metrics, values


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


def test_a_mean_of_weight_zero_is_zero() -> None:
    assert Mean(total=0, weight=0).value == 0
