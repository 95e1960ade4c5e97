"""`kvaccord rehearse`: play a start with one real process per rank, over real sockets."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cli.common import AsJson, complain, console, refuse, table
from cli.exits import FAILED, PASSED
from cli.play import play
from cli.processes import NotStarted, coordinator
from cli.serve import PORT
from cli.starts import (
    FOLDER,
    RECORDED,
    Budgets,
    Fate,
    Kind,
    Start,
    find_start,
    library,
    read_start,
)
from kvaccord.errors import Invalid
from kvaccord.layout import as_ranges
from worker_client.wire import Wire

SERVED_STORE = "sqlite:///var/kvaccord.db"
# A rank that never comes fails a start only when the gather budget ends, by default 30 minutes.
ABSENT_GATHER_S = 5.0


def rehearse(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME|FILE]", help="A start of the library, or a file.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Play the whole library, each on a private coordinator.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the library.")] = False,
    folder: Annotated[
        Path, typer.Option("--library", exists=True, file_okay=False, help="For --all and --list.")
    ] = FOLDER,
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
        Path | None, typer.Option("--start", exists=True, dir_okay=False, help="As FILE.")
    ] = None,
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
        float | None,
        typer.Option(min=0, help="Seconds that every rank spends before it reports."),
    ] = None,
    gather_s: Annotated[
        float | None, typer.Option(help="The private coordinator's gather budget.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Play a start: one process per rank, each with its own numbers, one verdict.

    Without --url and --serve a private coordinator comes and goes with the rehearsal.
    Exit codes: 0 sealed with one digest, 2 failed or aborted, 3 no verdict, 1 anything else, also
    when it did not come as the start file expects. With --all: 0 all as expected, 2 not all.
    """
    if listed:
        _list(library(folder), as_json)
        return
    named = os.environ.get("KVACCORD_URL") != url  # on the command line
    if serve and url and named:
        _refuse("--url and --serve: name one coordinator, or have one started")
    if once and not serve:
        _refuse("--once belongs to --serve")
    # Ctrl-C raises by itself; a container stops with SIGTERM, and must leave nobody behind either.
    signal.signal(signal.SIGTERM, _terminated)
    if everything:
        if name or start or serve or (url and named):
            _refuse("--all plays the library on private coordinators: give no start and no address")
        raise typer.Exit(_play_all(library(folder), as_json))
    if name and start:
        _refuse("name one start: NAME, FILE or --start")
    path = _found(name) if name else start or RECORDED
    recorded = _read(path)
    recorded = _changed(
        recorded, path, {"raise": raise_rank, "kill": kill_rank, "absent": absent_rank}
    )
    if gather_s is None and absent_rank is not None:
        gather_s = ABSENT_GATHER_S
    budgets = recorded.budgets
    if gather_s is not None:
        budgets = budgets.model_copy(update={"gather_s": gather_s})

    def say(line: str) -> None:
        if not as_json:
            typer.echo(line)

    with ExitStack() as stack:
        try:
            if serve:
                address = stack.enter_context(
                    coordinator(host, port, SERVED_STORE, budgets.options(), quiet=False)
                )
            elif url:
                address = url.rstrip("/")
                Wire(address)
                if budgets != Budgets():
                    say("budgets      the coordinator's own, not those of the start")
            else:
                address = stack.enter_context(_private(budgets))
        except (Invalid, NotStarted) as fault:
            _refuse(str(fault))
        say(f"coordinator  {address}")
        say(f"recorded     {path.name}: {recorded.about}")
        report = play(
            recorded,
            path,
            address,
            namespace,
            engine or recorded.engine,
            recorded.report_after_s if report_after_s is None else report_after_s,
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


def _changed(start: Start, path: Path, asked: dict[Kind, int | None]) -> Start:
    """The start with the fates that the command line asks for; nothing is expected of it then."""
    fates = {rank: Fate(kind=kind) for kind, rank in asked.items() if rank is not None}
    world = start.layout.world_size
    for rank, fate in fates.items():
        if not 0 <= rank < world:
            _refuse(f"--{fate.kind}-rank {rank}: {path.name} has ranks 0 to {world - 1}")
    if not fates:
        return start
    return start.model_copy(update={"fates": start.fates | fates, "expect": None})


def _private(budgets: Budgets) -> Any:
    return coordinator("127.0.0.1", 0, "memory", budgets.options(), quiet=True)


# --- the library --------------------------------------------------------------------------------


def _list(paths: list[Path], as_json: bool) -> None:
    rows = [(path.stem, _read(path)) for path in paths]
    if as_json:
        lines = [{"name": name, "about": start.about} for name, start in rows]
        typer.echo(json.dumps({"starts": lines}, indent=2))
        return
    shown = table("name", "ranks", "expected", "about")
    for name, start in rows:
        expected = f"{start.expect.verdict} {start.expect.code or ''}" if start.expect else "-"
        shown.add_row(name, str(start.layout.world_size), expected, start.about)
    console.print(shown)


def _play_all(paths: list[Path], as_json: bool) -> int:
    """The whole library, one after the other; FAILED when one did not come as expected."""
    reports: list[dict[str, Any]] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=complain, transient=True) as progress:
        task = progress.add_task("", total=len(paths))
        for path in paths:
            progress.update(task, description=f"{len(reports) + 1}/{len(paths)} {path.stem}")
            start = _read(path)
            try:
                with _private(start.budgets) as address:
                    reports.append(
                        play(start, path, address, "default", start.engine, start.report_after_s)
                    )
            except NotStarted as fault:
                _refuse(str(fault))
            progress.advance(task)
    broken = [report for report in reports if not report.get("kept", True)]
    if as_json:
        typer.echo(json.dumps({"starts": reports, "broken": len(broken)}, indent=2))
    else:
        shown = table("start", "kept", "verdict", "code", "ranks", "entries", "last heard")
        for report in reports:
            shown.add_row(*_row(report))
        console.print(shown)
        for report in broken:
            for line in _checked(report):
                typer.echo(f"{report['start']}: {line}")
        typer.echo(f"{len(reports)} starts, {len(reports) - len(broken)} as expected")
    return FAILED if broken else PASSED


def _row(report: dict[str, Any]) -> list[str]:
    kept = {True: "kept", False: "BROKEN", None: "-"}[report.get("kept")]
    entries = {json.dumps(e, sort_keys=True) for e in report["entries"].values()}
    last = report["last_heard_s"]
    return [
        Path(report["start"]).stem,
        kept,
        report["verdict"],
        report["code"] or "-",
        as_ranges(report["blamed"]) or "-",
        " | ".join(sorted(e.strip("{}").replace('"', "") for e in entries)) or "-",
        "-" if last is None else f"{last:.2f} s",
    ]


# --- words --------------------------------------------------------------------------------------


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
    yield from _checked(report)
    yield f"page         {report['page']}"


def _checked(report: dict[str, Any]) -> Iterator[str]:
    for check in report.get("checks", ()):
        word = "kept" if check["kept"] else "BROKEN"
        got = "" if check["kept"] else f", got {_plain(check['got'])}"
        yield f"{word:12} {check['what']}: expected {_plain(check['expected'])}{got}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _found(name: str) -> Path:
    try:
        return find_start(name)
    except ValueError as fault:
        _refuse(str(fault))


def _read(path: Path) -> Start:
    try:
        return read_start(path)
    except ValueError as fault:
        _refuse(f"--start {fault}")


def _terminated(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def _refuse(sentence: str) -> NoReturn:
    refuse("rehearse", sentence)
