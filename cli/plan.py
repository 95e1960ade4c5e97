"""`kvaccord plan`: what reports would be decided to be, without a coordinator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from cli.common import AsJson, clean, console, exit_code_of, print_json, refuse, table
from cli.starts import find_start
from coordinator.api.plan import PlanQuestion
from coordinator.api.plan import plan as answer_plan
from coordinator.api.problems import invalid
from kvaccord.errors import Refused
from kvaccord.layout import as_ranges, named
from kvaccord.messages import Report

GIB = 2**30


def plan(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A body of POST /v1/plan, or a recorded start.")
    ],
    as_json: AsJson = False,
) -> None:
    """Plan from a file: the same planner and the same answer as POST /v1/plan, no coordinator.

    Exit codes: 0 passed, 2 failed, 1 when the file cannot be planned.
    """
    try:
        answer = answered(question_in(find_start(file)))
    except (ValueError, Refused) as fault:
        refuse("plan", str(fault))
    if as_json:
        print_json(answer)
    else:
        show(answer)
    raise typer.Exit(exit_code_of(answer["verdict"]["outcome"]))


def question_in(path: Path) -> dict[str, Any]:
    """The body for POST /v1/plan: as it stands, or from a recorded start. Raises ValueError."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as fault:
        raise ValueError(f"{path}: {fault}; it must be a JSON file") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: a JSON object is expected, with layout and reports or ranks")
    if "ranks" not in document:
        return document
    ranks = document["ranks"]
    if not isinstance(ranks, list) or not all(isinstance(row, dict) for row in ranks):
        raise ValueError(f"{path}: ranks is expected to be an array of objects, one a rank")
    shared = {key: document[key] for key in Report.model_fields if key in document}
    rows = [{**shared, **row, "rank": rank} for rank, row in enumerate(ranks)]
    return {"layout": document.get("layout", {}), "reports": rows}


def answered(question: dict[str, Any]) -> dict[str, Any]:
    """What POST /v1/plan answers: its own route, called without a server. Raises Refused."""
    try:
        body = PlanQuestion.model_validate(question)
    except ValidationError as fault:
        raise invalid(fault.errors(), question) from None
    answer: dict[str, Any] = json.loads(bytes(asyncio.run(answer_plan(body)).body))
    return answer


# --- words --------------------------------------------------------------------------------------


def show(answer: Mapping[str, Any]) -> None:
    verdict = answer["verdict"]
    typer.echo(f"{verdict['outcome']} {verdict['code']}: {clean(verdict['message'])}")
    for cause in verdict["causes"]:
        who = f"rank {cause['rank']}" if "rank" in cause else "the start"
        typer.echo(f"  {cause['code']} {who}: {clean(cause['text'])}")
    for line in (*_lines(verdict.get("warnings")), *_lines(answer.get("hints"))):
        typer.echo(f"  {line}")
    for row in answer.get("plan", {}).get("schedulers", ()):
        console.print()
        where = f"dp {row['dp']}" if "dp" in row else f"group {row.get('group')}"
        console.print(f"scheduler {where}, {named(row['ranks'])}")
        for name, entries in sorted(row["entries"].items()):
            binding = row["binding"].get(name)
            bound = f", bound by {named(binding['ranks'])}" if binding else ""
            console.print(f"  {entries} {name} entries{bound}")
        console.print(_groups(row))
        console.print(_shares(row, answer["plan"]["shapes"]))
    for name, capacity in answer.get("plan", {}).get("capacities", {}).items():
        console.print(f"capacity {name}: {capacity}")


def _lines(said: Any) -> Iterator[str]:
    """Warnings and hints, each in a line: {code, text, …} or plain text."""
    for line in said or ():
        if isinstance(line, Mapping):
            yield clean(": ".join(str(line[k]) for k in ("code", "text", "message") if k in line))
        else:
            yield clean(line)


def _groups(row: Mapping[str, Any]) -> Table:
    shown = table(
        "budget group", "ranks", "free GiB", "budget GiB", "available GiB", "binding rank", "by"
    )
    for group in row["budget_groups"]:
        shown.add_row(
            f"pp {group['pp']}" if "pp" in group else str(group.get("group")),
            as_ranges(group["ranks"]),
            *(f"{group[f'{what}_bytes'] / GIB:.2f}" for what in ("free", "budget", "available")),
            str(group["binding_rank"]),
            group["bound_by"],
        )
    return shown


def _shares(row: Mapping[str, Any], shapes: Iterable[Mapping[str, Any]]) -> Table:
    shown = table("rank", "bytes an entry", "reserved GiB", "stranded GiB")
    entry_bytes = {rank: shape["entry_bytes"] for shape in shapes for rank in shape["ranks"]}
    for share in row["by_rank"]:
        each = entry_bytes[share["rank"]]
        shown.add_row(
            str(share["rank"]),
            ", ".join(f"{name} {n}" for name, n in sorted(each.items())),
            f"{sum(row['entries'][name] * n for name, n in each.items()) / GIB:.2f}",
            f"{share['stranded_bytes'] / GIB:.2f}",
        )
    return shown
