"""The rules hold in every scope, and every planted mistake is found by the property it breaks."""

import ast
import dataclasses

import pytest

from coordinator.engine import Engine, Member, Reservation, Round
from tests.model.mistakes import MISTAKES, SCOPES, searched, shipped
from tests.model.rules import FILES, ROOT
from tests.model.search import explore


@pytest.mark.parametrize("name", SCOPES)
def test_every_property_holds_in(name):
    found = explore(shipped(name))
    assert found.complete
    assert not found.breach, str(found)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refuted(name):
    mistake = MISTAKES[name]
    found = searched(mistake)
    assert mistake.what in found.breach.partition(" ")[0].split("/"), str(found)


def test_every_property_has_its_mistake():
    assert {m.what for m in MISTAKES.values()} >= {
        *("S1", "S2", "S3", "S4", "S5", "S6", "S7", "S12", "L3", "L4")
    }


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (Engine, "name store_id entries last_attempt reservations rounds left_runs kept"),
        (Reservation, "join touched"),
        (Member, "attempt join seated suspect gone applied kept departed"),
        (
            Round,
            "number launch layout mode policy members slots sent planned spent_s took_over short"
            " causes traces touches verdict decision ended outcome retired",
        ),
    ],
)
def test_the_model_has_decided_about_every_field(kind, known):
    """A field that the rules come to depend on must be in `Log._key`, or the search skips states.

    Put a new one there, or see that no scope changes it; then name it here.
    """
    assert {f.name for f in dataclasses.fields(kind)} <= set(known.split())


def test_every_file_of_the_rules_is_loaded_after_those_that_it_imports():
    """Else an edit would not reach who imports it; it also shows that no two import each other."""
    rooms = {f"coordinator.{f.removesuffix('.py').replace('/', '.')}": f for f in FILES}
    rules = {f"rules/{path.name}" for path in (ROOT / "coordinator/rules").glob("[!_]*.py")}
    assert rules <= {*FILES}
    for place, file in enumerate(FILES):
        tree = ast.parse((ROOT / "coordinator" / file).read_text())
        imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert {rooms[m] for m in imported if m in rooms} <= {*FILES[:place]}, file
