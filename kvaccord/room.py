"""What one rank has room for, by its own report. Pure integer arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvaccord.messages import CacheClass, Report

Reports = Mapping[int, Report]


@dataclass
class Needs:
    """The classes of one rank, with declarations of one name added up."""

    page: CacheClass | None = None
    page_bytes: int = 0
    page_min: int = 0
    page_max: int | None = None
    state_bytes: dict[str, int] = field(default_factory=dict)
    state_entries: dict[str, int] = field(default_factory=dict)

    @property
    def floor_bytes(self) -> int:
        return sum(self.state_bytes[name] * n for name, n in self.state_entries.items())

    @property
    def entry_bytes(self) -> dict[str, int]:
        """Bytes of an entry of each class."""
        pages = {self.page.name: self.page_bytes} if self.page else {}
        return self.state_bytes | pages


def available_bytes(report: Report) -> int:
    """What the classes may share on one rank; negative when nothing is left."""
    return min(report.kv_budget_bytes, report.free_bytes) - report.reserve_bytes


def needs(report: Report) -> Needs:
    """Add up one rank's declarations: a draft model's KV rides the target's blocks."""
    total = Needs()
    for c in report.classes:
        if c.kind == "page":
            total.page = total.page or c
            total.page_bytes += c.entry_bytes
            total.page_min = max(total.page_min, c.min_entries or 0)
            limits = [n for n in (total.page_max, c.max_entries) if n is not None]
            total.page_max = min(limits, default=None)
        else:
            total.state_bytes[c.name] = total.state_bytes.get(c.name, 0) + c.entry_bytes
            total.state_entries[c.name] = report.max_num_seqs * c.entries_per_req + c.extra_entries
    return total


def page_count(report: Report) -> int:
    """Entries that fit on one rank once its state classes are reserved; 0 where nothing is left.

    Source: ATOM `plan_pools`; vLLM `get_num_blocks`; SGLang `calculate_pool_sizes`.
    """
    need = needs(report)
    return pages_in(need, available_bytes(report) - need.floor_bytes)


def pages_in(need: Needs, rest_bytes: int) -> int:
    """Page entries that fit into so many bytes, within the rank's cap, in whole multiples."""
    if need.page is None:
        return 0
    count = max(0, rest_bytes) // need.page_bytes
    if need.page_max is not None:
        count = min(count, need.page_max)
    return count // need.page.multiple_of * need.page.multiple_of


def size(n: int) -> str:
    """Bytes for people."""
    return f"{n} bytes ({n / 2**30:.2f} GiB)"
