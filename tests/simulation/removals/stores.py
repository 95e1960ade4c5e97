"""Guards of the stores."""

from __future__ import annotations

from functools import partial

from tests.simulation.removals.guard import Guard, one

memory, sqlite, logs = (
    partial(one, f"coordinator/logs/{name}.py") for name in ("memory", "sqlite", "__init__")
)

GUARDS: dict[str, Guard] = {
    "the number of an append is not compared": memory(
        "append", "following != n", "False", "the number fences off a second coordinator"
    ),
    "the number of an append is not compared in SQLite": sqlite(
        "_is_next",
        "bool(held == append.n)",
        "True",
        "the number fences off what was decided on an older state",
        spared="a second line: the primary key has the last word",
    ),
    "a drop takes the last entry": memory(
        "drop",
        "min(below - first, len(held) - 1)",
        "len(held)",
        "numbers go on where they were",
    ),
    "elapsed time goes back": logs(
        "further",
        "max(one, other or one, key=lambda e: (e[0], PHASES.find(e[1]), e[2]))",
        "one",
        "of what two coordinators count the furthest is kept",
        spared="two coordinators count, and with two at once L1 is not judged (issue H)",
    ),
}
