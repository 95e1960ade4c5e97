"""A promise is checked only if the simulation sees what happens without what keeps it."""

from __future__ import annotations

import dataclasses

import pytest

from tests.model.rules import Moved
from tests.simulation.guards import broken, known_seeds, removed, search
from tests.simulation.removals import FIXED, GUARDS
from tests.simulation.removals.guard import Guard

CAUGHT = [name for name, guard in GUARDS.items() if not guard.spared]


@pytest.mark.parametrize("name", FIXED)
def test_the_simulation_notices_a_guard_that_is_gone(name):
    """Its known seed first; where the generator has changed since, the seeds that follow."""
    caught = search(name)
    assert caught is not None, f"no seed shows that {name!r}"


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in CAUGHT if name not in FIXED])
def test_the_simulation_notices_every_guard_that_is_gone(name):
    caught = search(name)
    assert caught is not None, f"no seed shows that {name!r}"


@pytest.mark.parametrize("name", GUARDS)
def test_every_guard_is_where_its_removal_looks_for_it(name):
    with removed(GUARDS[name]):
        pass


def test_a_removal_that_finds_nothing_says_so():
    (edit,) = GUARDS["cancelled after the end"].edits
    gone = Guard("", (edit._replace(old="no such condition"),))
    with (
        pytest.raises(Moved, match=r"orders\.py on_cancel: 0 times 'no such condition'"),
        removed(gone),
    ):
        pass
    gone = dataclasses.replace(gone, edits=(edit._replace(function="no_such_function"),))
    with pytest.raises(Moved, match=r"0 functions no_such_function"), removed(gone):
        pass


def test_a_removal_leaves_nothing_behind():
    name = FIXED[0]
    seed = known_seeds()[name]
    assert not broken(seed)
    with removed(GUARDS[name]):
        broken(seed)
    assert not broken(seed)


def test_a_known_seed_belongs_to_a_guard():
    assert not known_seeds().keys() - set(CAUGHT)
    assert not set(FIXED) - known_seeds().keys()
