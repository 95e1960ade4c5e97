"""Old rounds are dropped; what must never be forgotten is not."""

from __future__ import annotations

import pytest

from coordinator.cell import Cell
from coordinator.compaction import compaction
from coordinator.engine import Engine, evolve_entry
from coordinator.events import Entry, entry_from
from kvaccord import Layout
from kvaccord.errors import Superseded
from tests.builders import Log, a_join, a_launch


@pytest.fixture
def log() -> Log:
    return Log()


def compacted(log: Log, keep_rounds: int) -> Engine:
    """The engine of a coordinator that starts on what is left of the log."""
    entries = [Entry(events=(event,)).to_bytes() for event in compaction(log.engine, keep_rounds)]
    engine = Engine(log.engine.name, log.engine.store_id, entries=log.engine.entries)
    for body in entries:
        engine = evolve_entry(engine, entry_from(body).events)
    for body in entries:
        log.engine = evolve_entry(log.engine, entry_from(body).events)
    return engine


def test_whoever_starts_after_a_compaction_knows_what_whoever_was_there_knows(log):
    log.sealed(90, 70)
    for _ in range(6):
        a, _ = log.start(2)
        a.vetoes("broken", trace="Traceback …")
        log.spends("grace")
    log.joined(a_join(0, layout=Layout(tp=2)))
    engine = compacted(log, 3)
    assert engine == log.engine
    assert sorted(engine.rounds) == [1, 5, 6, 7], "the latest, and the one in force"
    assert engine.in_force is engine.rounds[1]


def test_documents_of_kept_rounds_are_the_same_bytes(log):
    log.sealed(90, 70)
    before = log.round
    for _ in range(3):
        log.start(2)
        log.spends("report")
    kept = compacted(log, 1).rounds[1]
    assert (kept.decision, kept.outcome) == (before.decision, before.outcome)
    assert kept.planned == before.planned


def test_attempts_rounds_and_runs_never_go_back(log):
    for n in range(5):
        log.claimed(0, layout=Layout(tp=2), launch=a_launch(f"run-{n}"))
        log.spends("gather")
    last = log.engine.last_attempt
    log.engine = compacted(log, 1)
    with pytest.raises(Superseded):
        log.claimed(0, layout=Layout(tp=2), launch=a_launch("run-0"))
    newer = log.claimed(0, layout=Layout(tp=2), launch=a_launch("run-9"))
    assert newer.attempt > last
    assert log.round.number == 6


def test_nothing_is_appended_when_nothing_is_old(log):
    log.sealed(90, 70)
    assert list(compaction(log.engine, 5)) == []


def test_the_documents_of_a_kept_round_are_told_again_after_a_compaction(log):
    log.sealed(90, 70)
    for _ in range(3):
        log.start(2)
        log.spends("report")
    decision, outcome = log.engine.rounds[1].decision, log.engine.rounds[1].outcome
    first = log.engine.entries
    entries = [Entry(events=(event,)) for event in compaction(log.engine, 1)]
    cell = Cell(log.engine.name, log.engine.store_id)
    cell.load(entries, first)
    told = [(fact.kind, fact.data.encode()) for fact in cell.facts[1]]
    assert told == [("decision", decision), ("outcome", outcome)]
