"""Every guard removed in turn: what the simulation does not notice nobody needs, or nobody checks.

A guard is a condition, or an order of two steps, without which a promise of docs/protocol.md
breaks. Its removal is an edit of the shipped function, made in this process for as long as one
search lasts. `python -m tests.simulation --guards` goes through all of them.
"""

from __future__ import annotations

import ast
import importlib
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain, count
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from tests.model.rules import ROOT, Moved
from tests.simulation.checkers import check
from tests.simulation.removals import GUARDS
from tests.simulation.removals.guard import Guard
from tests.simulation.world import World, run

SEEDS = Path(__file__).with_suffix(".json")  # by name: the first seed that was found to catch it
WITHIN_S = 60.0  # of one core, for one guard
WORLD_S = 20.0  # a world that takes longer has been broken


# --- planting -------------------------------------------------------------------------------------


@contextmanager
def removed(guard: Guard) -> Iterator[None]:
    """The shipped functions without this guard. Raises Moved when it is not found."""
    texts: dict[tuple[str, str], str] = {}
    for edit in guard.edits:
        place = (edit.file, _qualified(edit.file, edit.function))
        text = texts.get(place) or _source(*place)
        if text.count(edit.old) != 1:
            where = f"{edit.file} {edit.function}"
            raise Moved(f"{where}: {text.count(edit.old)} times {edit.old!r} in\n{text}")
        texts[place] = text.replace(edit.old, edit.new)
    # The code is exchanged, not the function: whoever has imported it gets the edited one.
    functions = {place: _function(*place) for place in texts}
    codes = {place: function.__code__ for place, function in functions.items()}
    try:
        for place, text in texts.items():
            functions[place].__code__ = _compiled(place, text, codes[place])
        yield
    finally:
        for place, function in functions.items():
            function.__code__ = codes[place]


@cache
def _sources(file: str) -> dict[str, str]:
    """Every function of a file without its decorators, by its qualified name."""
    found: dict[str, str] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + node.name
                node.decorator_list = []
                found[name] = ast.unparse(node)

    walk(ast.parse((ROOT / file).read_text()).body, "")
    return found


def _source(file: str, name: str) -> str:
    return _sources(file)[name]


def _qualified(file: str, name: str) -> str:
    names = [n for n in _sources(file) if n == name or n.endswith(f".{name}")]
    if len(names) != 1:
        raise Moved(f"{file} has {len(names)} functions {name}")
    return names[0]


def _function(file: str, name: str) -> FunctionType:
    dotted = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    place: Any = importlib.import_module(dotted)
    for part in name.split("."):
        place = vars(place)[part]
    if isinstance(place, property):
        place = place.fget
    assert isinstance(place, FunctionType), f"{file} {name} is a {type(place).__name__}"
    return place


def _compiled(place: tuple[str, str], text: str, shipped: CodeType) -> CodeType:
    module = compile(f"from __future__ import annotations\n{text}", f"{place[0]}, edited", "exec")
    name = place[1].rpartition(".")[2]
    codes = [c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == name]
    (code,) = codes
    assert code.co_freevars == shipped.co_freevars, f"{place}: it must be a closure of the same"
    return code


# --- searching ------------------------------------------------------------------------------------


class TooLong(KeyboardInterrupt):
    """Of all exceptions this kind alone gets out of an event loop."""


@dataclass(frozen=True)
class Caught:
    """by: the promises that the history of this seed breaks. seconds: of one core, in all."""

    seed: int
    by: tuple[str, ...]
    why: str
    seconds: float


def broken(seed: int) -> dict[str, str]:
    """What the history of a seed breaks, and why."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, WORLD_S)
    try:
        verdicts = check(run(seed))
    except TooLong:
        return {"endless": f"the world did not end within {WORLD_S:g} s of one core"}
    except Exception as fault:  # whatever the removal broke
        return {"sound": f"{type(fault).__name__}: {fault}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return {v.name: v.breaches[0][0] for v in verdicts if v.breaches}


def search(name: str, *, within_s: float = WITHIN_S, first: int = 0) -> Caught | None:
    """The seed that is known to catch a removal, else the first one that does, from `first` on.

    Counts only seeds whose worlds keep every promise with the guard in its place.
    """
    began_s = time.process_time()
    known = known_seeds().get(name)
    for seed in chain([known] if known is not None else [], count(first)):
        if time.process_time() - began_s > within_s:
            return None
        if not _fits(GUARDS[name], seed):
            continue
        with removed(GUARDS[name]):
            found = broken(seed)
        if found and not broken(seed):
            seconds = time.process_time() - began_s
            return Caught(seed, tuple(found), next(iter(found.values())), seconds)
    raise AssertionError("count() has no end")


def _fits(guard: Guard, seed: int) -> bool:
    world = World(str(seed))
    world.loop.close()
    return guard.where(world)


def known_seeds() -> dict[str, int]:
    return json.loads(SEEDS.read_text()) if SEEDS.exists() else {}  # type: ignore[no-any-return]


def guards(names: list[str], *, within_s: float = WITHIN_S, first: int = 0) -> int:
    """Print the table of these guards, or of all; keep the seeds. 0: each is caught or spared."""
    seeds, missed, began_s = known_seeds(), [], time.process_time()
    for name in names or GUARDS:
        guard = GUARDS[name]
        if guard.spared and not names:
            print(f"{name}: spared, {guard.spared}", flush=True)
            continue
        began = time.process_time()
        caught = search(name, within_s=within_s, first=first)
        if caught is None:
            missed.append(name)
            seeds.pop(name, None)
            print(f"{name}: NOT CAUGHT in {time.process_time() - began:.0f} s", flush=True)
        else:
            seeds[name] = caught.seed
            print(
                f"{name}: {', '.join(caught.by)}, seed {caught.seed}, {caught.seconds:.1f} s:"
                f" {caught.why}",
                flush=True,
            )
        SEEDS.write_text(json.dumps(seeds, indent=1) + "\n")
    print(f"\n{len(names or GUARDS)} guards, {time.process_time() - began_s:.0f} s of one core")
    if missed:
        print(f"not caught: {'; '.join(missed)}")
    return 1 if missed else 0
