"""Whether a decision is true: its bytes, and every number in it that the reports determine. Pure.

A second opinion: this file imports nothing of the planner, the layout or the messages, only the
standard library, and computes everything its own way from the page docs/protocol.md, "The plan".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verifier.arithmetic import Reports, Start
from verifier.lies import Json, Lie, differences
from verifier.spelling import LIMIT, read, spelt

AXES = ("dp", "pp", "pcp", "tp")
SHOWN_CAUSES = 128
# What the planner may say no with, and whether the same start may pass when it is repeated.
PLANNER = {
    "inputs_disagree": False,
    "implausible_report": False,
    "no_free_memory": True,
    "reserve_exceeds_free": True,
    "request_exceeds_free": True,
    "state_floor_exceeds_budget": False,
    "does_not_fit": False,
    "spread_too_wide": False,
    "plan_too_large": False,
}
DEFAULTS = {"reserve_bytes": 0, "max_num_seqs": 0}
CLASS_DEFAULTS = {"entries_per_req": 0, "extra_entries": 0, "multiple_of": 1}


@dataclass
class Checked:
    """lies: where it is false. open: what could not be checked, and what is missing for it."""

    digest: str
    lies: list[Lie] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    @property
    def true(self) -> bool | None:
        """False with a lie; None while something is open; else True."""
        return False if self.lies else None if self.open else True


def verify(body: bytes, beside: Json | None = None, *, digest: str | None = None) -> Checked:
    """Check the bytes of a decision or outcome, as they were received.

    beside: for a decision the reports, as `GET …/reports`, as a question of `POST /v1/plan`, or
    plainly {rank: report}; for an outcome its decision is given as `{"decision": bytes}`.
    digest: what the document is known by elsewhere, `sha256:HEX`.
    """
    checked = Checked(f"sha256:{hashlib.sha256(body).hexdigest()}")
    if digest is not None and digest != checked.digest:
        checked.lies.append(Lie("digest", digest, checked.digest))
    document = read(body, checked.lies)
    if document is None:
        return checked
    try:
        if "verdict" in document:
            checked.lies += _verdict_lies("verdict", document["verdict"], _world(document))
            _decision(document, beside, checked)
        else:
            checked.lies += _verdict_lies("", document, None)
            _outcome(document, beside, checked)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as fault:
        checked.lies.append(Lie("$", f"{type(fault).__name__}: {fault}", "a whole document"))
    return checked


# --- what a document says of itself ---------------------------------------------------------------


def _verdict_lies(at: str, verdict: Json, world: int | None) -> Iterator[Lie]:
    """What can be seen without any report: the codes and ranks of a verdict fit each other."""
    at = f"{at}." if at else ""
    good = verdict["outcome"] in ("PASSED", "SEALED")
    causes, code = verdict["causes"], verdict["code"]
    outcomes = ("SEALED", "ABORTED") if world is None else ("PASSED", "FAILED")
    if verdict["outcome"] not in outcomes:
        yield Lie(f"{at}outcome", verdict["outcome"], " or ".join(outcomes))
    expected: dict[str, Any] = {}
    if good:
        expected = {
            "code": "agreed" if verdict["outcome"] == "PASSED" else "sealed",
            **{name: [] for name in ("causes", "ranks", "also", "not_heard")},
            "more_causes": 0,
            "retryable": True,
        }
    elif not causes:
        yield Lie(f"{at}causes", [], "at least one cause")
    else:
        expected["code"] = causes[0]["code"]
        others = list(dict.fromkeys(c["code"] for c in causes if c["code"] != code))
        if verdict["more_causes"] == 0:
            expected["also"] = others
            if code in PLANNER:
                expected["retryable"] = PLANNER[code]
        elif len(causes) != SHOWN_CAUSES:
            yield Lie(f"{at}more_causes", verdict["more_causes"], "0, or after 128 causes")
        named = {c["rank"] for c in causes if c["code"] == code and "rank" in c}
        if missing := sorted(named - set(verdict["ranks"])):
            yield Lie(f"{at}ranks", verdict["ranks"], f"with {missing}, which its causes name")
    for name, value in expected.items():
        yield from differences(f"{at}{name}", verdict[name], value)
    for name in ("ranks", "not_heard"):
        ranks = verdict[name]
        if ranks != sorted(set(ranks)) or any(r not in range(world or LIMIT) for r in ranks):
            yield Lie(f"{at}{name}", ranks, "ranks of the layout, each once, in order")
    if both := sorted(set(verdict["ranks"]) & set(verdict["not_heard"])):
        yield Lie(f"{at}not_heard", verdict["not_heard"], f"without {both}, which are blamed")


def _outcome(document: Json, beside: Json | None, checked: Checked) -> None:
    said = document["decision_digest"]
    if beside is None or not isinstance(beside.get("decision"), bytes):
        checked.open.append("decision_digest is not compared: give the decision beside the outcome")
        return
    of = hashlib.sha256(beside["decision"]).hexdigest()
    checked.lies += differences("decision_digest", said, f"sha256:{of}")
    decision = json.loads(beside["decision"])
    for name in ("engine", "round", "store_id"):
        checked.lies += differences(name, document[name], decision[name])


def _world(document: Json) -> int:
    sizes = [document["layout"][axis] for axis in AXES]
    world = 1
    for size in sizes:
        world *= size
    return world


# --- a decision beside its reports ----------------------------------------------------------------


def _decision(document: Json, beside: Json | None, checked: Checked) -> None:
    lies, verdict = checked.lies, document["verdict"]
    if ("plan" in document) != (verdict["outcome"] == "PASSED"):
        lies.append(Lie("plan", "plan" in document, verdict["outcome"] == "PASSED"))
    reports, groups = _reports_in(beside)
    if not reports:
        missing = "no reports: inputs_digest, the minima and the counts are not recomputed"
        checked.open.append(f"{missing}; give them beside the decision")
        return
    for name in ("engine", "round"):
        if beside is not None and name in beside:
            lies += differences(name, document[name], beside[name])
    groups = groups or _groups_in(document)
    if beside is not None and "layout" in beside:
        axes: dict[str, Any] = {**dict.fromkeys(AXES, 1), "equal_over": []}
        lies += differences("layout", document["layout"], axes | dict(beside["layout"]))
    lies += _digest_lies(
        document, reports, groups, "reports" in (beside or {}) or "plan" in document, checked
    )
    world = _world(document)
    if len(reports) != world or any(rank >= world for rank in reports):
        if "plan" in document:
            lies.append(Lie("plan", f"a plan of {world} ranks", f"reports of {len(reports)}"))
        else:
            lies += _alone(verdict, reports)
        return
    start = Start(document["layout"], reports, groups)
    if "plan" in document:
        found = start.findings()
        if found:
            lies.append(Lie("verdict.code", "agreed", f"{found[0][0]} of ranks {found[0][1]}"))
            return
        lies += differences("plan", document["plan"], start.plan(document["plan"]))
        lies += differences("verdict.message", verdict["message"], start.sentence())
    else:
        lies += _blame_lies(verdict, start)


def _reports_in(beside: Json | None) -> tuple[dict[int, Json], dict[int, Json]]:
    """Reports as planned, and named groups, by rank; of any of the three forms."""
    said: Any = beside or {}
    if isinstance(said.get("reports"), list):
        rows = {row["rank"]: dict(row) for row in said["reports"]}
        groups = {rank: row.pop("groups") for rank, row in rows.items() if row.get("groups")}
        for row in rows.values():
            del row["rank"]
        return {rank: _whole(row) for rank, row in rows.items()}, groups
    by_rank = said.get("reports", said)
    found = {
        int(rank): _whole(row.get("planned", row.get("sent", row)))
        for rank, row in by_rank.items()
        if str(rank).isdigit()
    }
    return found, {int(rank): g for rank, g in said.get("groups", {}).items()}


def _whole(report: Json) -> Json:
    """The report with what it left out."""
    classes = [
        CLASS_DEFAULTS | {k: v for k, v in c.items() if v is not None} for c in report["classes"]
    ]
    given = {name: value for name, value in report.items() if value is not None}
    return DEFAULTS | given | {"classes": classes}


def _groups_in(document: Json) -> dict[int, Json]:
    """The groups that the ranks named, as the plan lists them; none where they are a grid."""
    return {
        rank: {"budget": group["group"], "scheduler": row["group"]}
        for row in document.get("plan", {}).get("schedulers", ())
        if "group" in row
        for group in row["budget_groups"]
        for rank in group["ranks"]
    }


def _digest_lies(
    document: Json, reports: Reports, groups: Mapping[int, Json], told: bool, checked: Checked
) -> Iterator[Lie]:
    """told: whether it is known that no rank names groups where none are."""
    of: dict[str, Any] = {
        "layout": document["layout"],
        "reports": {str(rank): report for rank, report in reports.items()},
    }
    if groups:
        of["groups"] = {str(rank): dict(each) for rank, each in groups.items()}
    computed = f"sha256:{hashlib.sha256(spelt(of).encode()).hexdigest()}"
    said = document["inputs_digest"]
    if said != computed and not groups and not told:
        missing = "inputs_digest is another: ranks that name groups are part of it"
        checked.open.append(f"{missing}; give the whole answer of GET …/reports")
        return
    yield from differences("inputs_digest", said, computed)


def _blame_lies(verdict: Json, start: Start) -> Iterator[Lie]:
    """A verdict that the planner gave names what is found in the reports, in its order."""
    codes = {cause["code"] for cause in verdict["causes"]}
    if not codes <= PLANNER.keys():
        return  # the round ended for something that no report shows
    found = start.findings()
    if codes == {"plan_too_large"}:
        if found:
            yield Lie("verdict.code", "plan_too_large", found[0][0])
        return
    if "spread_too_wide" in codes and {code for code, _ in found} <= {"does_not_fit"}:
        # The limit is the policy's and no part of the decision: only who is short can be checked.
        blamed = {c["rank"] for c in verdict["causes"] if c["code"] == "spread_too_wide"}
        found += [(code, ranks) for code, ranks in start.spreads() if ranks[0] in blamed]
    shown = [[code, ranks[0]] for code, ranks in found[:SHOWN_CAUSES]]
    said = [[cause["code"], cause["rank"]] for cause in verdict["causes"]]
    yield from differences("verdict.causes", said, shown)
    more = max(0, len(found) - SHOWN_CAUSES)
    yield from differences("verdict.more_causes", verdict["more_causes"], more)
    ranks = sorted({r for code, rs in found for r in rs if code == verdict["code"]})
    yield from differences("verdict.ranks", verdict["ranks"], ranks)
    yield from differences("verdict.not_heard", verdict["not_heard"], [])


def _alone(verdict: Json, reports: Reports) -> Iterator[Lie]:
    """Of a start that ended before all had reported: a shortfall is one of that rank alone."""
    grid: dict[str, Any] = {**dict.fromkeys(AXES, 1), "equal_over": []}
    for index, cause in enumerate(verdict["causes"]):
        rank, code = cause.get("rank"), cause["code"]
        if code in PLANNER and code not in ("inputs_disagree", "plan_too_large"):
            found = []
            if rank in reports:
                found = [code for code, _ in Start(grid, {0: reports[rank]}, {}).findings()]
            if code not in found:
                yield Lie(f"verdict.causes[{index}].code", code, found or "nothing of that rank")
    if both := sorted(reports.keys() & set(verdict["not_heard"])):
        yield Lie("verdict.not_heard", verdict["not_heard"], f"without {both}, which reported")
