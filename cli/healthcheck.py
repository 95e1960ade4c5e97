"""`kvaccord healthcheck`: for containers, whose checks have no curl."""

from __future__ import annotations

import typer

from cli.common import DEFAULT_URL, AsJson, Asked, Url, clean, print_json
from cli.exits import USAGE
from kvaccord.errors import Problem

WITHIN_S = 3.0


def healthcheck(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Exit 0 when the coordinator is ready, 1 with the reason when it is not."""
    fault = ""
    try:
        Asked(url, within_s=WITHIN_S).get("/readyz")
    except Problem as error:
        fault = clean(error)
    said = f"{url} is not ready: {fault}" if fault else f"{url} is ready"
    if as_json:
        print_json({"url": url, "ready": not fault, "said": said})
    elif fault:
        typer.echo(f"kvaccord healthcheck: {said}", err=True)
    else:
        typer.echo(said)
    if fault:
        raise typer.Exit(USAGE)
