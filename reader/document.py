"""A judgement for programs: a JSON document, and annotations of GitHub Actions. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reader.advice import advice_of
from reader.judge import Answer, Judgement
from reader.numbers import Row
from reader.show import FAILED, INCONCLUSIVE, LINES_MAX, PASSED, clean, exit_code_of, headline
from reader.start import Seen


def document_of(judged: Judgement) -> dict[str, Any]:
    """The whole judgement. Sizes in `_gib` are as printed; absent knowledge is null."""
    blame, start, numbers, stall = judged.blame, judged.start, judged.numbers, judged.stall
    advice = advice_of(judged)
    return {
        "engine": judged.engine,
        "version": start.version or None,
        "status": judged.status,
        "code": judged.code,
        "exit_code": exit_code_of(judged),
        "headline": headline(judged),
        "next": advice.command or None,
        "next_why": advice.why or None,
        "agreed": _answer(judged.agreed),
        "usable": _answer(judged.usable),
        "world": judged.seats.world,
        "world_is_sure": judged.seats.sure,
        "value": numbers.value,
        "unit": numbers.unit,
        "spread": numbers.spread,
        "binding": list(numbers.binding),
        "why_binding": numbers.why_binding or None,
        "ranks": [_row(row) for row in numbers.rows],
        "offers": [size for _, size, _, _ in start.offers],
        "cause": _cause(judged, blame.first) if blame.first else None,
        "also": [_cause(judged, seen) for seen in blame.others],
        "consequences": [_seen(judged, seen) for seen in blame.consequences],
        "victims": list(blame.victims),
        "suspects": list(blame.suspects),
        "missing": list(blame.missing or (judged.seats.missing() if judged.seats.sure else ())),
        "last_step": judged.step,
        "behind": list(judged.behind),
        "stall": (
            {"at": clean(stall.at), "times": stall.times, "span_s": stall.span_s} if stall else None
        ),
        "facts": start.facts,
        "restarts": judged.restarts,
        "restarts_alike": judged.alike,
        "notes": list(judged.notes),
    }


def _answer(answer: Answer) -> dict[str, Any]:
    return {"answer": answer.word, "why": clean(answer.why), "missing": list(answer.missing)}


def _cause(judged: Judgement, seen: Seen) -> dict[str, Any]:
    first = seen is judged.blame.first
    return {
        "code": seen.trouble.code,
        "kind": seen.trouble.kind,
        "ranks": list(judged.blame.ranks) if first else [],
        "missing": list(judged.blame.missing) if first else [],
        "during": seen.during or None,
        "facts": dict(seen.trouble.facts),
        **_seen(judged, seen),
        "text": clean(judged.blame.text if first else seen.trouble.text),
    }


def _seen(judged: Judgement, seen: Seen) -> dict[str, Any]:
    return {
        "who": judged.seats.label(seen.key),
        "text": clean(seen.trouble.text),
        "times": seen.times,
        "file": seen.place.file,
        "line": seen.place.line,
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "rank": row.rank,
        "label": row.label,
        "count": row.count,
        "unit": row.unit,
        "binds": row.binds,
        "stranded_count": row.stranded_count,
        "stranded_bytes": row.stranded_bytes,
        "stranded_gib": row.stranded_gib,
        "step": row.step,
        "facts": dict(row.facts),
        "file": row.place.file if row.place else None,
        "line": row.place.line if row.place else None,
    }


# --- annotations of GitHub ----------------------------------------------------------------------


def github_of(judged: Judgement) -> Iterator[str]:
    """Workflow commands, each where the log says it."""
    kind = {PASSED: "notice", FAILED: "error", INCONCLUSIVE: "warning"}[exit_code_of(judged)]
    advice, first = advice_of(judged), judged.blame.first
    bound = [row.place for row in judged.numbers.rows if row.binds and row.place]
    place = first.place if first else next(iter(bound), None)
    where = f"file={_property(place.file)},line={place.line}," if place else ""
    after = f"\nnext: {clean(advice.command)}\n{advice.why}" if advice.command else ""
    yield f"::{kind} {where}title=kvaccord read::{_data(headline(judged) + after)}"
    if judged.start.ready:
        return
    for seen in judged.blame.consequences[:LINES_MAX]:
        at = f"file={_property(seen.place.file)},line={seen.place.line}"
        yield f"::notice {at},title=a consequence::{_data(clean(seen.trouble.text))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
