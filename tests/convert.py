"""Reported failures as starts of ours: one small converter for the cases of the form `ranks`.

`available_kv_bytes` is the budget, `free_bytes` where it is absent the same, `block_bytes` one page
class. Rows that lack bytes per entry are converted by hand: BY_HAND says how, case by case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from math import floor
from pathlib import Path
from typing import Any

from coordinator.verdict import judge_reports
from kvaccord import Layout, Report, page, state
from tests.builders import Log

CASES = Path(__file__).parent / "cases"
Row = Mapping[str, Any]


@dataclass
class Start:
    """A reported start. order: when each rank came, None is never."""

    layout: Layout
    reports: dict[int, Report] = field(default_factory=dict)
    raises: dict[int, str] = field(default_factory=dict)
    arrives_s: dict[int, float | None] = field(default_factory=dict)
    timeout_s: float = float("inf")
    spread_limit: float | None = None

    @property
    def late(self) -> set[int]:
        """The ranks that are not there when time is up."""
        return {r for r, at in self.arrives_s.items() if at is None or at > self.timeout_s}


def a_case(number: str) -> dict[str, Any]:
    (path,) = CASES.glob(f"{number}-*.json")
    case: dict[str, Any] = json.loads(path.read_text())
    return case


def start_of(case: dict[str, Any]) -> Start:
    group, by_hand = case["input"]["group"], BY_HAND.get(case["id"][:3])
    layout = Layout(
        dp=group.get("dp_size", 1),
        pp=group["pp_size"],
        pcp=group["pcp_size"],
        tp=group["tp_size"],
        equal_over=("dp",) if group.get("min_scope") == "world" else (),
    )
    assert layout.world_size == group["world_size"]
    start = Start(
        layout,
        timeout_s=group.get("timeout_s", float("inf")),
        spread_limit=group.get("max_imbalance"),
    )
    for row in case["input"]["ranks"]:
        rank = row["rank"]
        start.arrives_s[rank] = row.get("arrives_after_s", 0)
        if "raises" in row:
            start.raises[rank] = row["raises"]
        elif start.arrives_s[rank] is not None:
            start.reports[rank] = report_of(row, **(by_hand(row, group) if by_hand else {}))
    return start


def report_of(row: Row, **by_hand: Any) -> Report:
    budget = row.get("available_kv_bytes", row.get("free_bytes"))
    fields: dict[str, Any] = {
        "kv_budget_bytes": budget,
        "free_bytes": row.get("free_bytes", budget),
        "total_bytes": row.get("total_bytes"),
        "inputs": row.get("config"),
        "parts": parts_of(row),
    }
    if "block_bytes" in row:
        fields["classes"] = [page("kv", row["block_bytes"])]
    if "host_kv_bytes" in row:
        fields["capacities"] = {"host_kv_bytes": row["host_kv_bytes"]}
    if "utilization" in row and "available_kv_bytes" not in row:
        # The engine's own check when it begins: free memory against its share of total.
        fields["initial_free_bytes"] = row["free_bytes"]
        fields["requested_bytes"] = floor(row["total_bytes"] * row["utilization"])
    return Report(**fields | by_hand)


def parts_of(row: Row) -> dict[str, Any]:
    parts = {
        "utilization_ppm": round(row["utilization"] * 1e6) if "utilization" in row else None,
        "utilization_of": row.get("utilization_of"),
        "peak_torch_bytes": row.get("peak_bytes"),
        "non_torch_bytes": row.get("non_torch_bytes"),
        "physical_entry_bytes": row.get("physical_block_bytes"),
    }
    return {name: value for name, value in parts.items() if value is not None}


def per_layer(row: Row, group: Row) -> dict[str, Any]:
    """One entry is one token of this stage's layers; one request must fit."""
    of_a_layer = group["kv_bytes_full_model_one_request"] / group["total_layers"]
    of_a_token = -(-of_a_layer // group["max_model_len"])
    return {"classes": [page("kv", int(of_a_token) * row["layers"], min_entries=202752)]}


def counted_blocks(row: Row, group: Row) -> dict[str, Any]:
    """Bytes a block from the blocks that the engine counted; one request must fit."""
    wanted = -(-group["max_model_len"] // group["block_tokens"])
    size = row["available_kv_bytes"] // row["blocks"]
    return {"classes": [page("kv", size, min_entries=wanted)]}


def tokens_and_slots(row: Row, group: Row) -> dict[str, Any]:
    """Bytes a token, and bytes a state block, from what the whole pool was counted to hold."""
    kv = page("kv", row["available_kv_bytes"] // row["tokens"], min_entries=group["max_model_len"])
    slot = state("slot", row["available_kv_bytes"] // row["state_slots"], entries_per_req=1)
    return {"classes": [kv, slot], "max_num_seqs": group["max_num_seqs"]}


def in_bytes(row: Row, group: Row) -> dict[str, Any]:
    """Entries of one byte; the engine's least plan is their number."""
    return {"classes": [page("kv", 1, min_entries=group.get("min_kv_bytes"))]}


def no_memory(row: Row, group: Row) -> dict[str, Any]:
    """The case is about settings: any memory does."""
    return {"classes": [page("kv", 1)], "free_bytes": 1000, "kv_budget_bytes": 1000}


BY_HAND: dict[str, Callable[[Row, Row], dict[str, Any]]] = {
    "013": per_layer,
    "017": in_bytes,
    "019": in_bytes,
    "021": counted_blocks,
    "023": tokens_and_slots,
    "025": in_bytes,
    "047": no_memory,
    "052": in_bytes,
}


def answer(start: Start, *, spread_limit: float | None = None) -> dict[str, Any]:
    """What the planner answers where everyone reports in time, else what the round's rules do."""
    if start.raises or start.late:
        decision: dict[str, Any] = played(start).decision.document
        return decision
    limit = spread_limit or start.spread_limit
    verdict = judge_reports(start.layout, start.reports, {}, spread_limit=limit)
    return {"verdict": verdict.document(), "plan": verdict.plan}


def played(start: Start) -> Log:
    """The log of a start in which a rank raises or does not come."""
    log = Log()
    here = [rank for rank, at in sorted(start.arrives_s.items()) if at is not None]
    processes = {rank: log.claimed(rank, layout=start.layout) for rank in here}
    arrivals = sorted((at, rank) for rank, at in start.arrives_s.items() if at is not None)
    for _, together in groupby((a for a in arrivals if a[0] <= start.timeout_s), lambda a: a[0]):
        for _, rank in together:
            if rank in start.raises:
                processes[rank].vetoes(start.raises[rank])
            else:
                processes[rank].reports(start.reports[rank])
        if log.round.causes:
            log.spends("grace")
            return log
    log.spends("report" if len(here) == start.layout.world_size else "gather")
    return log
