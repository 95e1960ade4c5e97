"""For runners that reduce (free, budget) with a collective: the same two numbers, agreed on.

    free, budget = agree_kv_budget(free, budget, [tp_group, pcp_group], rank=3, world_size=8)

stands where an all_reduce(MIN) over each of these groups stood. Whoever raises, dies or is short is
then named to all, instead of leaving them in the collective. docs/engines/dropin.md is the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from kvaccord.decision import Decision
from kvaccord.errors import Invalid
from kvaccord.layout import Groups, Layout, as_ranges
from kvaccord.messages import Report, page
from worker_client.client import Rendezvous

BYTES = "bytes"  # the page class: what is agreed on are bytes, so an entry is one


class HasRanks(Protocol):
    """A group of vLLM's or aiter's parallel_state: GroupCoordinator.ranks are global ranks."""

    @property
    def ranks(self) -> Sequence[int]: ...


Group = HasRanks | Sequence[int]
Reduction = Callable[[int, int], tuple[int, int]]


def agree_kv_budget(
    free: int,
    budget: int,
    groups: Iterable[Group],
    *,
    rank: int,
    world_size: int,
    otherwise: Reduction | None = None,
    held: Rendezvous | None = None,
    **join: Any,
) -> tuple[int, int]:
    """(free, budget) in bytes: the minimum of each over the ranks that these groups tie to ours.

    free: what is free on the device. budget: what the engine may spend on KV cache by its own
    formula; may be negative. groups: those that the engine reduced over one after the other, each
    with the global ranks that it holds, ours among them.
    otherwise: the engine's own reduction, for the modes off and observe. Without one these are
    refused in a world larger than 1, since nobody would then agree.
    held: what enter() returned, where the process joined before it loaded its weights.
    join: further arguments of Rendezvous.join.

    When it returns, every rank of the world has these numbers: that is what is sealed, not the
    pools, which nobody has built yet. Raises as Rendezvous does; then allocate nothing.
    """
    groups = tuple(groups)
    members = tied(groups, rank)
    report = Report(
        free_bytes=free,
        kv_budget_bytes=budget,
        classes=(page(BYTES, 1),),
        # Ranks that do not agree on who is tied together would not be tied at all.
        inputs_stage={"kv_budget_group": as_ranges(members)},
    )
    with held or enter(groups, rank=rank, world_size=world_size, **join) as rdzv:
        if rdzv.mode != "enforce":
            own = _reduced(free, budget, otherwise, rdzv)
            granted = {BYTES: max(0, min(own))}
            rdzv.report(report, own=granted)
            rdzv.applied(built=granted)
            return own
        agreed = rdzv.report(report)
        rdzv.applied(built=agreed.entries)
        return minima(agreed.decision, rank)


def enter(groups: Iterable[Group], *, rank: int, world_size: int, **join: Any) -> Rendezvous:
    """Join before the weights are loaded: from then on the end of this process is seen at once."""
    # No grid: a reduction says which ranks it ties together, and nothing of the others.
    name = f"r{min(tied(groups, rank))}"
    return Rendezvous.join(
        ranks=[rank],
        layout=Layout(tp=world_size),
        groups=Groups(budget=name, scheduler=name),
        **join,
    )


def tied(groups: Iterable[Group], rank: int) -> tuple[int, ...]:
    """All ranks that reductions over these groups, one after the other, tie to this one.

    TP group 4-7 and PCP group 1, 5 of rank 5: ranks 0-7. The groups of one rank are lines of a
    grid through it, so the ranks tied are all sums of its steps along them.
    """
    members = {rank}
    for group in groups:
        ranks = tuple(group if isinstance(group, Sequence) else group.ranks)
        if rank not in ranks:
            raise Invalid(
                f"rank {rank} is not in its group {list(ranks)}; give global ranks, of groups that"
                " hold this rank",
                rank=rank,
                field="groups",
            )
        members = {at + other - rank for at in members for other in ranks}
    return tuple(sorted(members))


def minima(decision: Decision, rank: int) -> tuple[int, int]:
    """(free, budget) of the budget group of a rank, as they stand in the decision."""
    for row in decision.document["plan"]["schedulers"]:
        for group in row["budget_groups"]:
            if rank in group["ranks"]:
                return group["free_bytes"], group["budget_bytes"]
    raise ValueError(f"the plan of round {decision.round} has no budget group with rank {rank}")


def _reduced(
    free: int, budget: int, otherwise: Reduction | None, rdzv: Rendezvous
) -> tuple[int, int]:
    if otherwise is not None:
        return otherwise(free, budget)
    if rdzv.layout.world_size > 1:
        raise Invalid(
            f"mode {rdzv.mode} leaves the numbers of {rdzv.layout.world_size} ranks to the engine,"
            " and agree_kv_budget has no otherwise= to reduce them with; give the engine's own"
            " reduction, or set KVACCORD_URL and KVACCORD_MODE=enforce",
            field="otherwise",
        )
    return free, budget
