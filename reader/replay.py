"""A start file out of a judged log, for `kvaccord rehearse`. Pure.

Counts are recorded. Where a log has two decimals of GiB and a coordinator wants bytes, bytes are
chosen so that the recorded counts come out; `about` says so.
"""

from __future__ import annotations

from math import ceil, prod
from typing import Any

from reader.judge import Judgement
from reader.numbers import GIB
from reader.seats import AXES

MIB = 2**20
RANKS_MAX = 64  # one process each
GATHER_S = 5.0  # where a rank never comes, the rehearsal need not wait for half an hour


class NotReplayable(ValueError):
    """The log lacks what a rehearsal needs; the text says what."""


def start_file_of(judged: Judgement, name: str) -> dict[str, Any]:
    """The document of a start file (examples/starts/README.md). Raises NotReplayable."""
    world = judged.seats.world
    if world is None:
        raise NotReplayable("the log does not say how many ranks there are; give --ranks")
    if world > RANKS_MAX:
        raise NotReplayable(
            f"{world} ranks are too many processes to rehearse; {RANKS_MAX} are not"
        )
    if judged.status == "stalled" or (judged.numbers.value is None and judged.blame.first is None):
        raise NotReplayable(
            "the log has neither a count nor a cause, so there is nothing to replay"
        )
    shared, ranks, chosen = _reports(judged, world)
    document: dict[str, Any] = {
        "about": f"From {name}, as `kvaccord read` understood it. Recorded: {_recorded(judged)}."
        f" Chosen: {chosen}.",
        "engine": f"replay-{judged.engine.replace('_', '-')}",
        "layout": _layout(judged, world),
        **shared,
        "ranks": ranks,
        **_fates(judged),
    }
    return document


def _recorded(judged: Judgement) -> str:
    numbers = judged.numbers
    parts = [f"{numbers.value} {numbers.unit}"] if numbers.value is not None else []
    if judged.blame.first:
        parts.append(f"{judged.code} of {len(judged.blame.ranks) or 'unnamed'} ranks")
    return ", ".join(parts)


def _layout(judged: Judgement, world: int) -> dict[str, int]:
    sizes = {axis: judged.seats.sizes.get(axis, 1) for axis in AXES}
    return sizes if prod(sizes.values()) == world else {"tp": world}


# --- reports ------------------------------------------------------------------------------------


def _reports(judged: Judgement, world: int) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    first = judged.blame.first
    facts = dict(first.trouble.facts) if first and not judged.start.ready else {}
    if "free_gib" in facts:
        return _too_little_free(facts, world, judged.blame.ranks)
    if "fits_num_seqs" in facts:
        return _too_many_seqs(facts, world)
    if "max_model_len" in facts:
        return _too_long(facts, world)
    return _counted(judged, world)


def _page(entry_bytes: int, **more: int) -> dict[str, Any]:
    return {"kind": "page", "name": "kv", "entry_bytes": entry_bytes, **more}


def _too_little_free(
    facts: dict[str, float | str], world: int, ranks: tuple[int, ...]
) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    free, total, wanted = (
        round(float(facts[name]) * GIB) for name in ("free_gib", "total_gib", "wanted_gib")
    )
    short = {"free_bytes": free, "initial_free_bytes": free, "kv_budget_bytes": free // 2}
    well = {"free_bytes": wanted, "initial_free_bytes": wanted, "kv_budget_bytes": free // 2}
    shared = {"total_bytes": total, "requested_bytes": wanted, "classes": [_page(MIB)]}
    rows = [short if rank in ranks or not ranks else well for rank in range(world)]
    return shared, rows, "the KV budget, and what ranks have that were not short"


def _too_many_seqs(
    facts: dict[str, float | str], world: int
) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    slots, wanted = int(float(facts["fits_num_seqs"])), int(float(facts["max_num_seqs"]))
    state = {"kind": "state", "name": "state", "entry_bytes": MIB, "entries_per_req": 1}
    shared = {"max_num_seqs": wanted, "classes": [_page(MIB), state]}
    row = {"free_bytes": slots * MIB, "kv_budget_bytes": slots * MIB}
    return shared, [row] * world, "a state slot of 1 MiB, and that all ranks are alike"


def _too_long(
    facts: dict[str, float | str], world: int
) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    if "needed_gib" in facts:
        have = round(float(facts["available_gib"]) * GIB)
        needed = ceil(float(facts["needed_gib"]) * GIB / MIB)
        chosen = "entries of 1 MiB, and that all ranks are alike"
    else:
        have = int(float(facts["fits_model_len"])) * MIB
        needed = int(float(facts["max_model_len"]))
        chosen = "1 MiB a token, and that all ranks are alike"
    row = {"free_bytes": max(have, 0), "kv_budget_bytes": have}
    return {"classes": [_page(MIB, min_entries=needed)]}, [row] * world, chosen


def _counted(judged: Judgement, world: int) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    numbers = judged.numbers
    usual = numbers.value if numbers.value is not None else 1000
    counts = {row.rank: row.count for row in numbers.rows if row.count is not None}
    offers = [size for _, size, _, _ in judged.start.offers]
    if not counts and len(offers) == world:
        counts = dict(enumerate(offers))
    free = {row.rank: row.facts["free_gib"] for row in numbers.rows if "free_gib" in row.facts}
    entry_bytes, chosen = _entry_bytes(judged)
    rows = []
    for rank in range(world):
        budget = counts.get(rank, usual) * entry_bytes
        printed = round(free.get(rank, 0.0) * GIB)
        rows.append({"free_bytes": max(printed, budget, MIB), "kv_budget_bytes": budget})
    return {"classes": [_page(entry_bytes)]}, rows, chosen


def _entry_bytes(judged: Judgement) -> tuple[int, str]:
    for row in judged.numbers.rows:
        if each := row.facts.get("block_bytes"):
            return int(each), "budgets that are the recorded counts times the recorded bytes"
    for row in judged.numbers.rows:
        if row.count and row.count > 0 and (size := row.facts.get("kv_gib", 0.0)) > 0:
            return max(1, int(size * GIB / row.count)), "bytes an entry, from the pool's size"
    return MIB, "1 MiB an entry, and budgets that give the recorded counts"


# --- fates --------------------------------------------------------------------------------------


def _fates(judged: Judgement) -> dict[str, Any]:
    """What befalls the ranks, and what must come of it."""
    first, numbers = judged.blame.first, judged.numbers
    if first is None or judged.start.ready:
        if numbers.value is not None and numbers.value > 0:
            entries = {"kv": numbers.value}
            return {"expect": {"verdict": "SEALED", "code": "sealed", "entries": entries}}
        return {"expect": {"verdict": "FAILED", "code": "does_not_fit"}}
    ranks = list(judged.blame.ranks) or [0]
    expect: dict[str, Any] = {"verdict": "FAILED", "code": judged.code, "ranks": ranks}
    match first.trouble.kind:
        case "raised":
            return {"fates": {str(rank): "raise" for rank in ranks}, "expect": expect}
        case "died":
            return {"fates": {str(rank): "kill" for rank in ranks}, "expect": expect}
        case "late" if judged.code == "ranks_missing":
            fates = {str(rank): "absent" for rank in ranks}
            return {"fates": fates, "budgets": {"gather_s": GATHER_S}, "expect": expect}
    if judged.code in ("does_not_fit", "state_floor_exceeds_budget", "request_exceeds_free"):
        return {"expect": {"verdict": "FAILED", "code": judged.code}}
    raise NotReplayable(f"{judged.code}: the log does not say what the ranks had")
