"""What-if for `kvaccord plan`: a question from a round, changes to it, and the best that passes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cli.common import Asked, path_of
from kvaccord.canonical import INT_LIMIT
from kvaccord.changes import PPM, SHARE_OF, part, with_freed, with_max_model_len, with_utilization
from kvaccord.layout import Groups, Layout, named
from kvaccord.levers import Change, apply, greatest_utilization, least_index
from kvaccord.messages import CacheClass, Report
from kvaccord.plan import plan
from kvaccord.room import Reports, needs

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for unit, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", start=1)
}
UNITS["kB"] = 1000
SIZES = {
    *("free_bytes", "kv_budget_bytes", "reserve_bytes", "total_bytes"),
    *("initial_free_bytes", "requested_bytes"),
}
COUNTS = {"max_num_seqs", "max_model_len", "block_tokens"}
OF_PAGES = {"min_entries", "max_entries", "entry_bytes", "multiple_of"}
FIELDS = sorted({"utilization", *SIZES, *COUNTS, *OF_PAGES})
FITS = ("max_num_seqs", "max_model_len", "min_entries", "utilization")
_SAID = re.compile(r"(?:rank(\d{1,4})\.)?([a-z_]+)=([+-]?)(\d+(?:\.\d+)?)([A-Za-z]*)")


class Question(NamedTuple):
    """What is planned: as POST /v1/plan asks it."""

    layout: Layout
    reports: dict[int, Report]
    groups: dict[int, Groups]
    spread_limit: float | None = None

    def document(self) -> dict[str, Any]:
        rows = []
        for rank, report in self.reports.items():
            row = {"rank": rank, **report.model_dump(mode="json", exclude_none=True)}
            if rank in self.groups:
                row["groups"] = self.groups[rank].model_dump()
            rows.append(row)
        asked = {"layout": self.layout.model_dump(mode="json"), "reports": rows}
        return asked | ({} if self.spread_limit is None else {"spread_limit": self.spread_limit})

    def passes(self, reports: Reports) -> bool:
        limit = self.spread_limit
        return not plan(self.layout, reports, self.groups, spread_limit=limit).findings


def question_of_round(url: str, place: str) -> dict[str, Any]:
    """The question that a round answered, from its coordinator. place: ENGINE or ENGINE@ROUND."""
    engine, _, number = place.partition("@")
    if number and not (number.isdigit() and int(number)) and number != "current":
        raise ValueError(f"--from {place}: {number!r} is no round; give ENGINE@7 or ENGINE@current")
    asked = Asked(url)
    live = asked.document(f"{path_of(engine)}/rounds/{number or 'current'}/status")
    found = asked.document(f"{path_of(engine)}/rounds/{live['round']}/reports")
    groups = found.get("groups", {})
    rows = [
        {"rank": int(rank), **row.get("planned", row["sent"])}
        | ({"groups": groups[rank]} if rank in groups else {})
        for rank, row in found["reports"].items()
    ]
    if not rows:
        raise ValueError(f"--from {place}: no rank of round {live['round']} has reported yet")
    limit = live["policy"].get("spread_limit")
    question = {"layout": live["layout"], "reports": rows}
    return question if limit is None else question | {"spread_limit": limit}


# --- changes ------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """One `--set`. sign: "" sets the value, "+" and "-" move what is there."""

    rank: int | None
    field: str
    sign: str
    value: float

    def of(self, now: int) -> int:
        by = round(self.value)
        return by if not self.sign else now + by if self.sign == "+" else now - by


def setting(said: str) -> Setting:
    """`[rankN.]FIELD=[+-]NUMBER[UNIT]`. Raises ValueError with what may be said."""
    found = _SAID.fullmatch(said)
    if not found or found[5] not in UNITS or found[2] not in FIELDS:
        raise ValueError(
            f"--set {said}: give [rankN.]FIELD=VALUE, with + or - before the value to move what is"
            f" there, and for bytes a unit such as GiB; fields: {', '.join(FIELDS)}"
        )
    rank, field, sign, number, unit = found.groups()
    if unit and field not in SIZES | {"entry_bytes"}:
        raise ValueError(f"--set {said}: {field} has no unit; leave {unit} out")
    factor = PPM if field == "utilization" else UNITS[unit]
    return Setting(None if rank is None else int(rank), field, sign, float(number) * factor)


def changed(question: Question, settings: list[str]) -> Question:
    """The question with these settings, in order. Raises ValueError where one cannot be."""
    reports = dict(question.reports)
    for said in settings:
        one = setting(said)
        if one.rank is not None and one.rank not in reports:
            raise ValueError(f"--set {said}: the layout's ranks are 0 to {len(reports) - 1}")
        for rank in reports if one.rank is None else [one.rank]:
            try:
                again = _set(reports[rank], one)
                # Not every number can be true: the report is judged as if it were sent.
                reports[rank] = Report.model_validate(again.model_dump(exclude_none=True))
            except ValueError as fault:
                raise ValueError(f"--set {said}: rank {rank}: {_first(fault)}") from None
    return question._replace(reports=reports)


def _set(report: Report, one: Setting) -> Report:
    field = one.field
    if field == "utilization":
        now = part(report, "utilization_ppm")
        again = None if now is None else with_utilization(report, one.of(now))
        return _known(again, "parts.utilization_ppm and parts.utilization_of")
    if field == "free_bytes":
        return with_freed(report, one.of(report.free_bytes) - report.free_bytes)
    if field in OF_PAGES:
        return _set_pages(report, one)
    now = getattr(report, field)
    if one.sign and now is None:
        return _known(None, field)
    value = one.of(now or 0)
    if field == "max_model_len" and now is not None:
        return _known(with_max_model_len(report, value), "block_tokens, and min_entries of it")
    return report.model_copy(update={field: value})


def _set_pages(report: Report, one: Setting) -> Report:
    def again(c: CacheClass) -> CacheClass:
        if c.kind != "page":
            return c
        return c.model_copy(update={one.field: one.of(getattr(c, one.field) or 0)})

    return report.model_copy(update={"classes": tuple(map(again, report.classes))})


def _known(report: Report | None, what: str) -> Report:
    if report is None:
        raise ValueError(f"not computable: the report does not say {what}")
    return report


def _first(fault: ValueError) -> str:
    errors: Callable[[], list[Mapping[str, Any]]] | None = getattr(fault, "errors", None)
    return str(fault) if errors is None else str(errors()[0]["msg"])


def differences(before: Question, after: Question) -> list[str]:
    """What the settings changed, a line for each field and value."""
    told: dict[str, list[int]] = {}
    for rank, report in after.reports.items():
        old, new = _flat(before.reports[rank]), _flat(report)
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                line = f"{name} {old.get(name, 'absent')} → {new.get(name, 'absent')}"
                told.setdefault(line, []).append(rank)
    return [f"{named(ranks)}: {line}" for line, ranks in told.items()]


def _flat(report: Report) -> dict[str, Any]:
    fields = report.model_dump(exclude_none=True)
    parts = {f"parts.{name}": value for name, value in fields.pop("parts", {}).items()}
    classes = {
        f"{c['name']}[{n}].{name}": value
        for n, c in enumerate(fields.pop("classes"))
        for name, value in c.items()
    }
    return fields | parts | classes


# --- the best that passes -------------------------------------------------------------------------


def fitted(question: Question, name: str) -> tuple[int, Question] | None:
    """The greatest max_num_seqs, max_model_len or min_entries, or the least utilization, that
    passes, and the question with it; None where none does. Found by planning: bisection.

    Raises ValueError where the setting bounds nothing or is not computable.
    """
    if name not in FITS:
        raise ValueError(f"--fit {name}: give one of {', '.join(FITS)}")
    _bounds_something(question, name)
    rows = question.reports.values()
    # From the most helpful value on; what passes there need not pass with less help.
    if name == "utilization":
        most = min(map(greatest_utilization, rows))
        values: range = range(most, 0, -1)
    else:
        values = range(1, INT_LIMIT)

    def passes(index: int) -> bool:
        return question.passes(_at(question, name, values[index]))

    if not passes(0):
        return None
    last = len(values) - 1
    # least_index finds where it becomes good; here it ceases to be.
    ends = least_index(last + 1, lambda index: index > last or not passes(index))
    value = values[ends - 1]
    return value, question._replace(reports=_at(question, name, value))


def _at(question: Question, name: str, value: int) -> dict[int, Report]:
    if name == "min_entries":
        # The greatest that passes is what all of them could ask for.
        return {
            rank: report.model_copy(
                update={
                    "classes": tuple(
                        c.model_copy(update={"min_entries": value}) if c.kind == "page" else c
                        for c in report.classes
                    )
                }
            )
            for rank, report in question.reports.items()
        }
    return apply(question.reports, [Change(name, value)])


def _bounds_something(question: Question, name: str) -> None:
    rows = list(question.reports.values())
    if name == "max_num_seqs" and not any(
        c.entries_per_req for report in rows for c in report.classes
    ):
        raise ValueError("--fit max_num_seqs: no class has entries per request; it bounds nothing")
    if name == "min_entries" and not any(needs(report).page for report in rows):
        raise ValueError("--fit min_entries: no rank has a page class; it bounds nothing")
    if name == "max_model_len" and not (
        all(with_max_model_len(report, 1) for report in rows)
        and any(needs(report).page_min for report in rows)
    ):
        raise ValueError(
            "--fit max_model_len: not computable; the reports need max_model_len, block_tokens and"
            " the min_entries of one such request"
        )
    if name == "utilization" and any(with_utilization(report, PPM) is None for report in rows):
        raise ValueError(
            "--fit utilization: not computable; the reports need parts.utilization_ppm and"
            f" parts.utilization_of, one of {', '.join(SHARE_OF)}"
        )
