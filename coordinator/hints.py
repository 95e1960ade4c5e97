"""Hints for a round that FAILED for what its ranks reported: made on reading, kept nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from coordinator.engine import Round
from kvaccord.hints import Hints, engine_named, hints


@dataclass(frozen=True)
class _Asked:
    """A round, known by its decision: who looks twice gets what was found the first time."""

    decision: bytes
    round: Round = field(compare=False)


def round_hints(round_: Round) -> dict[str, Any]:
    """`{hints?, ruled_out?}` of a FAILED round; {} of any other.

    A round that ended before every rank had reported has none: nothing can be planned again.
    """
    if round_.ended != "FAILED" or len(round_.planned) < round_.layout.world_size:
        return {}
    return _found(_Asked(round_.decision, round_)).document()


@lru_cache(maxsize=64)
def _found(asked: _Asked) -> Hints:
    round_ = asked.round
    return hints(
        round_.layout,
        round_.planned,
        round_.groups,
        spread_limit=round_.policy.spread_limit,
        engine=next(_engines(round_), None),
    )


def _engines(round_: Round) -> Iterator[str]:
    for member in round_.seated:
        if found := engine_named(member.join.engine_version):
            yield found
