"""Column stores: where record batches are kept between the stages of a step."""

from infra.stores.base import ColumnStore
from infra.stores.offline import read_step
from infra.stores.open import open_store, start_store

__all__ = ["ColumnStore", "open_store", "read_step", "start_store"]
