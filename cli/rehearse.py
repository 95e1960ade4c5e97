"""`kvaccord rehearse`: play a recorded start with one real process per rank, over real sockets."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import httpx
import typer
from pydantic import ValidationError

from cli.rank import FAILED, NO_VERDICT, PASSED, report_of
from cli.serve import PORT
from kvaccord.errors import Invalid
from kvaccord.layout import Layout, named
from worker_client.wire import Wire

RECORDED = Path(__file__).parent / "recorded" / "deepseek_v4_pro_tp4_pcp2.json"
SERVED_STORE = "sqlite:///var/kvaccord.db"
USAGE = 1
READY_S = 20.0
STOP_S = 6.0
# A rank that never comes fails a start only when the gather budget ends, by default 30 minutes.
ABSENT_GATHER_S = 5.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass
class Rank:
    """One rank's process, and the lines it wrote."""

    rank: int
    process: subprocess.Popen[str] | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    complaint: str = ""

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
        return {
            "rank": self.rank,
            "heard": self.heard.get("heard", "nothing"),
            "text": self.heard.get("text", self.complaint),
            "exit_code": self.exit_code,
            "digest": self.heard.get("digest"),
        }


def rehearse(
    url: Annotated[
        str | None, typer.Option(envvar="KVACCORD_URL", help="A coordinator that is up.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help=f"Start a coordinator on {SERVED_STORE}; it stays up.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="With --serve: stop it after the rehearsal.")
    ] = False,
    host: Annotated[str, typer.Option(help="With --serve: address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="With --serve: 0 picks a free one.")
    ] = PORT,
    start: Annotated[
        Path, typer.Option("--start", exists=True, dir_okay=False, help="A recorded start.")
    ] = RECORDED,
    namespace: Annotated[str, typer.Option()] = "default",
    engine: Annotated[str | None, typer.Option(help="Default: as recorded.")] = None,
    raise_rank: Annotated[
        int | None, typer.Option(help="This rank raises before it reports.")
    ] = None,
    kill_rank: Annotated[
        int | None, typer.Option(help="This rank is killed before it reports.")
    ] = None,
    absent_rank: Annotated[int | None, typer.Option(help="This rank is never started.")] = None,
    report_after_s: Annotated[
        float, typer.Option(min=0, help="Seconds that every rank spends before it reports.")
    ] = 0.0,
    gather_s: Annotated[
        float | None, typer.Option(help="The private coordinator's gather budget.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Play a recorded start: one process per rank, each with its own numbers, one verdict.

    Without --url and --serve a private coordinator comes and goes with the rehearsal.
    Exit codes: 0 sealed with one digest, 2 failed or aborted, 3 no verdict, 1 anything else.
    """
    recorded = _read(start)
    layout = Layout(**recorded["layout"])
    fates = {"raise": raise_rank, "kill": kill_rank, "absent": absent_rank}
    for fate, rank in fates.items():
        if rank is not None and not 0 <= rank < layout.world_size:
            _refuse(f"--{fate}-rank {rank}: {start.name} has ranks 0 to {layout.world_size - 1}")
    if serve and url and os.environ.get("KVACCORD_URL") != url:
        _refuse("--url and --serve: name one coordinator, or have one started")
    if once and not serve:
        _refuse("--once belongs to --serve")
    if gather_s is None and absent_rank is not None:
        gather_s = ABSENT_GATHER_S

    def say(line: str) -> None:
        if not as_json:
            typer.echo(line)

    # Ctrl-C raises by itself; a container stops with SIGTERM, and must leave nobody behind either.
    signal.signal(signal.SIGTERM, _terminated)
    with ExitStack() as stack:
        if serve:
            bound = (host, port, SERVED_STORE)
            address = stack.enter_context(_coordinator(*bound, gather_s, quiet=False))
        elif url:
            address = url.rstrip("/")
        else:
            bound = ("127.0.0.1", 0, "memory")
            address = stack.enter_context(_coordinator(*bound, gather_s, quiet=True))
        try:
            Wire(address)
        except Invalid as fault:
            _refuse(str(fault))
        say(f"coordinator  {address}")
        say(f"recorded     {start.name}: {recorded.get('about', 'no word about its origin')}")
        report = _play(
            recorded,
            start,
            address,
            namespace,
            engine or recorded["engine"],
            {rank: fate for fate, rank in fates.items() if rank is not None},
            report_after_s,
            layout.world_size,
        )
        if as_json:
            typer.echo(json.dumps(report, indent=2))
        else:
            for line in _shown(report):
                typer.echo(line)
        if serve and not once:
            say("the coordinator stays up; Ctrl-C stops it")
            try:
                signal.pause()
            except (KeyboardInterrupt, SystemExit):
                say("")  # both end it as asked: the exit code stays the rehearsal's
        raise typer.Exit(report["exit_code"])


def _play(
    recorded: dict[str, Any],
    start: Path,
    address: str,
    namespace: str,
    engine: str,
    fates: dict[int, str],
    report_after_s: float,
    world_size: int,
) -> dict[str, Any]:
    """Start all ranks, wait for all, and say what came of it."""
    launch = f"rehearsal-{uuid.uuid4().hex}"
    ranks = [Rank(rank) for rank in range(world_size)]
    began_s = time.monotonic()
    with _reaped(ranks):
        for rank in ranks:
            if fates.get(rank.rank) == "absent":
                continue
            rank.process = _child(
                "cli.rank",
                f"--url={address}",
                f"--namespace={namespace}",
                f"--engine={engine}",
                f"--launch={launch}",
                f"--start={start.resolve()}",
                f"--rank={rank.rank}",
                f"--report-after-s={report_after_s}",
                f"--fate={fates.get(rank.rank, 'start')}",
                stderr=subprocess.PIPE,
            )
        for rank in ranks:
            if rank.process is not None:
                written, complaint = rank.process.communicate()
                rank.lines = [json.loads(line) for line in written.splitlines()]
                rank.complaint = complaint.strip().rpartition("\n")[2]
    heard = [rank for rank in ranks if rank.heard.get("digest")]
    digests = sorted({rank.heard["digest"] for rank in heard})
    fate_s = max((rank.fate_s for rank in ranks if rank.fate_s is not None), default=None)
    since_s = began_s if fate_s is None else fate_s
    code = _exit_code(ranks, digests)
    return {
        "start": start.name,
        "about": recorded.get("about"),
        "coordinator": address,
        "page": f"{address}/",
        "engine": f"{namespace}/{engine}",
        "launch": launch,
        "ranks": [rank.row() | _fate(fates, rank.rank) for rank in ranks],
        "verdict": heard[0].heard["heard"] if heard else "NO VERDICT",
        "text": heard[0].heard["text"] if heard else "no rank heard a verdict",
        "digests": digests,
        "since": "the processes were started" if fate_s is None else "the rank's end",
        "last_heard_s": round(max(r.heard["at_s"] for r in heard) - since_s, 3) if heard else None,
        "exit_code": code,
    }


def _exit_code(ranks: list[Rank], digests: list[str]) -> int:
    codes = {rank.exit_code for rank in ranks}
    if len(digests) > 1:
        return USAGE  # never: two ranks hold different decisions
    if codes == {PASSED}:
        return PASSED
    if FAILED in codes:
        return FAILED
    return NO_VERDICT if NO_VERDICT in codes else USAGE


def _fate(fates: dict[int, str], rank: int) -> dict[str, str]:
    return {"fate": fates[rank]} if rank in fates else {}


def _shown(report: dict[str, Any]) -> Iterator[str]:
    for row in report["ranks"]:
        fate = f" ({row['fate']})" if "fate" in row else ""
        exit_code = "-" if row["exit_code"] is None else row["exit_code"]
        digest = row["digest"][:19] if row["digest"] else "no digest"
        yield f"rank {row['rank']}{fate}  exit {exit_code}  {digest}  {row['heard']}: {row['text']}"
    yield f"verdict      {report['verdict']}: {report['text']}"
    digests = report["digests"]
    yield f"digests      {len(digests)} distinct: {', '.join(digests) or 'none'}"
    if report["last_heard_s"] is not None:
        yield f"last heard   {report['last_heard_s']:.3f} s after {report['since']}"
    yield f"page         {report['page']}"


def _read(start: Path) -> dict[str, Any]:
    """A recorded start, checked whole: a fault in it is ours to name, not eight ranks'."""
    try:
        recorded: dict[str, Any] = json.loads(start.read_text())
        world_size = Layout(**recorded["layout"]).world_size
        for rank in range(world_size):
            report_of(recorded, rank)
        if len(recorded["ranks"]) != world_size or not isinstance(recorded["engine"], str):
            raise ValueError(f"it needs an engine and {named(range(world_size))}")
    except (ValueError, LookupError, TypeError) as fault:
        said = fault.errors()[0]["msg"] if isinstance(fault, ValidationError) else fault
        _refuse(f"--start {start}: {type(fault).__name__}: {said}")
    return recorded


# --- processes ----------------------------------------------------------------------------------


def _child(module: str, *args: str, stderr: Any) -> subprocess.Popen[str]:
    """A process that ends with this one, even when this one is killed."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def end_with_parent() -> None:
        assert libc is not None
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    return subprocess.Popen(
        [sys.executable, "-m", module, *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        # Ctrl-C is for the rehearsal, which then ends its processes in order.
        start_new_session=True,
        preexec_fn=end_with_parent if libc else None,
    )


@contextmanager
def _coordinator(
    host: str, port: int, store: str, gather_s: float | None, *, quiet: bool
) -> Iterator[str]:
    """A coordinator process of our own; yields its address, and stops it in the end."""
    if store.startswith("sqlite:///"):
        Path(store.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    args = ["serve", f"--host={host}", f"--port={port}", f"--store={store}"]
    if gather_s is not None:
        args.append(f"--gather-s={gather_s}")
    with tempfile.TemporaryFile("w+") as noise:
        process = _child("cli", *args, stderr=noise if quiet else None)
        try:
            assert process.stdout is not None
            # Its first line names the address that it really has: "... serves http://HOST:PORT/".
            line = process.stdout.readline()
            address = next((w for w in line.split() if w.startswith("http")), "").rstrip("/")
            if not address:
                noise.seek(0)
                said = (line + noise.read()).strip()[-500:] or "it said why above"
                _refuse(f"the coordinator did not start: {said}")
            _wait_ready(address, process)
            yield address
        finally:
            _stop(process)


def _wait_ready(address: str, process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + READY_S
    with httpx.Client(trust_env=False, timeout=2.0) as client:
        while time.monotonic() < deadline_s and process.poll() is None:
            try:
                if client.get(f"{address}/readyz").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
    _refuse(f"the coordinator at {address} was not ready within {READY_S:.0f} s")


@contextmanager
def _reaped(ranks: list[Rank]) -> Iterator[None]:
    try:
        yield
    finally:
        running = [r.process for r in ranks if r.process and r.process.poll() is None]
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _terminated(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def _refuse(sentence: str) -> NoReturn:
    typer.echo(f"kvaccord rehearse: {sentence}", err=True)
    raise typer.Exit(USAGE)
