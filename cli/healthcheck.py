"""`kvaccord healthcheck`: for containers, whose checks have no curl."""

from __future__ import annotations

from typing import Annotated

import httpx
import typer

from cli.serve import PORT


def healthcheck(
    url: Annotated[str, typer.Option(envvar="KVACCORD_URL", help="The coordinator's address.")] = (
        f"http://127.0.0.1:{PORT}"
    ),
) -> None:
    """Exit 0 when the coordinator is ready, 1 with the reason when it is not."""
    try:
        answer = httpx.get(f"{url}/readyz", timeout=3.0, trust_env=False)
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        typer.echo(f"kvaccord healthcheck: {url} is not ready: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{url} is ready")
