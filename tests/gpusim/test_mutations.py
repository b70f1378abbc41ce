"""Faults put into the kernels on purpose are noticed: see mutations.py, which also is a command."""

from __future__ import annotations

import pytest

from tests.gpusim.build import CSRC
from tests.gpusim.mutation_table import MUTATIONS
from tests.gpusim.mutations import reason, try_deletions, try_mutation, try_nothing

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_table_fits_the_sources(name: str) -> None:
    mutation = MUTATIONS[name]
    assert (CSRC / mutation.file).read_text().count(mutation.old) == mutation.times
    assert mutation.new != mutation.old
    assert all((CSRC / "kernels" / "instances" / f"{instance}.cu").exists() for instance in mutation.instances)


@pytest.mark.mutation
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation(name: str) -> None:
    outcome = try_mutation(MUTATIONS[name])
    assert outcome.caught, outcome


@pytest.mark.mutation
def test_no_mutation() -> None:
    outcome = try_nothing()
    assert not outcome.caught, outcome


@pytest.mark.mutation
def test_deletions() -> None:
    """Each synchronising instruction deleted from the PTX in turn; the survivors are those that are explained."""
    tried = list(try_deletions())
    assert len(tried) > 100
    survived = {deletion.name for deletion, outcome in tried if not outcome.caught}
    assert survived == {deletion.name for deletion, _ in tried if reason(deletion)}
