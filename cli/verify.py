"""`kvaccord verify`: whether a decision is true, by arithmetic of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.common import AsJson, clean, print_json, refuse
from cli.exits import FAILED, NO_VERDICT, PASSED
from verifier import Checked
from verifier import verify as checked_by

EXIT_OF = {True: PASSED, False: FAILED, None: NO_VERDICT}
SHOWN_LIES = 40


def verify(
    document: Annotated[
        Path, typer.Argument(metavar="DECISION", help="A decision or outcome, its bytes as served.")
    ],
    beside: Annotated[
        Path | None,
        typer.Argument(
            metavar="[REPORTS]",
            help="For a decision: GET …/reports, a plan question or {rank: report}. For an outcome:"
            " its decision.",
        ),
    ] = None,
    digest: Annotated[
        str | None, typer.Option(metavar="sha256:HEX", help="What it is known by elsewhere.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a decision is true: bytes, digests, minima, counts, binding ranks.

    An independent check, without the planner: everything is computed anew from the reports.
    Exit codes: 0 true, 2 false, 3 inconclusive without its reports, 1 usage.
    """
    try:
        body, other = document.read_bytes(), beside.read_bytes() if beside else None
        found = checked_by(body, _beside(body, other), digest=digest)
    except (OSError, ValueError) as fault:
        refuse("verify", f"{fault}; name a file of the decision, and one of its reports")
    if as_json:
        print_json(
            {
                "true": found.true,
                "digest": found.digest,
                "lies": [vars(lie) for lie in found.lies],
                "open": found.open,
            }
        )
    else:
        show(found)
    raise typer.Exit(EXIT_OF[found.true])


def _beside(body: bytes, other: bytes | None) -> Any:
    """What stands beside a document: reports beside a decision, a decision beside an outcome."""
    if other is None:
        return None
    try:
        said = json.loads(other)
    except ValueError as fault:
        raise ValueError(f"the second file is no JSON: {fault}") from None
    if not isinstance(said, dict):
        raise ValueError("the second file is no JSON object")
    return {"decision": other} if "verdict" in said and b'"decision_digest"' in body else said


def show(found: Checked) -> None:
    word = {True: "true", False: "false", None: "inconclusive"}[found.true]
    typer.echo(f"{word} {found.digest}")
    for lie in found.lies[:SHOWN_LIES]:
        typer.echo(f"  {clean(lie)}")
    if more := found.lies[SHOWN_LIES:]:
        typer.echo(f"  and {len(more)} more")
    for line in found.open:
        typer.echo(f"  open: {clean(line)}")
