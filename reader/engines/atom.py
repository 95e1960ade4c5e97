"""ATOM. Its GB are 2^30 bytes, with two decimals.

Source: ROCm/ATOM atom/model_engine/: model_runner.py (get_num_blocks), engine_core.py,
engine_core_mgr.py, async_proc.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from reader.sights import EXCEPTIONS, Begin, Count, Fact, Mark, Ready, Sight, Step, Trouble, World

_NAMES = {
    "total_gpu": "total_gib",
    "free": "free_gib",
    "utilization": "utilization",
    "budget": "budget_gib",
    "peak_torch": "peak_torch_gib",
    "non_torch": "non_torch_gib",
    "cudagraph_est": "graph_gib",
    "safety": "safety_gib",
    "available_for_kv": "available_gib",
    "block_bytes": "block_bytes",
}
_PAIR = re.compile(r"(\w{1,40})=(-?\d{1,20}(?:\.\d{1,6})?)")


def _budget(found: re.Match[str]) -> Iterator[Sight]:
    """Older versions have no non_torch; a field that is not known is passed over."""
    for name, value in _PAIR.findall(found[0]):
        if name in _NAMES:
            yield Fact(_NAMES[name], float(value))
        elif name == "num_kvcache_blocks":
            yield Count(int(value), "blocks", "own")


def _died(found: re.Match[str]) -> list[Sight]:
    """Signal 15 is the engine's own clean-up; codes of 0 and 1 have an exception of their own."""
    rank = re.match(r"Model ?Runner(\d{1,5})/", found[1])
    facts: tuple[tuple[str, float | str], ...] = (("exit", float(found[2])),)
    if rank:
        facts += (("writer", float(rank[1])),)
    text = f"{found[1]} died, exit code {found[2]}"
    kind: Literal["died", "victim"] = "victim" if found[2] in ("-15", "0", "1") else "died"
    return [Trouble(kind, "rank_lost", text, facts=facts)]


MARKS = (
    Mark(
        ("Memory budget: total_gpu",),
        re.compile(r"Memory budget: total_gpu=.{1,600}?num_kvcache_blocks=-?\d{1,15}"),
        _budget,
        serving=True,
    ),
    Mark(
        (", entry_bytes=",),
        re.compile(r"sub-pool ([\w.:-]{1,48}): entries=(\d{1,15}), entry_bytes=(\d{1,15})"),
        lambda m: [
            Fact(f"pool.{m[1]}.entries", float(m[2])),
            Fact(f"pool.{m[1]}.entry_bytes", float(m[3])),
        ],
    ),
    Mark(
        ("Model Runner",),
        re.compile(r"Model Runner\d{1,5}/(\d{1,5}): "),
        lambda m: [World(axes=(("tp", int(m[1])),)), Step("model runner", 20)],
    ),
    Mark(
        (": Creating EngineCore",),
        re.compile(r"Creating EngineCore engine 0 "),
        lambda m: [Begin("atom core 0")],
        serving=True,
    ),
    Mark(
        ("nitialized and ready",),
        re.compile(r"(?:EngineCores? (?:are )?(?:fully )?initialized|fully initialized) and ready"),
        lambda m: [Ready()],
    ),
    Mark(
        ("ready to accept requests",),
        re.compile(r"Server started successfully and ready to accept requests"),
        lambda m: [Ready()],
    ),
    Mark(
        ("Not enough memory for KV",),
        re.compile(r"Not enough memory for KV cache with block size.{0,400}"),
        lambda m: [Trouble("limit", "does_not_fit", m[0])],
        raw=EXCEPTIONS,
    ),
    Mark(
        ("exceeds available KV budget",),
        re.compile(r"Per-request cache tensor \(.{1,80}\) exceeds available KV budget.{0,400}"),
        lambda m: [Trouble("limit", "state_floor_exceeds_budget", m[0])],
        raw=EXCEPTIONS,
    ),
    Mark(
        ("proc died unexpectedly",),
        re.compile(r"\[([^\]]{0,80})\] proc died unexpectedly \(exitcode=(-?\d{1,5})\)"),
        _died,
        serving=True,
    ),
)
