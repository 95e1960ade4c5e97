"""`kvaccord watch`: follow a start until its outcome."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Annotated, Any, Protocol

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from cli.common import DEFAULT_URL as DEFAULT
from cli.common import (
    AsJson,
    Asked,
    Engine,
    RoundNumber,
    Url,
    clean,
    console,
    exit_code_of,
    path_of,
)
from cli.exits import NO_VERDICT
from cli.status import cause_line, headed, last_word, members
from kvaccord.errors import NotFound, Unavailable
from kvaccord.layout import named

ENDED = ("FAILED", "SEALED", "ABORTED")


def watch(
    engine: Engine,
    number: RoundNumber = None,
    coming: Annotated[
        bool, typer.Option("--next", help="Pass over the last round if it has ended.")
    ] = False,
    timeout_s: Annotated[
        float | None, typer.Option(min=0, help="Give up after so long, with exit code 3.")
    ] = None,
    every_s: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 0.5,
    url: Url = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Follow a start until its outcome: a live table on a terminal, else one line a change.

    An engine that is not there yet is waited for, and a coordinator that is away for a moment too.
    Exit codes: 0 sealed, 2 failed or aborted, 3 no outcome within --timeout-s, 1 errors.
    """
    asked, path = Asked(url), f"{path_of(engine)}/rounds"
    asked.get("/healthz")  # a wrong address is an error now; later it is a coordinator that is away
    began_s = time.monotonic()
    with ExitStack() as stack:
        screen: Screen = Lines(began_s, as_json)
        if console.is_terminal and not as_json:
            screen = Picture(stack.enter_context(Live(console=console, auto_refresh=False)))
        passed_over = _ended_round(asked, path) if coming else None
        while timeout_s is None or time.monotonic() - began_s < timeout_s:
            try:
                live = asked.document(f"{path}/{number or 'current'}/status")
            except NotFound as absent:
                if number:
                    raise
                screen.waits(f"{absent.detail}; waiting for it")
            except Unavailable as away:
                screen.waits(away.detail)
            else:
                if live["round"] != passed_over:
                    number = live["round"]
                    sentence = ""
                    if live["state"] in ENDED:
                        sentence = last_word(asked, f"{path}/{number}")
                    screen.shows(live, sentence)
                    if sentence:
                        raise typer.Exit(exit_code_of(live["state"]))
                else:
                    screen.waits(f"round {passed_over} has ended; waiting for the next")
            time.sleep(every_s)
        screen.waits(f"no outcome within {timeout_s:g} s")
    raise typer.Exit(NO_VERDICT)


def _ended_round(asked: Asked, path: str) -> int | None:
    try:
        live = asked.document(f"{path}/current/status")
    except NotFound:
        return None
    return int(live["round"]) if live["state"] in ENDED else None


class Screen(Protocol):
    def waits(self, sentence: str) -> None: ...
    def shows(self, live: Mapping[str, Any], sentence: str) -> None: ...


class Picture:
    """The round as it stands, drawn over itself."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def waits(self, sentence: str) -> None:
        self._live.update(Text(clean(sentence)), refresh=True)

    def shows(self, live: Mapping[str, Any], sentence: str) -> None:
        lines = [*headed(live), *([f"verdict      {clean(sentence)}"] if sentence else [])]
        self._live.update(Group(Text("\n".join(lines)), members(live)), refresh=True)


class Lines:
    """One line for every change; as JSON one object a line."""

    def __init__(self, began_s: float, as_json: bool) -> None:
        self._began_s = began_s
        self._as_json = as_json
        self._said = ""
        self._known: dict[str, str] = {}

    def waits(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            self._line(None, sentence)

    def shows(self, live: Mapping[str, Any], sentence: str) -> None:
        self._said = ""
        for what, now in _signs(live):
            if self._known.get(what) != now:
                self._known[what] = now
                self._line(live, f"{what}{now}")
        if sentence:
            self._line(live, sentence)

    def _line(self, live: Mapping[str, Any] | None, text: str) -> None:
        at_s = round(time.monotonic() - self._began_s, 1)
        if not self._as_json:
            typer.echo(f"{at_s:8.1f} s  {clean(text)}")
            return
        fields = {key: live[key] for key in ("engine", "round", "state")} if live else {}
        typer.echo(json.dumps({"after_s": at_s, **fields, "text": text}))


def _signs(live: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What may change, each under a name of its own: the state, causes, and every member."""
    yield f"{live['engine']} round {live['round']} ", str(live["state"])
    for index, cause in enumerate(live.get("causes", ())):
        yield f"cause {index + 1}: ", cause_line(cause)
    for row in live.get("members", ()):
        did = "applied" if row["applied"] else "reported" if row["reported"] else "claimed"
        phase = f", {row['phase']}" if row.get("phase") else ""
        who = f"{named(row['ranks'])} on {row['host']} (attempt {row['attempt']}): "
        yield who, f"{row['presence']}, {did}{phase}"
    if waiting := [line["rank"] for line in live.get("missing", ())]:
        yield "waits for ", named(waiting)
