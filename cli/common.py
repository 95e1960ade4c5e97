"""What the commands share: options, one way to ask a coordinator, tables, and complaints."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any, NoReturn

import httpx
import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from cli.exits import FAILED, NO_VERDICT, PASSED, USAGE
from cli.serve import PORT
from kvaccord.errors import Invalid, NotFound, Unavailable, problem_from
from kvaccord.messages import EngineWord
from worker_client.flow import Call
from worker_client.wire import Wire

DEFAULT_URL = f"http://127.0.0.1:{PORT}"
TIMEOUT_S = 10.0  # a whole answer is there by then, however it trickles in
ANSWER_MAX_BYTES = 64 * 2**20  # the reports of 1,024 ranks with their traces are far less
PIPE_COLUMNS = 200  # where nobody said how wide the reader is

Url = Annotated[
    str, typer.Option("--url", envvar="KVACCORD_URL", help="The coordinator's address.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
Engine = Annotated[str, typer.Argument(metavar="ENGINE", help="NAMESPACE/ENGINE, or ENGINE.")]
RoundNumber = Annotated[int | None, typer.Option("--round", min=1, help="Default: the last one.")]

OF_STATE = {"PASSED": PASSED, "SEALED": PASSED, "FAILED": FAILED, "ABORTED": FAILED}


def _console(*, stderr: bool) -> Console:
    # markup off: what engines call themselves, and what they raised, is text and nothing else.
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=width)


console = _console(stderr=False)
complain = _console(stderr=True)


def exit_code_of(state: str) -> int:
    """0 PASSED or SEALED, 2 FAILED or ABORTED, 3 while there is no verdict."""
    return OF_STATE.get(state, NO_VERDICT)


def refuse(command: str, sentence: str) -> NoReturn:
    """End with one sentence on standard error."""
    typer.echo(f"kvaccord {command}: {clean(sentence)}", err=True)
    raise typer.Exit(USAGE)


def table(*columns: str) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        shown.add_column(column, overflow="fold")
    return shown


def clean(text: object) -> str:
    """Text from elsewhere, for a terminal: no control character gets through."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in str(text))


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))


def path_of(engine: str) -> str:
    """`/v1/engines/NAMESPACE/ENGINE`; Invalid when it is no name."""
    namespace, slash, name = engine.rpartition("/")
    if not slash:
        namespace = os.environ.get("KVACCORD_NAMESPACE") or "default"
    for word in (namespace, name):
        try:
            TypeAdapter[str](EngineWord).validate_python(word)
        except ValidationError:
            raise Invalid(
                f"{engine!r} names no engine; give it as ENGINE or NAMESPACE/ENGINE, each of"
                " letters, digits and . _ -"
            ) from None
    return f"/v1/engines/{namespace}/{name}"


class Asked:
    """A coordinator that is asked, never told: GETs with one sentence for whatever goes wrong."""

    def __init__(self, url: str, *, within_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        self.within_s = within_s
        try:
            address = httpx.URL(self.url)
            if address.scheme not in ("http", "https") or not address.host:
                raise httpx.InvalidURL("it has no http:// or https:// and host")
        except httpx.InvalidURL as fault:
            raise Invalid(
                f"the address {url!r}: {fault}; give --url or KVACCORD_URL as http://HOST:PORT"
            ) from None
        self._wire = Wire(self.url, answer_max_bytes=ANSWER_MAX_BYTES)

    def get(self, path: str, **params: str | int | float) -> httpx.Response:
        """The answer with status 200; else a Problem, Unavailable when nobody answers."""
        target = str(httpx.URL(path, params=params)) if params else path
        heard = self._wire.call(Call("GET", target, timeout_s=self.within_s))
        try:
            if heard.error is not None:
                raise httpx.ReadError(heard.error)
            answer = httpx.Response(heard.status, headers=dict(heard.headers), content=heard.body)
        except httpx.HTTPError as fault:
            raise Unavailable(
                f"{self.url} does not answer ({fault}); see whether"
                " `kvaccord serve` runs there, and name it with --url or KVACCORD_URL"
            ) from None
        if answer.is_success:
            return answer
        raise problem_from(self._document(answer), status=answer.status_code)

    def document(self, path: str, **params: str | int | float) -> dict[str, Any]:
        return self._document(self.get(path, **params))

    def _document(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            document = answer.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise Unavailable(
                f"{self.url} answered {answer.status_code} and no JSON object; is it a kvaccord"
                " coordinator? Name one with --url or KVACCORD_URL"
            )
        return document

    def maybe(self, path: str) -> bytes | None:
        """A frozen document's bytes; None while there is none."""
        try:
            return self.get(path).content
        except NotFound:
            return None
