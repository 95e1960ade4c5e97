"""The frozen documents: decision and outcome, from a round that is ready for one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.engine import Engine, Round
from coordinator.events import Cause, Touch
from kvaccord import canonical
from kvaccord import plan as plan_rules
from kvaccord.layout import Groups, Layout, named
from kvaccord.messages import Report, cut
from kvaccord.peers import Notice
from kvaccord.plan import Finding, agreed_sentence, plan, plan_document
from kvaccord.room import Reports

NOT_RETRYABLE = plan_rules.NOT_RETRYABLE | {"applied_differently", "cancelled"}
# A decision stays readable and bounded however many ranks fail at once.
LONG_CAUSES, LONG_BYTES = 16, 1024
SHORT_CAUSES, SHORT_BYTES = 112, 120
MESSAGE_BYTES = 400
SHOWN_FAULTS = 16
# Every rank is sent one, and an entry holds it beside the report that settled the round.
MAX_DECISION_BYTES = 512 * 1024


@dataclass(frozen=True)
class Verdict:
    """PASSED with a plan, or why not."""

    outcome: str
    code: str
    message: str
    causes: tuple[Cause, ...] = ()
    not_heard: tuple[int, ...] = ()
    warnings: tuple[Notice, ...] = ()
    plan: dict[str, Any] | None = None

    @property
    def ranks(self) -> list[int]:
        return sorted({r for c in self.causes if c.code == self.code for r in c.ranks})

    @property
    def retryable(self) -> bool:
        return all(c.retryable for c in self.causes if c.code == self.code)

    def fields(self) -> dict[str, Any]:
        """What a decision and an outcome have in common."""
        shown, more = bounded(self.causes)
        also = list(dict.fromkeys(c.code for c in self.causes if c.code != self.code))
        return {
            "outcome": self.outcome,
            "code": self.code,
            "message": self.message,
            "ranks": self.ranks,
            "causes": shown,
            "also": also,
            "not_heard": list(self.not_heard),
            "more_causes": more,
            "retryable": self.retryable,
        }

    def document(self) -> dict[str, Any]:
        """The verdict as it stands in a decision."""
        return self.fields() | {
            "warnings": [
                {"code": w.code, "ranks": list(w.ranks), "text": w.text} for w in self.warnings
            ]
        }


def judge_reports(
    layout: Layout,
    reports: Reports,
    hosts: Mapping[int, str],
    groups: Mapping[int, Groups] | None = None,
    *,
    spread_limit: float | None = None,
) -> Verdict:
    """The verdict over one report of every rank."""
    planned = plan(layout, reports, groups, spread_limit=spread_limit)
    if planned.findings:
        causes = tuple(_cause(finding, hosts) for finding in planned.findings)
        return replace(failed("FAILED", causes, not_heard=()), warnings=planned.warnings)
    return Verdict(
        "PASSED",
        "agreed",
        agreed_sentence(planned),
        warnings=planned.warnings,
        plan=plan_document(planned, hosts),
    )


def failed(outcome: str, causes: Sequence[Cause], *, not_heard: Iterable[int]) -> Verdict:
    """FAILED or ABORTED for these causes, in order: the first one gives the code."""
    first = causes[0]
    alike = [c for c in causes if (c.code, c.text) == (first.code, first.text)]
    ranks = sorted({r for c in alike for r in c.ranks})
    by_rank = sorted(alike, key=lambda c: c.ranks)  # so that the first host is of a rank it names
    hosts = list(dict.fromkeys(c.host for c in by_rank if c.host))
    who = named(ranks) if ranks else "the round"
    where = f" on {', '.join(hosts[:3])}{' and more' if len(hosts) > 3 else ''}" if hosts else ""
    others = len(causes) - len(alike)
    more = f" (and {others} more {'cause' if others == 1 else 'causes'})" if others else ""
    blamed = {r for c in causes for r in c.ranks}
    return Verdict(
        outcome,
        first.code,
        f"{who}{where}: {cut(_one_line(first.text), MESSAGE_BYTES)}{more}",
        causes=tuple(causes),
        not_heard=tuple(sorted(set(not_heard) - blamed)),
    )


def decision_of(engine: Engine, round_: Round, verdict: Verdict) -> tuple[Verdict, str]:
    """The verdict and its decision, as text; FAILED where the plan is longer than one may be.

    All else in a decision is bounded, so that one that FAILED is always short enough.
    """
    document = _decision_document(engine, round_, verdict)
    size = len(document.encode())
    if verdict.plan is None or size <= MAX_DECISION_BYTES:
        return verdict, document
    rows, shapes = len(verdict.plan["schedulers"]), len(verdict.plan["shapes"])
    classes = {name for row in verdict.plan["schedulers"] for name in row["entries"]}
    cause = Cause(
        code="plan_too_large",
        ranks=(),
        text=f"the decision would have {size} bytes and {MAX_DECISION_BYTES} may be: the plan has"
        f" {rows} schedulers, {shapes} different sizes of entries and {len(classes)} classes; give"
        " the classes shorter names, declare fewer of them, or start the replicas as several"
        " engines",
        retryable=False,
    )
    verdict = replace(failed("FAILED", [cause], not_heard=()), warnings=verdict.warnings)
    return verdict, _decision_document(engine, round_, verdict)


def _decision_document(engine: Engine, round_: Round, verdict: Verdict) -> str:
    """The decision's canonical bytes, as text."""
    document: dict[str, Any] = {
        "engine": str(engine.name),
        "round": round_.number,
        "store_id": engine.store_id,
        "mode": round_.mode,
        "launch": round_.launch.model_dump(),
        "layout": round_.layout.model_dump(mode="json"),
        "inputs_digest": inputs_digest(round_.layout, round_.planned, round_.groups),
        **_shown_faults(round_.touches),
        "verdict": verdict.document(),
    }
    if verdict.plan is not None:
        document["plan"] = verdict.plan
    return canonical.canonical(document).decode()


def outcome_document(engine: Engine, round_: Round, verdict: Verdict) -> str:
    """The outcome's canonical bytes, as text."""
    return canonical.canonical(
        {
            "engine": str(engine.name),
            "round": round_.number,
            "store_id": engine.store_id,
            **_shown_faults(round_.touches),
            "decision_digest": canonical.digest(round_.decision),
            **verdict.fields(),
        }
    ).decode()


def inputs_digest(
    layout: Layout, reports: Reports, groups: Mapping[int, Groups] | None = None
) -> str:
    """`sha256:HEX` of the canonical `{layout, groups?, reports: {rank: report as planned}}`."""
    document: dict[str, Any] = {
        "layout": layout.model_dump(mode="json"),
        "reports": {str(rank): report_document(r) for rank, r in reports.items()},
    }
    if groups:
        document["groups"] = {str(rank): g.model_dump() for rank, g in groups.items()}
    return canonical.digest(canonical.canonical(document))


def report_document(report: Report) -> dict[str, Any]:
    return report.model_dump(mode="json", exclude_none=True)


def faults(touches: Iterable[Touch]) -> list[dict[str, Any]]:
    """One line for each rule and call that touched the round."""
    ranks: dict[tuple[str, str, str], set[int]] = {}
    for t in touches:
        ranks.setdefault((t.rule, t.kind, t.call), set()).update(t.ranks)
    return [
        {"id": rule, "kind": kind, "call": call, "ranks": sorted(touched)}
        for (rule, kind, call), touched in sorted(ranks.items())
    ]


def _shown_faults(touches: Iterable[Touch]) -> dict[str, Any]:
    """The first of them, and how many more there are, if any."""
    found = faults(touches)
    more = {"more_faults": len(found) - SHOWN_FAULTS} if len(found) > SHOWN_FAULTS else {}
    return {"faults": found[:SHOWN_FAULTS], **more}


def bounded(causes: Sequence[Cause]) -> tuple[list[dict[str, Any]], int]:
    """The first causes at length, the next in a line each, the rest as a number."""
    shown = [
        _cause_fields(c, cut(c.text, LONG_BYTES))
        if index < LONG_CAUSES
        else _cause_fields(c, cut(_one_line(c.text), SHORT_BYTES))
        for index, c in enumerate(causes[: LONG_CAUSES + SHORT_CAUSES])
    ]
    return shown, len(causes) - len(shown)


def _cause(finding: Finding, hosts: Mapping[int, str]) -> Cause:
    return Cause(
        code=finding.code,
        ranks=finding.ranks,
        host=hosts.get(finding.ranks[0]),
        text=finding.text,
        retryable=finding.retryable,
    )


def _cause_fields(cause: Cause, text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"code": cause.code, "text": text}
    if cause.ranks:
        fields["rank"] = cause.ranks[0]
    if cause.host:
        fields["host"] = cause.host
    return fields


def _one_line(text: str) -> str:
    # What a worker says stands in other ranks' logs: no escape sequence, no reversed text.
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
