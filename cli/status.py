"""`kvaccord status`: one round as it stands now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import typer
from rich.table import Table

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
    print_json,
    table,
)
from cli.plan import hint_lines
from kvaccord.decision import Decision, Outcome
from kvaccord.layout import as_ranges, named


def status(
    engine: Engine, number: RoundNumber = None, url: Url = DEFAULT, as_json: AsJson = False
) -> None:
    """Show a round: its state, who is there, whom it waits for, and its verdict.

    Exit codes: 0 passed or sealed, 2 failed or aborted, 3 no verdict yet, 1 errors.
    """
    asked = Asked(url)
    path = f"{path_of(engine)}/rounds/{number or 'current'}"
    live = asked.document(f"{path}/status")
    # The round may end, and `current` move on, between two questions.
    path = f"{path_of(engine)}/rounds/{live['round']}"
    if as_json:
        documents = {"decision": asked.maybe(f"{path}/decision")}
        documents["outcome"] = asked.maybe(f"{path}/outcome")
        frozen = {name: Decision(body).document for name, body in documents.items() if body}
        print_json({"status": live, **frozen})
    else:
        for line in headed(live):
            typer.echo(line)
        if sentence := last_word(asked, path):
            typer.echo(f"verdict      {clean(sentence)}")
        for line in hint_lines(live):
            typer.echo(line)
        console.print(members(live))
    raise typer.Exit(exit_code_of(live["state"]))


def last_word(asked: Asked, path: str) -> str:
    """The sentence of what the round last decided; empty while it is undecided.

    An outcome of a FAILED round is its decision: both have `verdict` inside.
    """
    body = asked.maybe(f"{path}/outcome") or asked.maybe(f"{path}/decision")
    if not body:
        return ""
    return (Decision(body) if "verdict" in Decision(body).document else Outcome(body)).sentence


def headed(live: Mapping[str, Any]) -> Iterator[str]:
    """What the round is, line by line."""
    launch, layout = live["launch"], live["layout"]
    axes = " ".join(f"{axis}{layout[axis]}" for axis in ("dp", "pp", "pcp", "tp") if axis in layout)
    yield f"engine       {live['engine']} round {live['round']} {live['state']}"
    yield f"start        {clean(launch['run'])} restart {launch['restart']}, {axes}"
    if waiting := live.get("missing"):
        ranks = named([line["rank"] for line in waiting])
        left_s = live.get("remaining_s")
        left = "" if left_s is None else f", {left_s:.0f} s are left"
        yield f"waits for    {ranks}{left}"
    for cause in live.get("causes", ()):
        yield f"cause        {clean(cause_line(cause))}"
    if faults := live.get("faults"):
        yield f"faults       {', '.join(clean(f['id']) for f in faults)}"


def cause_line(cause: Mapping[str, Any]) -> str:
    """ "rank_lost rank 3: its text"."""
    ranks = cause.get("ranks") or ([cause["rank"]] if "rank" in cause else [])
    return f"{cause['code']}{' ' + named(ranks) if ranks else ''}: {cause['text']}"


def members(live: Mapping[str, Any]) -> Table:
    """One row a process; signs such as a phase are shown where the coordinator has them."""
    rows = live.get("members", ())
    signs = [sign for sign in ("phase", "progress") if any(sign in row for row in rows)]
    shown = table("ranks", "host", "pid", "presence", *signs, "reported", "applied")
    for row in rows:
        shown.add_row(
            as_ranges(row["ranks"]),
            clean(row["host"]),
            str(row["pid"]),
            row["presence"],
            *(clean(row.get(sign, "-")) for sign in signs),
            "yes" if row["reported"] else "no",
            "yes" if row["applied"] else "no",
        )
    return shown
