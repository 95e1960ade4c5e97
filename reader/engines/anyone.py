"""What is under every engine: Python, torch, NCCL, Ray, MPI, the kernel, the HTTP server.

Source: pytorch/pytorch torch/distributed (c10d stores, store_based_barrier, elastic);
ray-project/ray python/ray/_private/ray_logging; encode/uvicorn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from reader.sights import EXCEPTIONS, Mark, Opened, Ready, Sight, Trouble, Waiting, World

# An exception's last line. The name is bounded, and what may stand before it is one character.
EXCEPTION = re.compile(
    r"(?:^|(?<=[\s\]:(|>]))(?<!raise )(?<!except )"
    r"((?:[A-Za-z_]\w{0,60}\.){0,6}(?:[A-Za-z_]\w{0,60}Error|[A-Za-z_]?\w{0,60}Exception))(?::\s(.{0,2000})|:?\s*$)"
)
# Who says one of these was not the first.
_VICTIM = re.compile(
    r"successfully reached|other ranks that didn|[Cc]onnection closed by (?:remote )?peer"
    r"|[Cc]onnection reset by peer|Broken pipe|got 0 bytes|exit ?code:? ?=?-15\b"
    r"|WorkerProc was terminated|EngineDeadError|Engine core initialization failed"
    r"|[Ss]ee (?:the )?(?:root cause|stack trace)(?: \(?above\)?)?|check the stack trace above"
    r"|[Pp]lease check rank \d{1,5} logs?|faulty rank|ActorDiedError|RayActorError|ActorUnavailable"
    r"|SignalException|ChildFailedError|died unexpectedly|ncclRemoteError"
    r"|NCCL (?:operation|communicator) .{0,40}(?:abort|timed)"
    r"|Watchdog caught collective|collective operation timeout|cancelled|CancelledError"
    r"|WorkerProc initialization failed|Failed to start (?:all )?(?:EngineCore|engine)"
    r"|Engine process failed to start|Failed core proc|Some processes failed"
    r"|Parent process exited|[Pp]lease see the error messages? above|EOFError\b|scheduler is dead"
    r"|BrokenProcessPool|Worker exited|shutdown requested|rank \d{1,5} is down"
    r"|Capture cuda graph failed: .{0,40}NCCL"
)
_POINTED_AT = re.compile(
    r"[Cc]heck rank (\d{1,5}) logs?|from rank (\d{1,5})\b|\[rank (\d{1,5})\] .{0,40}is down"
)


def _exception(found: re.Match[str]) -> Iterable[Sight]:
    name, message = found[1], (found[2] or "").strip()
    short = name.rpartition(".")[2]
    text = f"{short}: {message}" if message else short
    if _VICTIM.search(found.string[:4000]):
        return [_victim_in(found.string, text)]
    return [Trouble("raised", "rank_vetoed", text)]


def _victim_in(line: str, text: str) -> Trouble:
    pointed = {int(n) for groups in _POINTED_AT.findall(line[:4000]) for n in groups if n}
    return Trouble("victim", "rank_lost", text, ranks=tuple(sorted(pointed)))


def _victim(found: re.Match[str]) -> Iterable[Sight]:
    writer = re.search(r"\bRank (\d{1,5}) successfully reached", found.string)
    trouble = _victim_in(found.string, found[0][:400])
    facts = (("writer", float(writer[1])),) if writer else ()
    return [Trouble("victim", trouble.code, trouble.text, ranks=trouble.ranks, facts=facts)]


def _barrier(found: re.Match[str]) -> Iterable[Sight]:
    """Of the store's barrier it is known who complains, and how many have come."""
    rank, world, came = int(found[1]), int(found[2]), int(found[3])
    if came > world:
        return [
            World(ranks=world),
            Trouble(
                "late",
                "duplicate_rank",
                f"{came} workers came to a world of {world}: a second start, or processes that were"
                " left over, use the same store",
                facts=(("world", float(world)), ("came", float(came))),
            ),
        ]
    alone = tuple(r for r in range(world) if r != rank) if came == 1 and world <= 1024 else ()
    return [
        World(ranks=world),
        Trouble(
            "late",
            "ranks_missing",
            f"{came} of {world} ranks came to the store's barrier within {found[4]}",
            missing=alone,
            facts=(("writer", float(rank)), ("world", float(world)), ("came", float(came))),
        ),
    ]


def _store(found: re.Match[str]) -> Iterable[Sight]:
    """`/RUN/torchelastic/role_info/N` is agent N of that run, which is a node."""
    keys = [key.strip() for key in found[2][:2000].split(",") if key.strip()]
    nodes = [re.fullmatch(r"/(.{1,200}?)/torchelastic/role_info/(\d{1,5})", key) for key in keys]
    said: list[tuple[str, float | str]] = [("timeout_s", int(found[1]) / 1000)]
    if keys and all(nodes):
        missing = tuple(int(node[2]) for node in nodes if node)
        said += [("run_id", next(node[1] for node in nodes if node)), ("of", "nodes")]
        text = f"waited {int(found[1]) / 1000:g} s for nodes {', '.join(map(str, missing))}"
        return [Trouble("late", "ranks_missing", text, missing=missing, facts=tuple(said))]
    said.append(("keys", ", ".join(keys)[:400]))
    text = f"waited {int(found[1]) / 1000:g} s for the store's keys {', '.join(keys)[:200]}"
    return [Trouble("late", "ranks_missing", text, facts=tuple(said))]


def _ended(rank: int, code: int, where: str) -> Trouble:
    """A process that a launcher saw end. Signal 15 is the launcher's own."""
    kind: Literal["died", "victim"] = "died" if code in (-9, -11, -7, -6, 137, 139) else "victim"
    text = f"rank {rank}{where} ended with {'signal' if code < 0 else 'exit code'} {abs(code)}"
    return Trouble(kind, "rank_lost", text, facts=(("writer", float(rank)), ("exit", float(code))))


def _killed(found: re.Match[str]) -> Iterable[Sight]:
    line = found.string
    return [
        Trouble("died", "rank_lost", line[max(0, found.start() - 80) : found.end() + 80].strip())
    ]


MARKS = (
    Mark(("Traceback (most recent",), re.compile(r"Traceback \(most recent"), lambda m: [Opened()]),
    Mark(
        ("successfully reached monit",),
        re.compile(r"Rank \d{1,5} successfully reached monitoredBarrier.{0,300}"),
        _victim,
    ),
    Mark(
        ("Watchdog caught collective",),
        re.compile(r"Watchdog caught collective operation timeout: .{0,200}"),
        _victim,
    ),
    Mark(
        ("WorkerProc was terminated",),
        re.compile(r"WorkerProc was terminated|WorkerProc initialization failed.{0,100}"),
        _victim,
    ),
    Mark(
        ("Parent process exited",),
        re.compile(r"Parent process exited.{0,60}"),
        _victim,
    ),
    Mark(
        ("died, exit code: ",),
        re.compile(r"Worker \w{1,60} pid (\d{1,9}) died, exit code: (-?\d{1,5})"),
        lambda m: [
            Trouble(
                "died" if m[2] not in ("-15", "0", "1") else "victim",
                "rank_lost",
                f"worker pid {m[1]} died, exit code {m[2]}",
                facts=(("exit", float(m[2])),),
            )
        ],
        serving=True,
        raw=("xit code",),
    ),
    Mark(
        ("in store based barrier on rank",),
        re.compile(
            r"Timed out initializing process group in store based barrier on rank:? (\d{1,5}), "
            r".{0,120}?"
            r"\(world_size=(\d{1,6}), worker_count=(\d{1,6}), timeout=([\d:.]{1,20})"
        ),
        _barrier,
        raw=EXCEPTIONS,
    ),
    Mark(
        ("Waiting in store based barrier",),
        re.compile(r"Waiting in store based barrier .{0,160}?\(world_size=(\d{1,6}), .{0,80}"),
        lambda m: [World(ranks=int(m[1])), Waiting(m[0])],
    ),
    Mark(
        (" clients joined",),
        re.compile(
            r"Timed out after (\d{1,9}) seconds waiting for clients\. "
            r"(\d{1,6})/(\d{1,6}) clients joined"
        ),
        lambda m: [
            World(ranks=int(m[3])),
            Trouble(
                "late",
                "ranks_missing",
                f"{m[2]} of {m[3]} ranks came to the store within {m[1]} s",
                facts=(("world", float(m[3])), ("came", float(m[2])), ("timeout_s", float(m[1]))),
            ),
        ],
        raw=EXCEPTIONS,
    ),
    Mark(
        ("while trying to connect to",),
        re.compile(
            r"client socket has timed out after (\d{1,12})(ms|s).{0,20}while trying to connect to"
            r" \(([^)]{1,100})\)"
        ),
        lambda m: [
            Trouble(
                "late",
                "ranks_missing",
                f"no answer from the store of rank 0 at {m[3]} within {m[1]} {m[2]}",
                missing=(0,),
            )
        ],
        raw=EXCEPTIONS,
    ),
    Mark(
        ("failed to pass monitoredBarrier",),
        re.compile(
            r"Ranks? (\d{1,5}(?:, \d{1,5}){0,63}) failed to pass monitoredBarrier in (\d{1,9})"
        ),
        lambda m: [
            Trouble(
                "late",
                "ranks_missing",
                m[0],
                missing=tuple(int(n) for n in m[1].split(", ")),
            )
        ],
        raw=EXCEPTIONS,
    ),
    Mark(
        ("wait timeout after ",),
        re.compile(r"wait timeout after (\d{1,12})ms, keys: (.{1,2000})"),
        _store,
        raw=EXCEPTIONS,
    ),
    Mark(
        ("name: EADDRINUSE",),
        re.compile(r"failed to listen on any local network address\. port: (\d{1,5}).{0,200}"),
        lambda m: [
            Trouble(
                "raised",
                "rank_vetoed",
                f"port {m[1]} is in use (EADDRINUSE)",
                facts=(("port", float(m[1])),),
            )
        ],
        raw=EXCEPTIONS,
    ),
    Mark(
        ("exited on signal ",),
        re.compile(
            r"process rank (\d{1,5}) with PID \d{1,9} on node (\S{1,80}) exited on signal (\d{1,2})"
        ),
        lambda m: [_ended(int(m[1]), -int(m[3]), f" on node {m[2]}")],
        serving=True,
    ),
    Mark(
        ("failed (exitcode: ",),
        re.compile(r"failed \(exitcode: (-?\d{1,4})\) local_rank: (\d{1,5})"),
        lambda m: [_ended(int(m[2]), int(m[1]), " (local rank)")],
        serving=True,
        raw=("exitcode",),
    ),
    Mark(
        ("scheduler is dead",),
        re.compile(r"Rank (\d{1,5}) scheduler is dead"),
        lambda m: [Trouble("victim", "rank_lost", m[0], ranks=(int(m[1]),))],
        serving=True,
    ),
    Mark(
        ("SIGKILL", "Killed", "exitcode", "xit code", "terminated with -", "Segmentation fault"),
        re.compile(
            r"SIGKILL|OOMKilled|[Oo]ut of memory: Killed process"
            r"|[Ee]xit ?code {0,3}[:=]? {0,3}(?:-9|-11|137|139)\b|terminated with -(?:9|11)\b"
            r"|Segmentation fault"
        ),
        _killed,
        serving=True,
    ),
    Mark(
        ("Application startup complete",),
        re.compile(r"Application startup complete"),
        lambda m: [Ready()],
    ),
    # The last row: an exception that no row above knows better.
    Mark(("Error", "Exception"), EXCEPTION, _exception),
)
