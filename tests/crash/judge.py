"""The checkers of the simulated world, over a real history joined with the store that is left."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.simulation.checkers import Verdict, check
from tests.simulation.history import History

# S9 and S12 need the moment at which an entry became durable, and a store does not tell that.
JUDGED = ("S1", "S2", "S3", "S4", "S5", "S6", "S7", "S8", "S10")


def judge(history: History, store: Path) -> list[Verdict]:
    """Judges what was told by what the store holds in the end: its log must be whole."""
    return check(joined(history, store), JUDGED)


def judged(verdicts: list[Verdict]) -> Counter[str]:
    """How often each was put to the test. Raises AssertionError for what does not hold."""
    for each in verdicts:
        assert each.holds is not False, f"{each.name}: {each.breaches[:5]}"
    return Counter({f"judgements of {each.name}": each.judged for each in verdicts})


def joined(history: History, store: Path) -> History:
    """The log first, as if all of it had been there before anyone was told.

    So nothing is judged by when it became durable, but everything by whether it is there now,
    after every kill. A request counts as arrived: whether it did is what nobody knows.
    """
    with closing(sqlite3.connect(f"{store.as_uri()}?mode=ro", uri=True)) as db:
        (store_id,) = db.execute("select id from store").fetchone()
        rows = db.execute("select namespace, engine, n, body from entries order by 1, 2, 3")
        appended: list[dict[str, Any]] = [
            {
                "t": 0.0,
                "kind": "append",
                "at": "c",
                "store": store_id,
                "engine": f"{namespace}/{engine}",
                "n": n,
                "events": json.loads(body)["events"],
            }
            for namespace, engine, n, body in rows
        ]
    told: list[dict[str, Any]] = []
    for event in history.events:
        told.append(event)
        if event["kind"] == "request":
            event["store"] = store_id
            told.append({"t": event["t"], "kind": "arrived", "x": event["x"], "at": "c"})
        if event["kind"] == "fact":
            told.append({**event, "kind": "pushed", "at": "c"})
    return History(history.seed, history.mode, history.settings, appended + told, history.documents)
