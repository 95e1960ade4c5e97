"""Sizing again: whether a plan in force still has room, class by class. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.engine import Round
from kvaccord.decision import Decision
from kvaccord.errors import Invalid
from kvaccord.layout import named
from kvaccord.messages import Report
from kvaccord.plan import available_bytes, needs


def check_rooms(round_: Round, reports: Mapping[int, Report]) -> dict[str, Any]:
    """`{fits, code, ranks: [{rank, class, planned, room}]}` for the ranks asked about.

    room: entries of that class that fit once the classes before it have theirs, state first, in
    the order of their names: the planner's own arithmetic. Of a planned class that a report lacks
    nothing fits. Raises Invalid for a foreign rank.
    """
    if foreign := sorted(set(reports) - set(range(round_.layout.world_size))):
        raise Invalid(
            f"{named(foreign)}: outside the layout of round {round_.number}, whose ranks are 0 to"
            f" {round_.layout.world_size - 1}; ask about ranks of the round",
            rank=foreign[0],
            field="reports",
            value=str(foreign[0]),
        )
    decision = Decision(round_.decision)
    rows: list[dict[str, Any]] = []
    for rank in sorted(reports):
        planned = decision.entries(rank)
        need, left = needs(reports[rank]), available_bytes(reports[rank])
        sizes = dict(sorted(need.state_bytes.items()))
        if need.page is not None:
            sizes[need.page.name] = need.page_bytes
        for name, size in sizes.items():
            room = max(0, left) // size
            wanted = planned.get(name, 0)
            rows.append({"rank": rank, "class": name, "planned": wanted, "room": room})
            left -= wanted * size
        for name in planned.keys() - sizes.keys():
            rows.append({"rank": rank, "class": name, "planned": planned[name], "room": 0})
    fits = all(row["room"] >= row["planned"] for row in rows)
    return {"fits": fits, "code": "fits" if fits else "plan_no_longer_fits", "ranks": rows}
