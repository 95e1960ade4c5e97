"""`kvaccord plan`: what reports would be decided to be, and what if they were others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from cli.common import DEFAULT_URL as DEFAULT
from cli.common import AsJson, Url, clean, console, exit_code_of, print_json, refuse, table
from cli.exits import FAILED
from cli.picture import picture
from cli.starts import find_start
from cli.whatif import FITS, Question, changed, differences, fitted, question_of_round
from coordinator.api.plan import PlanQuestion, rows_of
from coordinator.api.plan import plan as answer_plan
from coordinator.api.problems import invalid
from kvaccord.changes import PPM
from kvaccord.errors import KvaccordError
from kvaccord.layout import as_ranges, named
from kvaccord.messages import Report

GIB = 2**30


def plan(
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="A body of POST /v1/plan, or a recorded start."),
    ] = None,
    from_round: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="ENGINE@ROUND", help="Instead of a file: what a round's ranks sent."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[rankN.]FIELD=VALUE",
            help="What if: utilization=0.85, rank3.free_bytes=-2GiB. In order; may be repeated.",
        ),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help=f"The best that passes, of {', '.join(FITS)}."),
    ] = None,
    url: Url = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Plan from a file or a round: the same planner and the same answer as POST /v1/plan.

    With --set and --fit it says what would be. Only --from asks a coordinator.
    Exit codes: 0 passed, 2 failed, 1 when it cannot be planned.
    """
    try:
        if file is not None and from_round is None:
            found = question_in(find_start(file))
        elif file is None and from_round is not None:
            found = question_of_round(url, from_round)
        else:
            raise ValueError("give a FILE or --from ENGINE@ROUND, one of the two")
        before = asked(found)
        question = changed(before, settings or [])
        best = fitted(question, fit) if fit else None
        question = best[1] if best else question
        answer = answered(question.document())
    except (ValueError, KvaccordError) as fault:
        refuse("plan", str(fault))
    if fit:
        answer["fit"] = {"name": fit, **({"value": best[0]} if best else {})}
    if as_json:
        print_json(answer)
    else:
        for line in differences(before, question):
            typer.echo(f"what if      {clean(line)}")
        if fit:
            typer.echo(f"fit          {fitted_line(fit, best[0] if best else None)}")
        show(answer)
        console.print()
        for bar in picture(question.reports, answer.get("plan")):
            console.print(bar)
    raise typer.Exit(FAILED if fit and not best else exit_code_of(answer["verdict"]["outcome"]))


def fitted_line(name: str, value: int | None) -> str:
    if value is None:
        return f"no {name} passes; see below what else is in the way"
    shown = f"{value / PPM:.6f}" if name == "utilization" else str(value)
    return f"{'least' if name == 'utilization' else 'greatest'} {name} that passes: {shown}"


def question_in(path: Path) -> dict[str, Any]:
    """The body for POST /v1/plan: as it stands, or from a recorded start. Raises ValueError."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as fault:
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


def asked(question: dict[str, Any]) -> Question:
    """The question, checked as POST /v1/plan checks it. Raises Refused."""
    try:
        body = PlanQuestion.model_validate(question)
    except ValidationError as fault:
        raise invalid(fault.errors(), question) from None
    rows, groups = rows_of(body)
    return Question(body.layout, rows, groups, body.spread_limit)


def answered(question: dict[str, Any]) -> dict[str, Any]:
    """What POST /v1/plan answers: its own route, called without a server."""
    body = PlanQuestion.model_validate(question)
    answer: dict[str, Any] = json.loads(bytes(asyncio.run(answer_plan(body)).body))
    return answer


# --- words --------------------------------------------------------------------------------------


def show(answer: Mapping[str, Any]) -> None:
    verdict = answer["verdict"]
    typer.echo(f"{verdict['outcome']} {verdict['code']}: {clean(verdict['message'])}")
    for cause in verdict["causes"]:
        who = f"rank {cause['rank']}" if "rank" in cause else "the start"
        typer.echo(f"  {cause['code']} {who}: {clean(cause['text'])}")
    for line in _lines(verdict.get("warnings")):
        typer.echo(f"  {line}")
    for line in hint_lines(answer):
        typer.echo(line)
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


def hint_lines(answer: Mapping[str, Any]) -> Iterator[str]:
    """What would pass instead, and what cannot help; `kvaccord status` shows them too."""
    for hint in answer.get("hints", ()):
        yield f"passes       {clean(hint['text'])}"
    for line in answer.get("ruled_out", ()):
        yield f"no use       {clean(line)}"


def _lines(said: Any) -> Iterator[str]:
    for line in said or ():
        yield clean(f"{line['code']}: {line['text']}")


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
