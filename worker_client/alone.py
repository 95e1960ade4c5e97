"""A world of one and no coordinator: the shared planner answers, nothing is sent anywhere."""

from __future__ import annotations

from kvaccord.canonical import canonical
from kvaccord.decision import Decision
from kvaccord.layout import Layout
from kvaccord.messages import Report
from kvaccord.plan import agreed_sentence, plan, plan_document
from kvaccord.room import available_bytes, needs, page_count
from worker_client.flow import Fit, Room


def decide(engine: str, layout: Layout, report: Report) -> Decision:
    """The decision of the only rank. Round 0: no coordinator ever counts that one."""
    planned = plan(layout, {0: report})
    first = planned.findings[0] if planned.findings else None
    code = first.code if first else "agreed"
    verdict = {
        "outcome": "FAILED" if first else "PASSED",
        "code": code,
        "message": f"rank 0: {first.text}" if first else agreed_sentence(planned),
        "ranks": [0] if first else [],
        "causes": [{"rank": 0, "code": f.code, "text": f.text} for f in planned.findings],
        "also": [c for c in dict.fromkeys(f.code for f in planned.findings) if c != code],
        "not_heard": [],
        "more_causes": 0,
        "retryable": first is None or first.retryable,
    }
    document = {"engine": engine, "round": 0, "layout": layout.model_dump(), "verdict": verdict}
    if not first:
        document["plan"] = plan_document(planned, {})
    return Decision(canonical(document))


def check(decision: Decision, report: Report) -> Fit:
    """Whether the only rank still has room for its plan, class by class."""
    need = needs(report)
    floor_fits = need.floor_bytes <= available_bytes(report)
    room = {name: n if floor_fits else 0 for name, n in need.state_entries.items()}
    if need.page is not None:
        room[need.page.name] = page_count(report) if floor_fits else 0
    rooms = tuple(
        Room(0, name, count, room.get(name, 0)) for name, count in decision.entries(0).items()
    )
    return Fit(all(each.fits for each in rooms), rooms)
