"""`kvaccord read`: what the startup logs of an engine say, without any integration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from cli.common import AsJson, complain, print_json, refuse
from reader.document import document_of, github_of
from reader.files import Unreadable, chunks_of, size_bytes
from reader.judge import Judgement, judge
from reader.replay import NotReplayable, start_file_of
from reader.scan import Scan
from reader.seats import AXES
from reader.show import exit_code_of, markdown_of, text_of


def read(
    logs: Annotated[
        list[str], typer.Argument(metavar="LOG…", help="Plain, gzip, bzip2 or xz; - is stdin.")
    ],
    ranks: Annotated[
        int | None, typer.Option(min=1, max=1024, help="How many ranks there should be.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="tp=8,pp=2", help="The layout there should be.")
    ] = None,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown instead of text.")] = False,
    github: Annotated[
        bool, typer.Option("--github", help="Annotations of GitHub Actions instead of text.")
    ] = False,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the start to this file, and rehearse it."),
    ] = None,
) -> None:
    """Read startup logs: did the ranks agree, is what they agreed on usable, and why not.

    Several logs are one start: nodes, pods or ranks that log apart. Ranks are inferred.
    Exit codes: 0 agreed and usable, 2 failed or unusable, 3 inconclusive, 1 usage. With --replay
    those of `kvaccord rehearse`.
    """
    if as_json + markdown + github > 1:
        refuse("read", "--json, --markdown and --github: name one")
    wanted = _layout(layout) if layout else None
    try:
        scan = _scanned(tuple(logs))
    except Unreadable as fault:
        refuse("read", str(fault))
    judged = judge(scan.last(), scan.earlier(), scan.restarts(), ranks, wanted)
    if replay:
        _rehearsed(judged, logs, replay, as_json)
    if as_json:
        print_json(document_of(judged))
    else:
        lines = markdown_of if markdown else github_of if github else text_of
        for line in lines(judged):
            typer.echo(line)
    raise typer.Exit(exit_code_of(judged))


def _rehearsed(judged: Judgement, logs: list[str], path: Path, as_json: bool) -> NoReturn:
    """Write the start file and play it, as `kvaccord rehearse FILE` would. Exits as that does."""
    try:
        document = start_file_of(judged, ", ".join(logs))
        path.write_text(json.dumps(document, indent=2) + "\n")
    except (NotReplayable, OSError) as fault:
        refuse("read", f"--replay {path}: {fault}")
    play = [sys.executable, "-m", "cli", "rehearse", str(path)]
    raise typer.Exit(subprocess.call([*play, *(["--json"] if as_json else [])]))


def _layout(said: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in said.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES or not size.isdigit() or not 1 <= int(size) <= 1024:
            refuse(
                "read", f"--layout {said!r}: {part!r} is no AXIS=SIZE; axes are {', '.join(AXES)}"
            )
        sizes[axis] = int(size)
    return sizes


def _scanned(logs: tuple[str, ...]) -> Scan:
    """All logs, folded. A bar on standard error where that is a terminal."""
    scan, total = Scan(), size_bytes(logs)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    shown = sys.stderr.isatty() and bool(total)
    with Progress(*columns, console=complain, transient=True, disable=not shown) as progress:
        task = progress.add_task("reading", total=total)
        before = 0
        for name in logs:
            scan.begin(name)
            done = 0

            def tell(position: int, before: int = before) -> None:
                nonlocal done
                done = position
                progress.update(task, completed=before + position)

            for chunk in chunks_of(name, tell):
                scan.feed(chunk)
            before += done
    return scan
