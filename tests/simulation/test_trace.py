"""Histories of the simulation are behaviours of the model: its rules make every entry of them."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.history import History
from tests.simulation.trace import Foreign, paths
from tests.simulation.world import run

SEEDS = 60  # all others are traced where they are searched, in night.py
# The model's commands, and the one that it leaves out: Mark, of fault rules.
ALPHABET = {
    *("Reserve", "Claim", "Submit", "Veto", "Leave", "Apply", "Serve", "Cancel", "Retire"),
    *("Suspect", "Clear", "Lose", "Spend", "compaction"),
}


def test_every_entry_is_what_commands_of_the_model_make_of_the_log_before_it():
    used: Counter[str] = Counter()
    for seed in range(SEEDS):
        for path in paths(run(seed)):
            used += path.used
    assert used.keys() - {"Mark"} == ALPHABET, "else less was shown than it seems"


# --- what is no behaviour of the model is told apart ----------------------------------------------

Entry = dict[str, Any]
Planted = Callable[[list[Entry]], None]  # changes one entry of a log, or adds one


def events(entries: list[Entry], kind: str) -> list[tuple[Entry, Entry]]:
    return [(entry, e) for entry in entries for e in entry["events"] if e["event"] == kind]


def a_report_of_another_process(entries: list[Entry]) -> None:
    (_, first), (_, second) = events(entries, "reported")[:2]
    second["attempt"] = first["attempt"]


def a_report_of_nobody(entries: list[Entry]) -> None:
    events(entries, "reported")[0][1]["attempt"] = 77


def a_plan_with_another_count(entries: list[Entry]) -> None:
    decided = events(entries, "decided")[0][1]
    document = json.loads(decided["document"])
    document["plan"]["schedulers"][0]["entries"]["kv"] += 1
    decided["document"] = json.dumps(document, separators=(",", ":"), sort_keys=True)


def a_verdict_in_an_entry_of_its_own(entries: list[Entry]) -> None:
    entry, decided = events(entries, "decided")[0]
    entry["events"].remove(decided)
    entries.insert(entries.index(entry) + 1, entry | {"events": [decided]})


def a_seal_before_the_last_has_built(entries: list[Entry]) -> None:
    entry, _ = events(entries, "ended")[0]
    entry["events"] = [e for e in entry["events"] if e["event"] != "applied"]


def a_loss_of_one_that_is_no_suspect(entries: list[Entry]) -> None:
    entry, reported = events(entries, "reported")[0]
    text = "lost: its session ended and did not come back within 1 s (pid 1)"
    cause = {"code": "rank_lost", "ranks": [0], "host": "h", "text": text}
    lost = reported | {"event": "objected", "gone": True, "cause": cause}
    lost = {k: v for k, v in lost.items() if k in ("event", "round", "attempt", "gone", "cause")}
    entries.insert(entries.index(entry), entry | {"events": [lost]})


def an_entry_twice(entries: list[Entry]) -> None:
    entry, _ = events(entries, "claimed")[0]
    entries.insert(entries.index(entry), entry)


def an_attempt_of_the_past(entries: list[Entry]) -> None:
    events(entries, "reserved")[1][1]["attempt"] = 1


def a_claim_of_nobody(entries: list[Entry]) -> None:
    events(entries, "claimed")[1][1]["attempt"] = 77


def a_departure_from_a_round_that_is_open(entries: list[Entry]) -> None:
    entry, reported = events(entries, "reported")[0]
    left = {"event": "departed", "round": reported["round"], "attempt": reported["attempt"]}
    entries.insert(entries.index(entry), entry | {"events": [left | {"why": "left: so"}]})


PLANTED: list[Planted] = [
    a_report_of_another_process,
    a_report_of_nobody,
    a_plan_with_another_count,
    a_verdict_in_an_entry_of_its_own,
    a_seal_before_the_last_has_built,
    a_loss_of_one_that_is_no_suspect,
    an_entry_twice,
    an_attempt_of_the_past,
    a_claim_of_nobody,
    a_departure_from_a_round_that_is_open,
]


@pytest.fixture(scope="module")
def sealed() -> History:
    """A start of several processes that was sealed, and nothing went wrong."""
    for seed in range(100):
        history = run(seed, "calm")
        entries = history.of("append")
        one = {e["engine"] for e in entries} == {"default/llama"}
        large = len(events(entries, "reported")) > 3 and len(events(entries, "ended")) > 1
        if one and large and not events(entries, "objected"):
            return history
    raise AssertionError("none of these seeds has such a start")


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_an_entry_that_the_rules_do_not_make_is_rejected(plant: Planted, sealed: History):
    assert paths(sealed)
    history = History(**copy.deepcopy({k: v for k, v in vars(sealed).items() if k != "now_s"}))
    entries = history.of("append")
    before = [json.dumps(e["events"]) for e in entries]
    plant(entries)
    history.events = entries  # their order is all that counts here
    changed = next(n for n, e in enumerate(entries) if json.dumps(e["events"]) != before[n])
    with pytest.raises(Foreign) as rejected:
        paths(history)
    assert f"entry {entries[changed]['n']} " in str(rejected.value)
