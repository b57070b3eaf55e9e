"""Opening stores by their configs."""

from typing import get_args

from infra.stores.open import OPENERS
from schemas.config.store import StoreConfig


def test_every_kind_of_store_can_be_opened() -> None:
    union, *_ = get_args(StoreConfig)
    assert set(OPENERS) == set(get_args(union))
