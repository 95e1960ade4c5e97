"""What a report would be with another setting or other memory: hints and what-if share it. Pure.

What is not computable from the report alone gives None, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvaccord.messages import CacheClass, Report

PPM = 1_000_000
ROUNDING = 2**20  # bytes: an engine's own formula is in floats
# What `parts.utilization_of` may be, and the field that the share is taken of.
SHARE_OF = {
    "total": "total_bytes",
    "free": "free_bytes",
    "free_before_load": "initial_free_bytes",
}


def part(report: Report, name: str) -> int | None:
    """A part that explains the numbers, where it is a whole number."""
    value = (report.parts or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def share_base(report: Report) -> int | None:
    """What the engine's fraction is a fraction of, bytes; None where the report does not say."""
    of = (report.parts or {}).get("utilization_of")
    field = SHARE_OF.get(of) if isinstance(of, str) else None
    return getattr(report, field) if field else None


def with_utilization(report: Report, ppm: int) -> Report | None:
    """The report of the same rank under another fraction; None where that is not computable.

    The engine's formula is its share less what it needs beside KV, so the budget moves with the
    share and nothing else does. So does what it insists on, where that is a share of total.
    Source: vLLM gpu_worker.py; ATOM get_num_blocks; SGLang _profile_available_bytes.
    """
    base, now = share_base(report), part(report, "utilization_ppm")
    if base is None or now is None:
        return None
    moved = base * ppm // PPM - base * now // PPM
    changed: dict[str, Any] = {
        "kv_budget_bytes": _capped(report, report.kv_budget_bytes + moved),
        "parts": {**(report.parts or {}), "utilization_ppm": ppm},
    }
    if report.requested_bytes is not None and _of(report) == "total":
        changed["requested_bytes"] = base * ppm // PPM
    return report.model_copy(update=changed)


def with_freed(report: Report, freed_bytes: int) -> Report:
    """The report if so much more (negative: less) had been free, held by somebody else now.

    The budget moves with it where the report says what the fraction is of: by all of it under a
    share of total (what others hold is taken off it), by that share of it otherwise.
    """
    ppm, of = part(report, "utilization_ppm"), _of(report)
    moved = 0
    if of == "total":
        moved = freed_bytes
    elif of in SHARE_OF and ppm is not None:
        moved = freed_bytes * ppm // PPM
    changed: dict[str, Any] = {
        "free_bytes": max(0, _capped(report, report.free_bytes + freed_bytes)),
        "kv_budget_bytes": _capped(report, report.kv_budget_bytes + moved),
    }
    if report.initial_free_bytes is not None:
        initial = max(0, _capped(report, report.initial_free_bytes + freed_bytes))
        changed["initial_free_bytes"] = initial
    return report.model_copy(update=changed)


def freed_for(report: Report, missing_bytes: int) -> int:
    """How much must become free so that the budget, too, grows by what is missing."""
    ppm, of = part(report, "utilization_ppm"), _of(report)
    if of in ("free", "free_before_load") and ppm:
        return -(-missing_bytes * PPM // ppm)
    return missing_bytes


def with_min_entries(report: Report, least: int, *, lower_only: bool = True) -> Report:
    """The report if the engine needed so few entries at least."""

    def wanted(c: CacheClass) -> int | None:
        return c.min_entries if lower_only and (c.min_entries or 0) <= least else least

    return _with_pages(report, "min_entries", wanted)


def with_max_entries(report: Report, most: int) -> Report:
    """The report if its caps were no lower than this."""
    return _with_pages(report, "max_entries", lambda c: c.max_entries and max(c.max_entries, most))


def with_max_model_len(report: Report, tokens: int) -> Report | None:
    """The report if the longest request were so long; None where that is not computable.

    `min_entries` is what one such request needs: its blocks, and some that do not depend on its
    length. Where it is below that (a window, a shard of the sequence), nobody can say.
    """
    length, of_block = report.max_model_len, report.block_tokens
    if length is None or of_block is None:
        return None
    extra = [
        c.min_entries - -(-length // of_block)
        for c in report.classes
        if c.kind == "page" and c.min_entries
    ]
    if min(extra, default=0) < 0:
        return None
    fewer = -(-length // of_block) - -(-tokens // of_block)

    def wanted(c: CacheClass) -> int | None:
        return max(0, c.min_entries - fewer) if c.min_entries else c.min_entries

    changed = _with_pages(report, "min_entries", wanted)
    return changed.model_copy(update={"max_model_len": tokens})


def _with_pages(report: Report, field: str, wanted: Callable[[CacheClass], int | None]) -> Report:
    classes = tuple(
        c.model_copy(update={field: wanted(c)}) if c.kind == "page" else c for c in report.classes
    )
    return report.model_copy(update={"classes": classes})


def with_field(report: Report, field: str, value: object) -> Report:
    """The report with another value of one field, or of one input (`inputs.NAME`)."""
    table, _, key = field.partition(".")
    if not key:
        return report.model_copy(update={field: value})
    values: Mapping[str, Any] = getattr(report, table) or {}
    left = {k: v for k, v in values.items() if k != key}
    return report.model_copy(update={table: left if value is None else {**left, key: value}})


def measured_before_load(report: Report) -> bool:
    """Whether free memory was measured before the weights were loaded.

    Then the budget is a share of free less the engine's own peak; one that was measured after has
    the peak in neither number.
    """
    base, ppm, peak = share_base(report), part(report, "utilization_ppm"), None
    if _of(report) == "free":
        peak = part(report, "peak_torch_bytes")
    if base is None or ppm is None or not peak:
        return False
    names = ("non_torch_bytes", "graph_bytes", "safety_bytes")
    beside = peak + sum(part(report, name) or 0 for name in names)
    return abs(base * ppm // PPM - beside - report.kv_budget_bytes) <= ROUNDING


def _of(report: Report) -> object:
    return (report.parts or {}).get("utilization_of")


def _capped(report: Report, value: int) -> int:
    return value if report.total_bytes is None else min(value, report.total_bytes)
