"""What would pass instead: the smallest changes, each found and verified by planning again. Pure.

Hints are computed when somebody reads, stand in no decision, and may improve. Only what the reports
make computable is tried, and what does not pass is never advised.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from kvaccord.changes import (
    PPM,
    freed_for,
    measured_before_load,
    part,
    share_base,
    with_max_model_len,
    with_utilization,
)
from kvaccord.layout import Groups, Layout, SchedulerGroup, named, scheduler_groups
from kvaccord.levers import (
    COARSE_PPM,
    FINE_PPM,
    Change,
    Lever,
    Value,
    apply,
    deciding,
    greatest_utilization,
    mildest,
    passes,
    rising,
)
from kvaccord.messages import Report
from kvaccord.plan import Planned, agreed_sentence, plan
from kvaccord.room import Reports, available_bytes, needs, size

SHOWN_HINTS, SHOWN_RANKS = 8, 4

# Each engine's own words. Source: vLLM `engine/arg_utils.py`; SGLang `server_args.py`;
# TensorRT-LLM `KvCacheConfig` and trtllm-serve; LMDeploy `cli/utils.py`; ATOM `arg_utils.py`.
OPTIONS: dict[str, dict[str, str]] = {
    "vllm": {
        "utilization": "--gpu-memory-utilization",
        "max_num_seqs": "--max-num-seqs",
        "max_model_len": "--max-model-len",
        "kv_budget_bytes": "--kv-cache-memory-bytes",
    },
    "sglang": {
        "utilization": "--mem-fraction-static",
        "max_num_seqs": "--max-running-requests",
        "max_model_len": "--context-length",
    },
    "tensorrt_llm": {
        "utilization": "kv_cache_config.free_gpu_memory_fraction",
        "max_num_seqs": "--max_batch_size",
        "max_model_len": "--max_seq_len",
    },
    "lmdeploy": {
        "utilization": "--cache-max-entry-count",
        "max_num_seqs": "--max-batch-size",
        "max_model_len": "--session-len",
    },
    "atom": {
        "utilization": "--gpu-memory-utilization",
        "max_num_seqs": "--max-num-seqs",
        "max_model_len": "--max-model-len",
    },
}


@dataclass(frozen=True)
class Hint:
    """Changes that pass together, and the sentence that says so."""

    changes: tuple[Change, ...]
    text: str


@dataclass(frozen=True)
class Hints:
    """hints: what passes, each by itself. ruled_out: what people try first, and cannot help."""

    hints: tuple[Hint, ...] = ()
    ruled_out: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """As it is answered; without what there is none of."""
        rows = [{"text": h.text, "changes": [_row(c) for c in h.changes]} for h in self.hints]
        said: dict[str, Any] = {"hints": rows} if rows else {}
        return said | ({"ruled_out": list(self.ruled_out)} if self.ruled_out else {})


def _row(change: Change) -> dict[str, Any]:
    row = {"name": change.name, "value": change.value, "was": change.was}
    found = {name: value for name, value in row.items() if value is not None}
    return found | ({"ranks": list(change.ranks)} if change.ranks else {})


def engine_named(said: str | None) -> str | None:
    """The engine that a version or a part names by its first word: "vllm 0.11", "sglang/0.5"."""
    word = (said or "").strip().lower().replace("/", " ").partition(" ")[0]
    word = word.replace("-", "_").replace("trtllm", "tensorrt_llm")
    return word if word in OPTIONS else None


def hints(
    layout: Layout,
    reports: Reports,
    groups: Mapping[int, Groups] | None = None,
    *,
    spread_limit: float | None = None,
    engine: str | None = None,
) -> Hints:
    """What would pass instead, one report of every rank given. Empty where the plan passes.

    engine: one of OPTIONS; by default what `parts.engine` of a report says.
    """
    return _Search(layout, reports, groups, spread_limit, engine).found()


@dataclass
class _Search:
    layout: Layout
    reports: Reports
    groups: Mapping[int, Groups] | None
    spread_limit: float | None
    engine: str | None
    schedulers: tuple[SchedulerGroup, ...] = ()
    wanted: dict[int, int] = field(default_factory=dict)  # pages, by rank

    def found(self) -> Hints:
        planned = self.plan(())
        codes = {finding.code for finding in planned.findings}
        # Nobody tunes an engine by a reading that is wrong.
        if not codes or "implausible_report" in codes:
            return Hints()
        self.engine = self.engine or next(
            filter(None, map(_engine_of, self.reports.values())), None
        )
        try:
            self.schedulers = scheduler_groups(self.layout, self.groups)
        except KeyError:  # some ranks name their groups and others do not
            return Hints()
        aligned = tuple(self._aligned()) if "inputs_disagree" in codes else ()
        left = self.plan(aligned)
        codes = {finding.code for finding in left.findings}
        if "inputs_disagree" in codes or "implausible_report" in codes:
            return Hints()
        if not codes:
            return Hints((self.hint(aligned, left),))
        reports = apply(self.reports, aligned)
        self.wanted = self._wanted(reports)
        sets = [*self._settings(reports, codes), *self._memory(reports)]
        passing = []
        for changes in sets:
            verified = self.plan((*aligned, *changes))
            if not verified.findings:
                passing.append(self.hint((*aligned, *changes), verified))
        return Hints(tuple(passing[:SHOWN_HINTS]), tuple(self._ruled_out(reports, codes, passing)))

    def plan(self, changes: Sequence[Change]) -> Planned:
        reports = apply(self.reports, changes)
        return plan(self.layout, reports, self.groups, spread_limit=self.spread_limit)

    # --- what must be equal

    def _aligned(self) -> Iterator[Change]:
        """Give the odd ranks what the others have, of everything that has one value."""
        everyone = tuple(self.reports)
        for name in ("max_num_seqs", "max_model_len", "block_tokens"):
            yield from self._odd(name, {r: getattr(self.reports[r], name) for r in everyone})
        yield from self._odd_in("inputs", everyone)
        stages: Sequence[Sequence[int]] = self.layout.groups_along("dp", "pcp", "tp")
        if self.groups:
            stages = [group.ranks for row in self.schedulers for group in row.budget_groups]
        for stage in stages:
            yield from self._odd_in("inputs_stage", stage)

    def _odd_in(self, table: str, ranks: Sequence[int]) -> Iterator[Change]:
        maps: dict[int, Mapping[str, Any]] = {
            r: getattr(self.reports[r], table) or {} for r in ranks
        }
        for key in sorted({key for values in maps.values() for key in values}):
            yield from self._odd(f"{table}.{key}", {r: maps[r].get(key) for r in ranks})

    def _odd(self, name: str, said: Mapping[int, Value]) -> Iterator[Change]:
        typed = {rank: (type(value), value) for rank, value in sorted(said.items())}
        usual = Counter(typed.values()).most_common(1)[0][0]
        by_value: dict[tuple[type, Value], list[int]] = defaultdict(list)
        for rank, value in typed.items():
            if value != usual:
                by_value[value].append(rank)
        for (_, was), ranks in by_value.items():
            yield Change(name, usual[1], was, tuple(ranks))

    # --- settings of the engine

    def _wanted(self, reports: Reports) -> dict[int, int]:
        """The pages that each rank must have room for: the most that one of its peers needs."""
        peers: Sequence[Sequence[int]] = [row.ranks for row in self.schedulers]
        if self.layout.equal_over:
            peers = [tuple(reports)]
        return {
            rank: most
            for ranks in peers
            for most in [max(max(needs(reports[r]).page_min, 1) for r in ranks)]
            for rank in ranks
        }

    def _settings(self, reports: Reports, codes: set[str]) -> Iterator[tuple[Change, ...]]:
        """The smallest sets of settings that pass, each set as small as it may be."""
        tight = deciding(reports, self.wanted)
        lowered = self._lowered(tight) if "request_exceeds_free" in codes else ()
        if lowered and passes(tight, lowered):
            yield lowered
            return
        levers = list(self._levers(reports, tight, may_rise=not lowered))
        ends = tuple(c for lever in levers for c in lever.at(len(lever.values)))
        if not passes(tight, (*lowered, *ends)):
            return
        for count in range(1, len(levers) + 1):
            found = [
                changes
                for several in combinations(levers, count)
                if count == 1 or "kv_budget_bytes" not in {lever.name for lever in several}
                if (changes := mildest(tight, lowered, several)) is not None
            ]
            if found:
                yield from found
                return

    def _lowered(self, tight: Reports) -> tuple[Change, ...]:
        """The greatest fraction under which nobody asks for more than was free; () if unknown."""
        if any(with_utilization(r, PPM) is None for r in tight.values()):
            return ()
        now = max(part(r, "utilization_ppm") or 0 for r in tight.values())
        most = min(map(greatest_utilization, tight.values()))
        for step in (COARSE_PPM, FINE_PPM):
            if ppm := most // step * step:
                return (Change("utilization", ppm, now),)
        return ()

    def _levers(self, reports: Reports, tight: Reports, *, may_rise: bool) -> Iterator[Lever]:
        every = list(tight.values())
        if may_rise and all(with_utilization(r, PPM) is not None for r in every):
            now = min(part(r, "utilization_ppm") or 0 for r in every)
            most = min(map(greatest_utilization, every))
            yield from rising(tight, now, most)
            ceiling = min((with_utilization(r, most) or r).kv_budget_bytes for r in every)
            if "kv_budget_bytes" in OPTIONS.get(self.engine or "", {}) and ceiling > 0:
                yield Lever("kv_budget_bytes", range(1, ceiling + 1))
        seqs = max(r.max_num_seqs for r in every)
        if seqs > 1 and any(needs(r).state_entries for r in every):
            yield Lever("max_num_seqs", range(seqs - 1, 0, -1), seqs)
        length = every[0].max_model_len or 0
        if length > 1 and all(with_max_model_len(r, 1) for r in reports.values()):
            yield Lever("max_model_len", range(length - 1, 0, -1), length)
        elif (entries := max(needs(r).page_min for r in every)) > 1:
            yield Lever("min_entries", range(entries - 1, 0, -1), entries)
        if reserve := max(r.reserve_bytes for r in every):
            yield Lever("reserve_bytes", range(reserve - 1, -1, -1), reserve)
        caps = [n for r in every if (n := needs(r).page_max) is not None]
        if caps and min(caps) < (most := max(map(_whole_pages, every))):
            yield Lever("max_entries", range(min(caps) + 1, most + 1), min(caps))

    # --- memory that others hold

    def _memory(self, reports: Reports) -> Iterator[tuple[Change, ...]]:
        """Memory to free on the short ranks, where the reports show that others hold it."""
        by_bytes: dict[int, list[int]] = defaultdict(list)
        for row in self.schedulers:
            for group in row.budget_groups:
                for rank in group.ranks:
                    missing = self._missing(rank, group.ranks, reports)
                    if missing is None or missing > _held(rank, group.ranks, reports):
                        return
                    if missing:
                        by_bytes[missing].append(rank)
        if by_bytes:
            yield tuple(Change("freed_bytes", n, None, tuple(by_bytes[n])) for n in by_bytes)

    def _missing(self, rank: int, peers: Sequence[int], reports: Reports) -> int | None:
        """Bytes that must become free on a rank; None where the report does not say what helps."""
        report = reports[rank]
        more = [0, 1 + report.reserve_bytes - report.free_bytes]
        wanted, initial = report.requested_bytes, report.initial_free_bytes
        if wanted is not None and initial is not None:
            more.append(wanted - initial)
        need = self._need(rank, report) + report.reserve_bytes
        more.append(need - report.free_bytes)
        short = need - report.kv_budget_bytes
        if self.spread_limit is not None:
            kept = 1 - self.spread_limit
            more.append(
                int(max(reports[r].free_bytes for r in peers) * kept) + 1 - report.free_bytes
            )
            most = max(available_bytes(reports[r]) for r in peers)
            short = max(short, int(most * kept) + 1 - available_bytes(report))
        if short > 0:
            if share_base(report) is None:
                return None
            more.append(freed_for(report, short))
        return max(more)

    def _need(self, rank: int, report: Report) -> int:
        """Bytes that must be available on a rank."""
        need = needs(report)
        if need.page is None:
            return need.floor_bytes
        whole = -(-self.wanted[rank] // need.page.multiple_of) * need.page.multiple_of
        return need.floor_bytes + whole * need.page_bytes

    # --- words

    def hint(self, changes: tuple[Change, ...], planned: Planned) -> Hint:
        said = " and ".join(self._said(c) for c in changes[:SHOWN_RANKS])
        more = f" and {len(changes) - SHOWN_RANKS} more" if changes[SHOWN_RANKS:] else ""
        return Hint(changes, f"{said}{more}: {agreed_sentence(planned)}")

    def _said(self, change: Change) -> str:
        if change.name == "freed_bytes":
            assert isinstance(change.value, int), "bytes"
            return f"free {size(change.value)} that others hold on {named(change.ranks)}"
        where = f" on {named(change.ranks)}" if change.ranks else ""
        now = "" if change.was is None else f" (now {_shown(change.name, change.was)})"
        value = "absent" if change.value is None else _shown(change.name, change.value)
        return f"{self._word(change.name)} {value}{now}{where}"

    def _word(self, name: str) -> str:
        return OPTIONS.get(self.engine or "", {}).get(name, name)

    def _ruled_out(
        self, reports: Reports, codes: set[str], passing: Sequence[Hint]
    ) -> Iterator[str]:
        """The fraction, which engines tell people to raise, where no value of it is enough."""
        if any(c.name in ("utilization", "kv_budget_bytes") for h in passing for c in h.changes):
            return
        if codes.isdisjoint({"does_not_fit", "state_floor_exceeds_budget"}):
            return
        most = min(map(greatest_utilization, reports.values()))
        raised = {rank: with_utilization(report, most) for rank, report in reports.items()}
        short = [
            (self._need(rank, report) - available_bytes(report), -rank)
            for rank, report in raised.items()
            if report is not None
        ]
        if len(short) < len(raised) or max(short)[0] <= 0:
            return
        missing, rank = max(short)[0], -max(short)[1]
        need = self._need(rank, reports[rank])
        yield (
            f"raising {self._word('utilization')} cannot help: at {_shown('utilization', most)},"
            f" the most there is, rank {rank} has {size(need - missing)} and needs {size(need)}"
        )


def _held(rank: int, peers: Sequence[int], reports: Reports) -> int:
    """What others hold on a rank's device, as far as the reports are evidence of it, bytes.

    What was taken when the process began is others'. Where nobody measured that, it is what this
    rank lacks beside the roomiest of its peers, which hold as much of the model.
    """
    report = reports[rank]
    if report.total_bytes is not None:
        if report.initial_free_bytes is not None:
            return report.total_bytes - report.initial_free_bytes
        if measured_before_load(report):
            return report.total_bytes - report.free_bytes
    totals = [reports[r].total_bytes for r in peers]
    if None in totals:
        totals = [0] * len(peers)
    used = {r: (t or 0) - reports[r].free_bytes for r, t in zip(peers, totals, strict=True)}
    return used[rank] - min(used.values())


def _whole_pages(report: Report) -> int:
    need = needs(report)
    if need.page is None:
        return 0
    return -(-max(need.page_min, 1) // need.page.multiple_of) * need.page.multiple_of


def _engine_of(report: Report) -> str | None:
    said = (report.parts or {}).get("engine")
    return engine_named(said) if isinstance(said, str) else None


def _shown(name: str, value: Value) -> str:
    if name == "utilization" and isinstance(value, int):
        whole = f"{value / PPM:.2f}"
        return whole if value % COARSE_PPM == 0 else f"{value / PPM:.6f}".rstrip("0")
    if name.endswith("_bytes") and isinstance(value, int):
        return size(value) if name == "reserve_bytes" else str(value)
    return str(value)
