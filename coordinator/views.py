"""What dashboards see of an engine: one row, made from its log alone. Pure."""

from __future__ import annotations

import json
from typing import Any

from coordinator.engine import Engine, Round
from coordinator.verdict import faults
from kvaccord.canonical import digest
from kvaccord.room import page_count


def budget_row(engine: Engine) -> dict[str, Any]:
    """State of the last round, the last verdict, and what was agreed in the round in force.

    An engine that never sealed has no `agreed`.
    """
    row: dict[str, Any] = {
        "namespace": engine.name.namespace,
        "engine": engine.name.engine,
        "state": "JOINING",
    }
    if last := engine.last:
        row |= {"round": last.number, "state": last.state, "faults": faults(last.touches)}
        row |= {"mode": last.mode}
        row |= {"waiting_for": last.waiting_for}
    for round_ in engine.newest_first():
        if round_.decision:
            row |= last_word(round_)
            break
    if in_force := engine.in_force:
        row["agreed"] = agreed(in_force) | {"standing": standing(in_force)}
    return row


def standing(round_: Round) -> dict[str, Any]:
    """Whether every member of a sealed round is still there, as far as anyone said."""
    if round_.ended != "SEALED":
        return {"standing": "none", "ranks": []}
    if round_.retired is not None:
        return {"standing": "retired", "ranks": [], "reason": round_.retired}
    gone = round_.departed
    return {"standing": "broken" if gone else "whole", "ranks": gone}


def last_word(round_: Round) -> dict[str, Any]:
    """What the round's latest frozen document says; nothing while it is undecided."""
    if not round_.decision:
        return {}
    document = json.loads(round_.outcome or round_.decision)
    verdict = document.get("verdict", document)
    return {
        "verdict_round": round_.number,
        "code": verdict["code"],
        "message": verdict["message"],
        "blamed": verdict["ranks"],
        "retryable": verdict["retryable"],
    }


def agreed(round_: Round) -> dict[str, Any]:
    """The numbers that every rank of a PASSED round was given."""
    document = json.loads(round_.decision)
    entry_bytes = {
        rank: shape["entry_bytes"]
        for shape in document["plan"]["shapes"]
        for rank in shape["ranks"]
    }
    return {
        "round": round_.number,
        "digest": digest(round_.decision),
        "layout": document["layout"],
        "faults": document["faults"],
        "warnings": document["verdict"]["warnings"],
        "capacities": document["plan"]["capacities"],
        "schedulers": [
            _scheduler(round_, row, entry_bytes) for row in document["plan"]["schedulers"]
        ],
    }


def _scheduler(
    round_: Round, row: dict[str, Any], entry_bytes: dict[int, dict[str, int]]
) -> dict[str, Any]:
    counts = [page_count(round_.planned[r]) for r in row["ranks"] if round_.planned[r].has_page]
    return {
        **{place: row[place] for place in ("dp", "group") if place in row},
        "ranks": row["ranks"],
        "entries": row["entries"],
        "binding": row["binding"],
        "groups": [
            group | {"binding_host": round_.host(group["binding_rank"])}
            for group in row["budget_groups"]
        ],
        "bytes_by_rank": {
            str(rank): sum(row["entries"][name] * n for name, n in entry_bytes[rank].items())
            for rank in row["ranks"]
        },
        "spread_entries": max(counts) - min(counts) if counts else 0,
        "stranded_bytes": sum(share["stranded_bytes"] for share in row["by_rank"]),
    }
