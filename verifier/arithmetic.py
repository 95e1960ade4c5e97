"""The planner's arithmetic once more, from the page docs/protocol.md, "The plan". Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifier.lies import Json
from verifier.spelling import LIMIT, spelt

Reports = Mapping[int, Json]
SHOWN_KEYS, SHOWN_HOSTS = 32, 8


@dataclass
class Rank:
    """The numbers of one rank, from its report."""

    report: Json
    available: int = 0
    page: str | None = None
    page_bytes: int = 0
    multiple: int = 1
    least: int = 0
    most: int | None = None
    states: dict[str, tuple[int, int]] = field(default_factory=dict)  # name: (entries, bytes each)

    def __post_init__(self) -> None:
        r = self.report
        smaller = (
            r["free_bytes"] if r["free_bytes"] < r["kv_budget_bytes"] else r["kv_budget_bytes"]
        )
        self.available = smaller - r["reserve_bytes"]
        for c in r["classes"]:
            if c["kind"] == "state":
                entries = r["max_num_seqs"] * c["entries_per_req"] + c["extra_entries"]
                _, each = self.states.get(c["name"], (0, 0))
                self.states[c["name"]] = (entries, each + c["entry_bytes"])
                continue
            self.page, self.multiple = c["name"], c["multiple_of"]
            self.page_bytes += c["entry_bytes"]
            self.least = max(self.least, c.get("min_entries", 0))
            if "max_entries" in c:
                self.most = min(c["max_entries"], self.most or c["max_entries"])

    @property
    def floor(self) -> int:
        return sum(entries * each for entries, each in self.states.values())

    def pages(self, room: int) -> int:
        """Whole multiples that fit into so many bytes."""
        count = room // self.page_bytes if room > 0 else 0
        count = count if self.most is None else min(count, self.most)
        return count - count % self.multiple

    @property
    def count(self) -> int:
        return self.pages(self.available - self.floor)

    @property
    def sizes(self) -> dict[str, int]:
        sizes = {name: each for name, (_, each) in self.states.items()}
        return sizes | ({self.page: self.page_bytes} if self.page else {})


class Start:
    """All ranks, and the groups in which their counts must be equal."""

    def __init__(self, layout: Json, reports: Reports, groups: Mapping[int, Json]) -> None:
        self.layout, self.groups = layout, groups
        self.ranks = {rank: Rank(reports[rank]) for rank in sorted(reports)}
        self.rows: dict[Any, dict[Any, list[int]]] = {}
        for rank in self.ranks:
            if groups:
                scheduler, budget = groups[rank]["scheduler"], groups[rank]["budget"]
            else:
                stage = rank // (layout["tp"] * layout["pcp"])
                scheduler, budget = stage // layout["pp"], stage % layout["pp"]
            self.rows.setdefault(scheduler, {}).setdefault(budget, []).append(rank)
        rows = [sorted(r for ranks in row.values() for r in ranks) for row in self.rows.values()]
        self.peers = [list(self.ranks)] if layout["equal_over"] else rows

    # --- what passes

    def plan(self, said: Json) -> dict[str, Any]:
        """The plan; hosts, which no report has, are taken as they are said where they may be."""
        shapes: dict[str, Any] = {}
        for rank, each in self.ranks.items():
            shape = shapes.setdefault(spelt(each.sizes), {"ranks": [], "entry_bytes": each.sizes})
            shape["ranks"].append(rank)
        names = sorted({n for r in self.ranks.values() for n in r.report.get("capacities", {})})
        return {
            "schedulers": [
                self._row(at, index, _dig(said, "schedulers", index))
                for index, at in enumerate(self.rows)
            ],
            "shapes": list(shapes.values()),
            "capacities": {n: self._capacity(n, _dig(said, "capacities", n)) for n in names},
        }

    def _row(self, at: Any, index: int, said: Any) -> dict[str, Any]:
        budgets = self.rows[at]
        ranks = sorted(r for members in budgets.values() for r in members)
        peers = self.peers[0] if self.layout["equal_over"] else self.peers[index]
        counts = {r: self.ranks[r].count for r in peers if self.ranks[r].page}
        entries: dict[str, int] = {}
        binding: dict[str, Any] = {}
        for rank in ranks:
            entries |= {name: n for name, (n, _) in self.ranks[rank].states.items()}
        if page := next((self.ranks[r].page for r in ranks if self.ranks[r].page), None):
            entries[page] = min(counts.values())
            tight = [r for r, n in counts.items() if n == entries[page]]
            here = [r for r in tight if r in ranks] or tight[:1]
            binding[page] = {"ranks": here, "hosts": _hosts(_dig(said, "binding", page, "hosts"))}
        return {
            "group" if self.groups else "dp": at,
            "ranks": ranks,
            "entries": entries,
            "binding": binding,
            "budget_groups": [self._minima(name, members) for name, members in budgets.items()],
            "by_rank": [
                {"rank": r, "stranded_bytes": self.ranks[r].available - self._spent(r, entries)}
                for r in ranks
            ],
        }

    def _spent(self, rank: int, entries: Mapping[str, int]) -> int:
        return sum(entries[name] * each for name, each in self.ranks[rank].sizes.items())

    def _minima(self, name: Any, members: Sequence[int]) -> dict[str, Any]:
        rows = {r: self.ranks[r] for r in members}
        least = min(row.available for row in rows.values())
        binding = min(r for r in rows if rows[r].available == least)
        of = rows[binding].report
        return {
            "group" if self.groups else "pp": name,
            "ranks": list(members),
            "free_bytes": min(row.report["free_bytes"] for row in rows.values()),
            "budget_bytes": min(row.report["kv_budget_bytes"] for row in rows.values()),
            "available_bytes": least,
            "binding_rank": binding,
            "bound_by": "free" if of["free_bytes"] < of["kv_budget_bytes"] else "budget",
        }

    def _capacity(self, name: str, said: Any) -> dict[str, Any]:
        have = {r: row.report.get("capacities", {})[name] for r, row in self.ranks.items()}
        least = min(have.values())
        ranks = [r for r, n in have.items() if n == least]
        return {"bytes": least, "ranks": ranks, "hosts": _hosts(_dig(said, "hosts"))}

    def sentence(self) -> str:
        """What was agreed, in the words of a PASSED verdict."""
        plan = self.plan({})
        said = []
        for row in plan["schedulers"]:
            counts = " + ".join(f"{row['entries'][n]} {n}" for n in sorted(row["entries"]))
            bound = "; ".join(
                f"{n} bound by {_named(row['binding'][n]['ranks'])}" for n in sorted(row["binding"])
            )
            where = f"group {row['group']}: " if self.groups else f"dp {row['dp']}: "
            where = where if len(plan["schedulers"]) > 1 else ""
            said.append(f"{where}{counts} entries{', ' if bound else ''}{bound}")
        more = [f"{len(said) - 4} more"] if len(said) > 4 else []
        return f"every rank builds {' | '.join([*said[:4], *more])}"

    # --- what does not

    def findings(self) -> list[tuple[str, list[int]]]:
        """Every broken rule as (code, ranks), in the order of precedence; spreads apart."""
        found = [("inputs_disagree", ranks) for ranks in self._disagreements()]
        unread = self._unread()
        found += [("implausible_report", [r]) for r in unread]
        empty = []
        for rank, row in self.ranks.items():
            r = row.report
            if rank in unread:
                continue
            if r["free_bytes"] <= r["reserve_bytes"]:
                empty.append(rank)
                code = "reserve_exceeds_free" if r["reserve_bytes"] else "no_free_memory"
                found.append((code, [rank]))
            if r.get("initial_free_bytes", LIMIT) < r.get("requested_bytes", 0):
                found.append(("request_exceeds_free", [rank]))
        for rank, row in self.ranks.items():
            left = row.available - row.floor - (1 if row.page else 0)
            if rank not in unread and rank not in empty and row.states and left < 0:
                found.append(("state_floor_exceeds_budget", [rank]))
        codes = {code for code, _ in found}
        if not codes:
            return self._short()
        if codes == {"state_floor_exceeds_budget"}:
            for rank, row in self.ranks.items():
                if row.page and row.states and row.pages(row.available) < row.least:
                    found.append(("does_not_fit", [rank]))
        return found

    def _short(self) -> list[tuple[str, list[int]]]:
        found = []
        for peers in self.peers:
            rows = {r: self.ranks[r] for r in peers if self.ranks[r].page}
            wanted = max((row.least for row in rows.values()), default=0) or 1
            short = [(row.count, row.available, r) for r, row in rows.items() if row.count < wanted]
            found += [("does_not_fit", [rank]) for *_, rank in sorted(short)]
        return found

    def _unread(self) -> list[int]:
        totals = [row.report.get("total_bytes") for row in self.ranks.values()]
        known = {total for total in totals if total is not None}
        found = []
        for rank, row in self.ranks.items():
            r, total = row.report, row.report.get("total_bytes")
            zero = r["free_bytes"] == 0 and bool(total)
            parent = len(known) > 1 and total == max(known)
            if zero or (parent and r["kv_budget_bytes"] > r["free_bytes"]):
                found.append(rank)
        return found

    def spreads(self) -> list[tuple[str, list[int]]]:
        """The short ranks of the widest spread of each set of peers that is apart at all."""
        found = []
        budgets = [[*row.values()] for row in self.rows.values()]
        if self.layout["equal_over"]:
            budgets = [[ranks for row in budgets for ranks in row]]
        for peers, groups in zip(self.peers, budgets, strict=True):
            told = [{r: self.ranks[r].count for r in peers if self.ranks[r].page}]
            for ranks in groups:
                told.append({r: self.ranks[r].available for r in ranks})
                told.append({r: self.ranks[r].report["free_bytes"] for r in ranks})
            widest: tuple[int, int, list[int]] = (0, 1, [])
            for values in filter(None, told):
                least, most = min(values.values()), max(values.values())
                if most > 0 and (most - least) * widest[1] > widest[0] * most:
                    widest = (most - least, most, [r for r in values if values[r] == least])
            if widest[2]:
                found.append(("spread_too_wide", widest[2]))
        return found

    def _disagreements(self) -> list[list[int]]:
        """The odd ranks of every key that differs."""
        rows = {rank: row.report for rank, row in self.ranks.items()}
        told: list[dict[int, Any]] = []
        for name in ("max_num_seqs", "max_model_len", "block_tokens"):
            told.append({r: report.get(name) for r, report in rows.items()})
        told += _keys({r: report.get("inputs", {}) for r, report in rows.items()})
        for stage in self._stages():
            told += _keys({r: rows[r].get("inputs_stage", {}) for r in stage})
        shapes: dict[str, dict[int, Any]] = {}
        for r, report in rows.items():
            for c in report["classes"]:
                many = (c["entries_per_req"], c["extra_entries"], c["multiple_of"])
                shapes.setdefault(c["name"], {})[r] = (c["kind"], *many)
        told += [shapes[name] for name in sorted(shapes)]
        told.append({r: row.page for r, row in self.ranks.items() if row.page})
        capacities = {r: dict.fromkeys(row.get("capacities", {}), 1) for r, row in rows.items()}
        told += _keys(capacities)
        found = [ranks for said in told if (ranks := _odd(said))]
        if more := found[SHOWN_KEYS:]:
            found = [*found[:SHOWN_KEYS], sorted({r for ranks in more for r in ranks})]
        return found

    def _stages(self) -> list[list[int]]:
        if self.groups:
            return [ranks for row in self.rows.values() for ranks in row.values()]
        stages: dict[Any, list[int]] = {}
        for row in self.rows.values():
            for stage, ranks in row.items():
                stages.setdefault(stage, []).extend(ranks)
        return list(stages.values())


def _keys(maps: Mapping[int, Json]) -> list[dict[int, Any]]:
    names = sorted({name for values in maps.values() for name in values})
    return [{r: values.get(name) for r, values in maps.items()} for name in names]


def _odd(said: Mapping[int, Any]) -> list[int]:
    """Who does not say what most say; of equally many, what the lowest rank says."""
    alike: dict[Any, list[int]] = {}
    for rank in sorted(said):
        alike.setdefault((type(said[rank]).__name__, said[rank]), []).append(rank)
    if len(alike) < 2:
        return []
    usual = max(alike.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    return sorted(r for ranks in alike.values() if ranks is not usual for r in ranks)


def _hosts(said: Any) -> Any:
    fine = isinstance(said, list) and len(said) <= SHOWN_HOSTS
    return said if fine and all(isinstance(host, str) for host in said) else []


def _dig(value: Any, *keys: Any) -> Any:
    for key in keys:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _named(ranks: Sequence[int]) -> str:
    spans: list[str] = []
    first = 0
    for index, rank in enumerate(ranks):
        if index + 1 == len(ranks) or ranks[index + 1] != rank + 1:
            spans.append(f"{ranks[first]}" if first == index else f"{ranks[first]}-{rank}")
            first = index + 1
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans)}"
