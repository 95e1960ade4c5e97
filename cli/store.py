"""`kvaccord store`: back up the coordinator's file, and tell it that it was restored."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from coordinator.logs import StoreUnreadable, path_of
from coordinator.logs.upkeep import Summary, back_up
from coordinator.logs.upkeep import restored as give_new_id

USAGE = 1

Store = Annotated[str, typer.Option("--store", help="sqlite:///PATH (four slashes: absolute).")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document.")]

store_app = typer.Typer(no_args_is_help=True, help="Look after the coordinator's store.")


@store_app.command()
def backup(
    path: Annotated[Path, typer.Argument(help="The copy; nothing may be there yet.")],
    store: Store = "sqlite:///kvaccord.db",
    as_json: AsJson = False,
) -> None:
    """Write a consistent copy of the store to PATH, also while a coordinator serves from it."""
    copy = _tried(lambda: back_up(path_of(store), path))
    if as_json:
        typer.echo(json.dumps({"path": str(path), **asdict(copy)}))
    else:
        typer.echo(f"{path} holds {_what(copy)}; it contains the store's key: keep it private")


@store_app.command()
def restored(store: Store = "sqlite:///kvaccord.db", as_json: AsJson = False) -> None:
    """Say that the store was restored from a copy: it gets a new id.

    Processes of the time before are then told store_replaced, instead of meeting round numbers
    that were given out twice. The coordinator must not run.
    """
    kept = _tried(lambda: give_new_id(path_of(store)))
    if as_json:
        typer.echo(json.dumps({"store": store, **asdict(kept)}))
    else:
        typer.echo(f"{store} holds {_what(kept)}; start the engines that were open anew")


def _what(kept: Summary) -> str:
    return f"store {kept.store_id} with {kept.entries} entries of {kept.engines} engines"


def _tried(work: Callable[[], Summary]) -> Summary:
    try:
        return work()
    except (ValueError, StoreUnreadable) as error:
        typer.echo(f"kvaccord store: {error}", err=True)
        raise typer.Exit(USAGE) from error
