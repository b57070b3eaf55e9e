"""Statistics and histograms of columns, with numbers computed by hand."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.stores.summary import NUM_BINS, length_histogram, summarize_values
from rl_core.columns.jagged import jagged


def test_nulls_and_non_finite_values_are_counted_and_excluded() -> None:
    figures = summarize_values(pa.array([1.0, None, float("nan"), 3.0, float("-inf")], type=pa.float32()))
    assert (figures.num_rows, figures.num_values, figures.num_nulls, figures.num_nonfinite) == (5, 5, 1, 2)
    assert (figures.minimum, figures.mean, figures.maximum) == (1.0, 2.0, 3.0)


def test_a_jagged_column_counts_its_own_rows_values() -> None:
    column = jagged(np.array([9, 1, 2, 3, 9], dtype=np.uint16), np.array([1, 0, 3, 1])).slice(1, 2)
    figures = summarize_values(column)
    assert (figures.num_rows, figures.num_values) == (2, 3)
    assert (figures.minimum, figures.mean, figures.maximum) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    "column", [pa.array(["a", "b"]), pa.array([None], type=pa.float32()), pa.array([], pa.int32())]
)
def test_a_column_without_numbers_has_no_mean(column: pa.Array) -> None:
    figures = summarize_values(column)
    assert (figures.minimum, figures.mean, figures.maximum) == (None, None, None)


def test_bins_of_equal_width() -> None:
    histogram = length_histogram(np.array([10, 19, 20, 109]))
    assert histogram is not None
    assert histogram.edges == tuple(range(10, 111, 10))
    assert histogram.num_rows == (2, 1, 0, 0, 0, 0, 0, 0, 0, 1)


def test_bins_of_growing_width_where_lengths_differ_much() -> None:
    histogram = length_histogram(np.array([0, 1, 2, 1022]))
    assert histogram is not None
    assert histogram.edges == (0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 1023)
    assert histogram.num_rows == (1, 2, 0, 0, 0, 0, 0, 0, 0, 1)


def test_no_rows_have_no_histogram() -> None:
    assert length_histogram(np.array([], dtype=np.int64)) is None


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=50))
def test_every_row_is_in_one_bin(lengths: list[int]) -> None:
    histogram = length_histogram(np.array(lengths))
    assert histogram is not None
    assert sum(histogram.num_rows) == len(lengths)
    assert 1 <= len(histogram.num_rows) <= NUM_BINS
    assert histogram.edges[0] == min(lengths)
    assert histogram.edges[-1] == max(lengths) + 1
