"""The shipped rules, perhaps with a mistake.

`decide` and `evolve` are loaded from coordinator/round.py, coordinator/rules/ and
coordinator/engine.py, and every step of the search runs them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import coordinator.compaction
import coordinator.engine
import coordinator.round
from coordinator.events import EngineName

ROOT = Path(__file__).parents[2]
# The rules, each after those that it imports.
FILES = (
    "engine.py",
    "compaction.py",
    "verdict.py",
    *(f"rules/{name}.py" for name in ("settling", "members", "joining")),
    *(f"rules/{name}.py" for name in ("claiming", "calls", "orders", "findings")),
    "round.py",
)


class Edit(NamedTuple):
    """In this function of this file, `old` becomes `new`; both as `ast.unparse` spells them."""

    file: str
    function: str
    old: str
    new: str


class Moved(Exception):
    """The guard that an edit removes is not where it was: point the edit to its new place."""


class Rules:
    """decide and evolve of the shipped files, perhaps edited."""

    def __init__(self, edits: Sequence[Edit] = ()) -> None:
        engine: ModuleType = coordinator.engine
        rules: ModuleType = coordinator.round
        kept: ModuleType = coordinator.compaction
        if edits:
            assert {edit.file for edit in edits} <= {*FILES}, "an edit of a file that is not loaded"
            edited: dict[str, ModuleType] = {}
            for file in FILES:
                module = _edited(file, edits, edited)
                edited[module.__name__] = module
            engine, rules = edited["coordinator.engine"], edited["coordinator.round"]
            kept = edited["coordinator.compaction"]
        self.engine, self.round, self.compaction = engine, rules, kept.compaction

    def empty(self) -> Any:
        return self.engine.Engine(EngineName("default", "llama"), "store-1")

    def decide(self, engine: Any, command: Any) -> tuple[Any, ...]:
        return self.round.decide(engine, command)

    def evolve(self, engine: Any, events: tuple[Any, ...]) -> Any:
        return self.engine.evolve_entry(engine, events)


def _edited(file: str, edits: Sequence[Edit], instead: dict[str, ModuleType]) -> ModuleType:
    path = ROOT / "coordinator" / file
    tree = ast.parse(path.read_text())
    for edit in (e for e in edits if e.file == file):
        found = [
            (body, index)
            for node in ast.walk(tree)
            if isinstance(body := getattr(node, "body", None), list)
            for index, item in enumerate(body)
            if isinstance(item, ast.FunctionDef) and item.name == edit.function
        ]
        if len(found) != 1:
            raise Moved(f"{file} has {len(found)} functions {edit.function}")
        body, index = found[0]
        text = ast.unparse(body[index])
        if text.count(edit.old) != 1:
            raise Moved(f"{file} {edit.function}: {text.count(edit.old)} times {edit.old!r}")
        body[index] = ast.parse(text.replace(edit.old, edit.new)).body[0]
    module = ModuleType(f"coordinator.{file.removesuffix('.py').replace('/', '.')}")
    module.__file__ = str(path)
    # Its own types are looked up by its name: a snapshot must be one of the edited rounds.
    instead = {**instead, module.__name__: module}
    saved = {name: sys.modules[name] for name in instead}
    sys.modules.update(instead)
    try:
        exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), module.__dict__)
    finally:
        sys.modules.update(saved)
    return module
