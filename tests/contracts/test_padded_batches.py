"""A padded batch of another trainer survives the round trip through every backend."""

from collections.abc import Callable
from typing import Any

import pytest

from infra.stores.base import ColumnStore
from rl_core.columns.codec import value_dtypes
from rl_core.columns.jagged import row_lengths
from rl_core.padded import nest, unnest
from rl_core.padded.layouts import TRL, VERL, PaddedLayout
from rl_core.views import new_batch
from tests.contracts.backends import key
from tests.unit.rl_core.test_padded import as_tensordict, assert_same, trl_batch, verl_batch


@pytest.mark.parametrize(("make", "layout"), [(verl_batch, VERL), (trl_batch, TRL)])
def test_a_padded_batch_is_stored_jagged_and_restored(
    store: ColumnStore, step: int, make: Callable[[], dict[str, Any]], layout: PaddedLayout
) -> None:
    nested = nest(as_tensordict(make()), layout, vocab_size=1000)
    ref = store.put(key(store, step), nested.columns)
    lengths = (row_lengths(nested.columns.column(name)) for name in ("prompt_ids", "response_ids"))
    batch = new_batch(store.run_id, step, 0, [ref], value_dtypes(nested.columns), *lengths)
    stored = store.read(batch, batch.columns)
    assert stored.equals(nested.columns)
    assert_same(unnest(stored, layout, nested.geometry, pad_token_id=0), make())
    assert nested.coverage.stored_bytes < nested.coverage.padded_bytes
