"""A guard, and the edits that remove it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.model.rules import Edit
from tests.simulation.world import World


@dataclass(frozen=True)
class Guard:
    """keeps: the sentence of what it guards. spared: why the simulation need not notice.

    where: the worlds in which it may, if they can be told beforehand.
    """

    keeps: str
    edits: tuple[Edit, ...]
    spared: str = ""
    where: Callable[[World], bool] = lambda _: True


def hangs(world: World) -> bool:
    return world.waits and world.mode != "calm"


def hangs_behind_a_proxy(world: World) -> bool:
    return hangs(world) and world.net.signed


def one(
    file: str,
    function: str,
    old: str,
    new: str,
    keeps: str,
    spared: str = "",
    where: Callable[[World], bool] = lambda _: True,
) -> Guard:
    """By one edit. function: as Class.name where the file has several of the name."""
    return Guard(keeps, (Edit(file, function, old, new),), spared, where)
