"""How the ranks of an engine are arranged, and the groups that follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, Strict, StringConstraints, model_validator

from kvaccord.faulty import Message, impossible

MAX_WORLD = 1024

Axis = Annotated[int, Strict(), Field(ge=1, le=MAX_WORLD)]
GroupName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,64}$")]
GroupLists = dict[str, list[list[int]]]


class Coordinates(NamedTuple):
    dp: int
    pp: int
    pcp: int
    tp: int


class Groups(Message):
    """The groups of one rank by name, where they are no grid; the layout then numbers the ranks.

    A budget group lies within one scheduler group.
    Source: SGLang `dp_attention.py`: attention DP lies inside TP, which lies inside PP.
    """

    budget: GroupName
    scheduler: GroupName


@dataclass(frozen=True)
class BudgetGroup:
    """Ranks whose memory minimum is published together. at: their pp, or their group's name."""

    at: int | str
    ranks: Sequence[int]


@dataclass(frozen=True)
class SchedulerGroup:
    """Ranks whose pools one scheduler indexes. at: their dp, or their group's name."""

    at: int | str
    ranks: Sequence[int]
    budget_groups: tuple[BudgetGroup, ...]


class Layout(Message):
    """Sizes of the axes. Rank = ((dp * PP + pp) * PCP + pcp) * TP + tp: tp varies fastest.

    equal_over=("dp",) makes the entry counts equal over all data-parallel replicas.
    Source: vLLM `parallel_state.initialize_model_parallel`, which reshapes
    arange(world) to (DP, PP, PCP, TP).
    """

    dp: Axis = 1
    pp: Axis = 1
    pcp: Axis = 1
    tp: Axis = 1
    equal_over: Annotated[tuple[Literal["dp"], ...], Field(max_length=1, fail_fast=True)] = ()

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

    def groups_along(self, *axes: str) -> list[list[int]]:
        """The groups of ranks that differ on these axes alone, by lowest rank."""
        assert set(axes) <= set(Coordinates._fields), axes
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            elsewhere = tuple(n for axis, n in zip(at._fields, at, strict=True) if axis not in axes)
            found.setdefault(elsewhere, []).append(rank)
        return list(found.values())

    def group_lists(self, *, dcp: int = 1) -> GroupLists:
        """Every group list that vLLM and ATOM build, under their names, each by lowest rank.

        dcp: decode context parallel, a part of a TP group; no axis of its own.
        Source: vLLM `parallel_state.initialize_model_parallel`; aiter's is the same.
        """
        if dcp < 1 or self.tp % dcp:
            raise ValueError(f"dcp {dcp} does not divide tp {self.tp}")
        world = range(self.world_size)
        return {
            "tp": self.groups_along("tp"),
            "pcp": self.groups_along("pcp"),
            "pp": self.groups_along("pp"),
            "dp": self.groups_along("dp"),
            "ep": self.groups_along("dp", "pcp", "tp"),
            "dcp": [list(world[at : at + dcp]) for at in range(0, len(world), dcp)],
            "scheduler_group": self.groups_along("pp", "pcp", "tp"),
            "budget_group": self.groups_along("pcp", "tp"),
        }

    def sglang_group_lists(self) -> GroupLists:
        """SGLang's group lists, with attention DP as `dp`, attention CP as `pcp`, and as `tp` the
        attention TP.

        Raises ValueError for attention DP together with PP: there PP varies slower than DP, which
        is no grid of ours; let each rank name its `Groups`.
        Source: SGLang `parallel_state.py` and `dp_attention.py`.
        """
        if self.dp > 1 and self.pp > 1:
            raise ValueError("attention DP inside PP is no grid; name the groups of each rank")
        return {
            "tp": self.groups_along("dp", "pcp", "tp"),
            "pp": self.groups_along("pp"),
            "attn_tp": self.groups_along("tp"),
            "attn_cp": self.groups_along("pcp"),
        }


def scheduler_groups(
    layout: Layout, groups: Mapping[int, Groups] | None = None
) -> tuple[SchedulerGroup, ...]:
    """All scheduler groups with their budget groups: of the grid, or as the ranks name them.

    Named groups come by their lowest rank. Every rank has a name, or none has.
    """
    if not groups:
        return tuple(
            SchedulerGroup(
                dp,
                layout.scheduler_group(dp),
                tuple(BudgetGroup(pp, layout.budget_group(dp, pp)) for pp in range(layout.pp)),
            )
            for dp in range(layout.dp)
        )
    members: dict[str, dict[str, list[int]]] = {}
    for rank in range(layout.world_size):
        name = groups[rank]
        members.setdefault(name.scheduler, {}).setdefault(name.budget, []).append(rank)
    return tuple(
        SchedulerGroup(
            scheduler,
            sorted(rank for ranks in budget.values() for rank in ranks),
            tuple(BudgetGroup(name, ranks) for name, ranks in budget.items()),
        )
        for scheduler, budget in members.items()
    )


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
