"""Reported failures as stories of ours: one small converter for the cases that can be played.

Forms: `ranks` (a row for each rank), `events` (who says what when), `two-groups` (engines side by
side, rows for each). `available_kv_bytes` is the budget, `free_bytes` where it is absent the same,
`block_bytes` one page class. A row without bytes per entry is converted by the numbers that it has
instead: see `memory_of`. A field, event or form that nobody thought of raises Unknown: nothing of a
case is dropped silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from math import floor
from pathlib import Path
from typing import Any

from kvaccord import Layout, page, state
from tests.story import (
    Act,
    Comes,
    Dies,
    Leaves,
    Look,
    Raises,
    Reports,
    Restart,
    Returns,
    Shows,
    Story,
    Who,
)

CASES = Path(__file__).parent / "cases"
OWN = CASES / "own"
Row = Mapping[str, Any]


class Unknown(Exception):
    """Something in a case that this converter does not know how to play."""


# What a case may say, by where it says it. Of those that change nothing here it is said why.
FORMS = {"ranks", "ranks+log", "log+ranks", "events", "two-groups"}
IN_INPUT = {"form", "group", "ranks", "events", "groups", "reconstructed", "both_live"}
IN_INPUT |= {"log", "log_engine"}  # to be read, not played
SIZES = {"world_size", "tp_size", "pp_size", "pcp_size", "dp_size"}
IN_GROUP = SIZES | {
    *("group", "min_scope", "max_imbalance", "timeout_s", "extend_on_progress", "grace_s"),
    *("max_model_len", "max_num_seqs", "block_tokens", "min_kv_bytes", "total_layers"),
    *("kv_bytes_full_model_one_request", "ranks"),
    "resources",
    "unified_memory",  # explains the numbers
    "heartbeat_s",  # the kernel speaks for presence: nobody is judged by a beat
    "dcp_size",  # a part of TP: changes no byte of the plan
}
OF_MEMORY = {
    *("available_kv_bytes", "free_bytes", "total_bytes", "block_bytes"),
    *("utilization", "utilization_of", "peak_bytes", "non_torch_bytes", "physical_block_bytes"),
    *("blocks", "tokens", "state_slots", "layers", "config"),
}
OF_PROCESS = {"rank", "tp", "pp", "pcp", "dp", "node", "host", "gpu_uuid", "launch", "restart"}
IN_ROW = (
    OF_MEMORY
    | OF_PROCESS
    | {
        *("joins_after_s", "arrives_after_s", "dies_after_s", "measured", "raises"),
        *("phase", "progress", "heartbeat_s"),
        # These explain the numbers; the coordinator is not told them.
        *("exit_code", "free_source", "mig", "host_free_bytes", "host_total_bytes"),
    }
)
IN_EVENT = OF_PROCESS | SIZES | {"t", "group", "incarnation", "report", "event", "raises"}
IN_EVENT |= {"verdict", "both_live"}

# What an `event` may be, in the words of whoever reported it.
GONE = r"(heart)?beats? stops?|goes silent|dies|is killed|killed|crashes|exits|vanishes|is deleted"
BACK = r"(heart)?beats? (resumes?|returns?|is back)|is back|session returns"
LEFT = r"leaves|is drained|shuts down"
HERE = r"joins|starts|comes|retries"
NEW_COORDINATOR = r"coordinator (restarts|is restarted|is replaced)"

# A case says that an old process lives beside the new one; only the report itself is asked.
BOTH_LIVE = r"left-over|still alive|both (processes )?(live|alive|run)|second launch"


def a_case(number: str, folder: Path = CASES) -> dict[str, Any]:
    (path,) = folder.glob(f"{number}-*.json")
    case: dict[str, Any] = json.loads(path.read_text())
    return case


def story_of(case: Mapping[str, Any]) -> Story:
    """The case as acts in time. Raises Unknown."""
    given = case["input"]
    form = given["form"]
    if form not in FORMS:
        raise Unknown(f"{case['id']}: form {form!r} is not one of {sorted(FORMS)}")
    _known(given, IN_INPUT, f"{case['id']} input")
    story, name = Story(), re.sub(r"[^A-Za-z0-9._-]", "-", case["id"])
    if form == "two-groups":
        groups = [{"tp_size": g["world_size"]} | g for g in given["groups"]]
        for number, group in enumerate(groups):
            _add_rows(story, group["group"], f"start-{number}", group, group["ranks"])
    elif form == "events":
        for engine in dict.fromkeys(event.get("group", name) for event in given["events"]):
            _add_engine(story, engine, given["group"])
        story.acts += _played(name, given, given["events"], _says_both_live(case))
    else:
        _add_rows(story, name, "start", given["group"], given["ranks"])
    looks = case["expected"].get("readiness", ())
    last_s = max((act.at_s for act in story.acts), default=0.0)
    for look in [looks] if isinstance(looks, Mapping) else looks:
        # A moment after: at 200 s somebody has been silent for whole 120 s.
        story.acts.append(Look(look.get("t", last_s) + 0.5, next(iter(story.engines))))
    return story


def _known(said: Iterable[str], names: set[str], where: str) -> None:
    if odd := sorted(set(said) - names):
        raise Unknown(f"{where}: {', '.join(odd)}: the converter does not know what it means")


def _says_both_live(case: Mapping[str, Any]) -> bool:
    said = " ".join([case.get("symptom", ""), *case.get("facts", ())])
    return bool(case["input"].get("both_live", re.search(BOTH_LIVE, said)))


# --- groups -------------------------------------------------------------------------------------


def layout_of(group: Row, where: str) -> Layout:
    sizes = {axis: group.get(f"{axis}_size", 1) for axis in ("dp", "pp", "pcp", "tp")}
    world = 1
    for size in sizes.values():
        world *= size
    if world != group.get("world_size", world):
        raise Unknown(f"{where}: world_size {group['world_size']} is not the product of {sizes}")
    scope = group.get("min_scope", "tp_group")
    if scope not in ("world", "tp_group"):
        raise Unknown(f"{where}: min_scope {scope!r}")
    return Layout(**sizes, equal_over=("dp",) if scope == "world" else ())


def _add_engine(story: Story, engine: str, group: Row) -> None:
    _known(group, IN_GROUP, f"{engine} group")
    policy = story.engines.setdefault(engine, {})
    if (timeout_s := group.get("timeout_s")) is not None:
        hard_s = max(timeout_s, 7200) if group.get("extend_on_progress") else timeout_s
        policy |= {"gather_s": timeout_s, "report_s": {"soft": timeout_s, "hard": hard_s}}
    if "max_imbalance" in group:
        policy["spread_limit"] = group["max_imbalance"]
    story.lost_after_s = group.get("grace_s", story.lost_after_s)


def join_of(row: Row, group: Row, who: Who, *, run: str, nth: int = 1) -> dict[str, Any]:
    """What the process says of itself. nth: which process of its rank it is."""
    rank, layout = who.ranks[0], layout_of(group, str(who))
    if rank < layout.world_size:
        at = layout.coordinates(rank)._asdict()
        if odd := {axis for axis in at if row.get(axis, at[axis]) != at[axis]}:
            raise Unknown(f"{who}: {', '.join(odd)}: rank {rank} of {layout} is {at}")
    default = f"node-{row['node']}" if "node" in row else f"host-{rank}"
    device = {"uuid": row.get("gpu_uuid"), "total_bytes": row.get("total_bytes")}
    return {
        "ranks": list(who.ranks),
        "layout": layout.model_dump(mode="json"),
        "nonce": re.sub(r"[^A-Za-z0-9._:-]", "-", f"nonce-{rank}-{who.name}")[:64],
        "launch": {"run": row.get("launch", run), "restart": row.get("restart", 0)},
        "host": row.get("host", default),
        "pid": 1000 * nth + rank,
        "device": {name: value for name, value in device.items() if value is not None},
    }


# --- rows ---------------------------------------------------------------------------------------


def _add_rows(story: Story, engine: str, run: str, group: Row, rows: Iterable[Row]) -> None:
    _add_engine(story, engine, group)
    for row in rows:
        who = Who(engine, (row["rank"],), run)
        _known(row, IN_ROW | _resources(group), str(who))
        arrives_s = row.get("arrives_after_s", row.get("measured", [0, 0])[1])
        joins_s = row.get("joins_after_s", row.get("measured", [0, 0])[0])
        if arrives_s is None:
            continue  # it was never seen
        acts: list[Act] = [Comes(joins_s, who, join_of(row, group, who, run=run))]
        if "phase" in row:
            acts += _signs(row, who, joins_s, min(arrives_s, group.get("timeout_s", arrives_s)))
        if "raises" in row:
            acts.append(Raises(max(joins_s, arrives_s), who, row["raises"]))
        elif _measured(row):
            acts.append(Reports(max(joins_s, arrives_s), who, report_of(row, group)))
        if "dies_after_s" in row:
            acts = [act for act in acts if act.at_s <= row["dies_after_s"]]
            acts.append(Dies(row["dies_after_s"], who))
        story.acts += acts


def _signs(row: Row, who: Who, from_s: float, to_s: float) -> Iterator[Act]:
    """A process that goes forward says so at every beat, up to the progress that was seen last."""
    every_s, last = row.get("heartbeat_s", 10), row.get("progress")
    beats = max(1, floor((to_s - from_s) / every_s))
    for beat in range(beats):
        progress = beat if last is None else floor(1000 * last * (beat + 1) / beats)
        yield Shows(from_s + beat * every_s, who, row["phase"], progress)


# --- events -------------------------------------------------------------------------------------


def _played(
    name: str, given: Row, events: Iterable[Row], both_live: bool
) -> Iterator[Act | Look | Restart]:
    """Who is at a rank now is known by its latest incarnation; a new one closes the old first."""
    here: dict[tuple[str, int], list[Who]] = {}
    joins: dict[Who, dict[str, Any]] = {}
    dead: set[Who] = set()
    for event in events:
        engine = event.get("group", name)
        where = f"{engine} at {event.get('t')} s"
        _known(event, IN_EVENT, where)
        at_s, what = event["t"], event.get("event", "")
        if re.fullmatch(NEW_COORDINATOR, what):
            yield Restart(at_s)
            continue
        if "rank" not in event:
            if event.keys() - {"group"} != {"t", "verdict"}:
                raise Unknown(f"{where}: nobody's: {dict(event)}")
            yield Look(at_s, engine)  # whoever plays it compares what is seen with the verdict
            continue
        rank = event["rank"]
        came = here.setdefault((engine, rank), [])
        if "incarnation" in event or not came:
            who = Who(engine, (rank,), event.get("incarnation", "the-first"))
        else:
            who = came[-1]
        group = given["group"] | {size: event[size] for size in SIZES & event.keys()}
        if who not in joins:
            if not event.get("both_live", both_live):
                for old in came:
                    if old not in dead:
                        dead.add(old)
                        yield Dies(at_s, old)
            came.append(who)
            joins[who] = join_of(event, group, who, run="start", nth=len(came))
            yield Comes(at_s, who, joins[who])
        elif not what and "raises" not in event and "report" not in event:
            yield Comes(at_s, who, joins[who])  # the same packets once more
        if "report" in event:
            _known(event["report"], OF_MEMORY | _resources(group), where)
            yield Reports(at_s, who, report_of(event["report"], group))
        if "raises" in event:
            yield Raises(at_s, who, event["raises"])
        if what:
            yield from _befalls(at_s, who, what, dead, where)


def _befalls(at_s: float, who: Who, what: str, dead: set[Who], where: str) -> Iterator[Act]:
    if re.fullmatch(GONE, what):
        dead.add(who)
        yield Dies(at_s, who)
    elif re.fullmatch(BACK, what):
        dead.discard(who)
        yield Returns(at_s, who)
    elif re.fullmatch(LEFT, what):
        yield Leaves(at_s, who, what)
    elif raised := re.fullmatch(r"raises (.+)", what):
        yield Raises(at_s, who, raised[1])
    elif not re.fullmatch(HERE, what):
        raise Unknown(f"{where}: event {what!r}")


# --- reports ------------------------------------------------------------------------------------


def _measured(row: Row) -> bool:
    return bool(row.keys() & {"available_kv_bytes", "free_bytes", "config"})


def report_of(row: Row, group: Row) -> dict[str, Any]:
    """The row as a report, as it is sent. Whether it can be true is for the coordinator to say."""
    budget = row.get("available_kv_bytes", row.get("free_bytes"))
    if budget is None:  # the case is about settings: any memory does
        budget = 1000
    fields: dict[str, Any] = {
        "kv_budget_bytes": budget,
        "free_bytes": row.get("free_bytes", _free(row, budget)),
        "total_bytes": row.get("total_bytes"),
        "inputs": row.get("config"),
        "parts": parts_of(row),
        "classes": [c.model_dump(exclude_none=True) for c in classes_of(row, group)],
    }
    if "block_bytes" in row:
        fields["classes"] = [{"kind": "page", "name": "kv", "entry_bytes": row["block_bytes"]}]
    if "state_slots" in row:
        fields["max_num_seqs"] = group["max_num_seqs"]
    if capacities := {name: row[name] for name in _resources(group) & row.keys()}:
        fields["capacities"] = capacities
    if "utilization" in row and "available_kv_bytes" not in row:
        # The engine's own check when it begins: free memory against its share of total.
        fields["initial_free_bytes"] = row["free_bytes"]
        fields["requested_bytes"] = floor(row["total_bytes"] * row["utilization"])
    return {name: value for name, value in fields.items() if value is not None}


def _resources(group: Row) -> set[str]:
    """What has a minimum of its own, beside the blocks."""
    return {"host_kv_bytes", *group.get("resources", ())} - {"kv_blocks"}


def _free(row: Row, budget: Any) -> Any:
    """What is free where the case does not say: as much as the budget, where that can be."""
    if not isinstance(budget, int) or budget > 0:
        return budget
    if {"total_bytes", "utilization"} <= row.keys():
        # The engine's formula turned round: budget = total * utilization - (total - free).
        return max(1, budget + row["total_bytes"] - floor(row["total_bytes"] * row["utilization"]))
    return 1


def parts_of(row: Row) -> dict[str, Any]:
    parts = {
        "utilization_ppm": round(row["utilization"] * 1e6) if "utilization" in row else None,
        "utilization_of": row.get("utilization_of"),
        "peak_torch_bytes": row.get("peak_bytes"),
        "non_torch_bytes": row.get("non_torch_bytes"),
        "physical_entry_bytes": row.get("physical_block_bytes"),
    }
    return {name: value for name, value in parts.items() if value is not None}


def classes_of(row: Row, group: Row) -> list[Any]:
    """By hand: the classes of a row without bytes per entry, from the numbers that it has."""
    budget = row.get("available_kv_bytes", 0)
    if "blocks" in row:
        # The engine counted blocks; one request of the longest length must fit.
        wanted = -(-group["max_model_len"] // group["block_tokens"])
        return [page("kv", budget // row["blocks"], min_entries=wanted)]
    if "tokens" in row:
        # It counted what the whole budget holds of tokens, and of state slots.
        kv = page("kv", budget // row["tokens"], min_entries=group.get("max_model_len"))
        if "state_slots" not in row:
            return [kv]
        return [kv, state("slot", budget // row["state_slots"], entries_per_req=1)]
    if "kv_bytes_full_model_one_request" in group:
        # An entry is one token of this stage's layers; one request must fit.
        of_a_layer = group["kv_bytes_full_model_one_request"] / group["total_layers"]
        size = int(-(-of_a_layer // group["max_model_len"])) * row["layers"]
        return [page("kv", size, min_entries=group["max_model_len"])]
    return [page("kv", 1, min_entries=group.get("min_kv_bytes"))]
