"""The deliberate faults of `tests.support.mutants` can still be made in the product code as it is now."""

from pathlib import Path

import pytest

from tests.support.mutants import MUTANTS, Mutant
from tests.support.mutation import problem_of

CHECKOUT = Path(__file__).parents[3]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_made(mutant: Mutant) -> None:
    assert not problem_of(mutant, CHECKOUT)
