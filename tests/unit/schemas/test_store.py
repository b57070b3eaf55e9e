"""The traffic of several processes is added up."""

from functools import reduce
from operator import add

from schemas.batch import StoreTraffic


def test_the_total_is_the_sum() -> None:
    parts = [StoreTraffic(num_puts=at, put_seconds=0.1 * at, read_bytes=2**40) for at in range(4)]
    assert StoreTraffic.total(parts) == reduce(add, parts)
    assert StoreTraffic.total(parts).num_puts == 6
    assert StoreTraffic.total([]) == StoreTraffic()
