"""`kvaccord budgets` and `kvaccord history`: what is agreed, and what was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from cli.common import DEFAULT_URL as DEFAULT
from cli.common import AsJson, Asked, Engine, Url, clean, console, path_of, print_json, table
from kvaccord.decision import Decision
from kvaccord.layout import as_ranges

GIB = 2**30


def budgets(
    glob: Annotated[str, typer.Argument(metavar="[GLOB]", help="Engines, e.g. 'llama-*'.")] = "*",
    ns: Annotated[str, typer.Option("--ns", help="Namespaces, a glob.")] = "*",
    state: Annotated[str | None, typer.Option(help="Of the last round, e.g. SEALED.")] = None,
    url: Url = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """The agreed budgets: one row for every scheduler group of every engine."""
    params = {"ns": ns, "engine": glob} | ({"state": state.upper()} if state else {})
    answer = Asked(url).document("/v1/budgets", **params)
    if as_json:
        print_json(answer)
        return
    shown = table(
        "engine", "round", "state", "dp", "entries", "GiB a rank", "bound by", "spread",
        "stranded GiB", "last word",
    )  # fmt: skip
    for row in answer["budgets"]:
        name = f"{row['namespace']}/{row['engine']}"
        word = f"{row.get('code', '-')}{_blamed(row)}"
        head = [name, str(row.get("round", "-")), row["state"]]
        schedulers = row.get("agreed", {}).get("schedulers", [])
        if not schedulers:
            shown.add_row(*head, "-", "-", "-", "-", "-", "-", word)
        for index, scheduler in enumerate(schedulers):
            if index:
                head, word = ["", "", ""], ""
            shown.add_row(*head, *_cells(scheduler), word)
    console.print(shown)


def _cells(scheduler: Mapping[str, Any]) -> list[str]:
    sizes = list(scheduler["bytes_by_rank"].values())
    least, most = min(sizes, default=0) / GIB, max(sizes, default=0) / GIB
    size = f"{least:.2f}" if f"{least:.2f}" == f"{most:.2f}" else f"{least:.2f}-{most:.2f}"
    bound = [
        f"{as_ranges(by['ranks'])} {' '.join(by['hosts'])}".strip()
        for by in scheduler["binding"].values()
    ]
    return [
        str(scheduler.get("dp", scheduler.get("group", "-"))),
        _counts(scheduler["entries"]),
        size,
        clean(", ".join(bound)) or "-",
        str(scheduler["spread_entries"]),
        f"{scheduler['stranded_bytes'] / GIB:.2f}",
    ]


def _counts(entries: Mapping[str, int]) -> str:
    return " + ".join(f"{n} {name}" for name, n in sorted(entries.items()))


def _blamed(row: Mapping[str, Any]) -> str:
    blamed: Iterable[int] = row.get("blamed") or ()
    return f" ({as_ranges(blamed)})" if blamed else ""


def history(
    engine: Engine,
    limit: Annotated[int, typer.Option("--limit", min=1, help="The newest so many.")] = 20,
    url: Url = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """The rounds of an engine, newest first, each with its last word."""
    asked, path = Asked(url), f"{path_of(engine)}/rounds"
    rounds = asked.document(path)["rounds"][:limit]
    rows = [row | _ending(asked, f"{path}/{row['round']}") for row in rounds]
    if as_json:
        print_json({"rounds": rows})
        return
    shown = table("round", "state", "start", "code", "ranks", "message", "entries")
    for row in rows:
        launch = row["launch"]
        shown.add_row(
            str(row["round"]),
            row["state"],
            clean(f"{launch['run']} restart {launch['restart']}"),
            row.get("code", "-"),
            as_ranges(row.get("blamed", ())) or "-",
            clean(row.get("message", "-")),
            " | ".join(map(_counts, row.get("entries", ()))) or "-",
        )
    console.print(shown)


def _ending(asked: Asked, path: str) -> dict[str, Any]:
    """What the round's frozen documents say: the outcome's word, and the plan's counts."""
    body = asked.maybe(f"{path}/decision")
    if not body:
        return {}
    decision = Decision(body)
    last = Decision(asked.maybe(f"{path}/outcome") or body).document
    verdict = last.get("verdict", last)
    plan = decision.document.get("plan", {}).get("schedulers", ())
    return {
        "code": verdict["code"],
        "message": verdict["message"],
        "blamed": verdict["ranks"],
        "digest": decision.digest,
        "entries": [row["entries"] for row in plan],
    }
