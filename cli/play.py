"""Play a start: one process per rank, each with its own numbers and its own fate."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from cli.exits import FAILED, NO_VERDICT, PASSED, USAGE
from cli.processes import child
from cli.starts import Expected, Fate, Start

CLAIM_S = 60.0  # until a rank whose double waits for it has its slot
LINGER_S = 3.0  # for a process that is left over, once the others have ended


class Crewman:
    """One rank's process, and the lines it wrote."""

    def __init__(self, rank: int, fate: Fate | None, *, double: bool = False) -> None:
        self.rank = rank
        self.fate = fate
        self.double = double  # the second process of this rank
        self.lines: list[dict[str, Any]] = []
        self.complaint = ""
        self.ended_by_us = False
        self.claimed = threading.Event()
        self.process: subprocess.Popen[str] | None = None

    def launch(self, *args: str) -> None:
        kind, at, after_s = "start", "report", 0.0
        if self.fate and not self.double:
            kind, at, after_s = self.fate.kind, self.fate.at, self.fate.after_s
        options = [f"--rank={self.rank}", f"--fate={kind}", f"--at={at}"]
        if kind == "late":
            options.append(f"--join-after-s={after_s}")
        if self.double:
            options.append("--wait-for-go")
        self._stderr: TextIO = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in finish()
        self.process = child(
            "cli.rank",
            *args,
            *options,
            stderr=self._stderr,
            stdin=subprocess.PIPE if self.double else subprocess.DEVNULL,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(json.loads(line))
                if self.lines[-1].get("now") == "claimed":
                    self.claimed.set()
        self.claimed.set()  # it ended: nobody waits for it any longer

    def go(self) -> None:
        """Let the double begin: its interpreter is up and its imports are done."""
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.close()
        except BrokenPipeError:
            pass

    def finish(self, wait_s: float | None = None) -> None:
        """Wait for its end; after wait_s end it."""
        if self.process is None:
            return
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.ended_by_us = True
            self.process.kill()
            self.process.wait()
        self._reader.join()
        self._stderr.seek(0)
        self.complaint = self._stderr.read().strip().rpartition("\n")[2]
        self._stderr.close()

    @property
    def lingers(self) -> bool:
        """Whether it may never end by itself: a stuck one, or one that waits in the next round."""
        return self.double or (self.fate is not None and self.fate.kind == "stuck")

    @property
    def heard(self) -> dict[str, Any]:
        """Its result; empty for a rank that had none to tell."""
        return next((line for line in self.lines if "heard" in line), {})

    @property
    def exit_code(self) -> int | None:
        return self.process.returncode if self.process else None

    @property
    def fate_s(self) -> float | None:
        """When it did what it was told to do."""
        return next((line["at_s"] for line in self.lines if "did" in line), None)

    def row(self) -> dict[str, Any]:
        text = "ended by the rehearsal" if self.ended_by_us else self.complaint
        row = {
            "rank": self.rank,
            "heard": self.heard.get("heard", "nothing"),
            "text": self.heard.get("text", text),
            "exit_code": self.exit_code,
            "digest": self.heard.get("digest"),
        }
        if self.fate:
            row["fate"] = f"second process, {self.fate.kind}" if self.double else self.fate.kind
        return row


def play(
    start: Start, path: Path, address: str, namespace: str, engine: str, report_after_s: float
) -> dict[str, Any]:
    """Start all ranks, wait for all, and say what came of it."""
    launch = f"rehearsal-{uuid.uuid4().hex}"
    crew = [Crewman(rank, start.fates.get(rank)) for rank in range(start.layout.world_size)]
    doubles = [
        Crewman(rank, fate, double=True)
        for rank, fate in start.fates.items()
        if fate.kind in ("restart", "duplicate")
    ]
    began_s = time.monotonic()
    with _reaped([*crew, *doubles]):
        for man in [*doubles, *crew]:
            if man.fate is None or man.fate.kind != "absent":
                man.launch(
                    f"--url={address}",
                    f"--namespace={namespace}",
                    f"--engine={engine}",
                    f"--launch={launch}",
                    f"--start={path.resolve()}",
                    f"--report-after-s={report_after_s}",
                )
        for double in doubles:
            _release(double, crew[double.rank])
        for man in crew:
            if not man.lingers:
                man.finish()
        for man in [*doubles, *crew]:
            if man.lingers:
                man.finish(LINGER_S)
    return _report(
        start, path, address, f"{namespace}/{engine}", launch, [*crew, *doubles], began_s
    )


def _release(double: Crewman, first: Crewman) -> None:
    assert double.fate is not None
    if double.fate.kind == "duplicate":
        first.claimed.wait(CLAIM_S)
    elif first.process is not None:
        first.process.wait()
    double.go()


def _report(
    start: Start,
    path: Path,
    address: str,
    engine: str,
    launch: str,
    crew: list[Crewman],
    began_s: float,
) -> dict[str, Any]:
    heard = [man for man in crew if man.heard.get("digest")]
    digests = sorted({man.heard["digest"] for man in heard})
    fate_s = max((man.fate_s for man in crew if man.fate_s is not None), default=None)
    since_s = began_s if fate_s is None else fate_s
    first = heard[0].heard if heard else {}
    report = {
        "start": path.name,
        "about": start.about,
        "coordinator": address,
        "page": f"{address}/",
        "engine": engine,
        "launch": launch,
        "ranks": [man.row() for man in crew],
        "verdict": first.get("heard", "NO VERDICT"),
        "code": first.get("code"),
        "blamed": first.get("ranks", []),
        "entries": {str(man.rank): man.heard["entries"] for man in heard if "entries" in man.heard},
        "text": first.get("text", _silence(crew)),
        "digests": digests,
        "since": "the processes were started" if fate_s is None else "the rank's end",
        "last_heard_s": round(max(m.heard["at_s"] for m in heard) - since_s, 3) if heard else None,
        "exit_code": _exit_code([man for man in crew if not man.ended_by_us], digests),
    }
    if start.expect is not None:
        report["checks"] = checks(start.expect, report)
        report["kept"] = all(check["kept"] for check in report["checks"])
        if not report["kept"] and report["exit_code"] != NO_VERDICT:  # that one stays itself
            report["exit_code"] = USAGE
    return report


def _silence(crew: list[Crewman]) -> str:
    """Why nobody heard a verdict, as the first rank that says something says it."""
    said = next((f": rank {man.rank}: {text}" for man in crew if (text := man.row()["text"])), "")
    return f"no rank heard a verdict{said}"


def checks(expect: Expected, report: dict[str, Any]) -> list[dict[str, Any]]:
    """What was expected beside what came, one line each; all that heard must have heard one."""
    pairs: list[tuple[str, Any, Any]] = [
        ("verdict", expect.verdict, report["verdict"]),
        ("digests", 0 if expect.verdict == "NO VERDICT" else 1, len(report["digests"])),
    ]
    if expect.code is not None:
        pairs.append(("code", expect.code, report["code"]))
    if expect.ranks is not None:
        pairs.append(("ranks", sorted(expect.ranks), report["blamed"]))
    if expect.entries is not None:
        names = {name for entries in report["entries"].values() for name in entries}
        counts = {
            name: sorted({e[name] for e in report["entries"].values() if name in e})
            for name in sorted(names)
        }
        got = {name: n[0] if len(n) == 1 else n for name, n in counts.items()}
        pairs.append(("entries", expect.entries, got))
    return [
        {"what": what, "expected": expected, "got": got, "kept": expected == got}
        for what, expected, got in pairs
    ]


def _exit_code(crew: list[Crewman], digests: list[str]) -> int:
    codes = {man.exit_code for man in crew}
    if len(digests) > 1:
        return USAGE  # never: two ranks hold different decisions
    if codes == {PASSED}:
        return PASSED
    if FAILED in codes:
        return FAILED
    return NO_VERDICT if NO_VERDICT in codes else USAGE


@contextmanager
def _reaped(crew: list[Crewman]) -> Iterator[None]:
    try:
        yield
    finally:
        running = [m.process for m in crew if m.process and m.process.poll() is None]
        for process in running:
            process.kill()
        for process in running:
            process.wait()
