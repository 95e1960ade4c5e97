"""A world of one and no coordinator: the shared planner answers, nothing is sent anywhere."""

from __future__ import annotations

from kvaccord.canonical import canonical
from kvaccord.decision import Decision
from kvaccord.layout import Layout
from kvaccord.messages import Report
from kvaccord.plan import agreed_sentence, plan, plan_document


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
