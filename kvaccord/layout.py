"""How the ranks of an engine are arranged, and the groups that follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from kvaccord.faulty import impossible

MAX_WORLD = 1024

Axis = Annotated[int, Strict(), Field(ge=1, le=MAX_WORLD)]


class Coordinates(NamedTuple):
    dp: int
    pp: int
    pcp: int
    tp: int


class Layout(BaseModel):
    """Sizes of the axes. Rank = ((dp * PP + pp) * PCP + pcp) * TP + tp: tp varies fastest.

    equal_over=("dp",) makes the entry counts equal over all data-parallel replicas.
    Source: vLLM `parallel_state.initialize_model_parallel`, which reshapes
    arange(world) to (DP, PP, PCP, TP).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dp: Axis = 1
    pp: Axis = 1
    pcp: Axis = 1
    tp: Axis = 1
    equal_over: tuple[Literal["dp"], ...] = Field(default=(), max_length=1)

    @model_validator(mode="after")
    def _world_is_bounded(self) -> Layout:
        if self.world_size > MAX_WORLD:
            raise impossible(
                "layout",
                self.world_size,
                f"a world of {self.world_size} ranks is larger than the {MAX_WORLD} that one"
                " engine may have; start independent replicas as engines of their own",
            )
        return self

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.pcp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands on each axis."""
        rest, tp = divmod(rank, self.tp)
        rest, pcp = divmod(rest, self.pcp)
        dp, pp = divmod(rest, self.pp)
        return Coordinates(dp, pp, pcp, tp)

    def scheduler_group(self, dp: int) -> range:
        """The ranks whose pools one scheduler indexes: same dp, any pp, pcp and tp."""
        size = self.pp * self.pcp * self.tp
        return range(dp * size, (dp + 1) * size)

    def budget_group(self, dp: int, pp: int) -> range:
        """The ranks whose memory minimum is published together: same dp and pp, any pcp and tp."""
        size = self.pcp * self.tp
        start = (dp * self.pp + pp) * size
        return range(start, start + size)


def as_ranges(ranks: Iterable[int]) -> str:
    """Ranks for people: [0, 1, 2, 5] is "0-2, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def named(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0-2, 5"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {as_ranges(ranks)}"
