"""The reduction that becomes one line, against a real coordinator."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from kvaccord.errors import Failed, Invalid
from worker_client.engines.dropin import agree_kv_budget, enter, tied
from worker_client.testing import scripted

GIB = 2**30


@dataclass(frozen=True)
class Coordinated:
    """What vLLM and aiter call a GroupCoordinator, as far as it is read."""

    ranks: list[int]


def groups_of(rank: int, *, tp: int, world: int) -> list[Coordinated]:
    """TP and PCP groups of a rank, with TP varying fastest."""
    first = rank - rank % tp
    return [
        Coordinated(list(range(first, first + tp))),
        Coordinated(list(range(rank % tp, world, tp))),
    ]


def on_each(world: int, url: str, numbers: Any, *, tp: int, raising: int = -1) -> list[Any]:
    """What every rank's runner gets, each in a thread of its own."""
    name, launch = f"dropin-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex

    def runner(rank: int) -> Any:
        free, budget = numbers[rank]
        said = {"url": url, "engine": name, "launch": launch, "patience_s": 20.0}
        groups = groups_of(rank, tp=tp, world=world)
        held = enter(groups, rank=rank, world_size=world, **said)
        try:
            if rank == raising:
                with held:
                    raise RuntimeError("no weights here")
            return agree_kv_budget(free, budget, groups, rank=rank, world_size=world, held=held)
        except Exception as fault:
            return fault

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(runner, range(world)))


def test_every_rank_gets_the_least_of_each_number_over_tp_and_pcp(url):
    # As in an all_reduce(MIN) of both: the two need not come from one rank.
    numbers = [(160 * GIB + rank, 124 * GIB - rank) for rank in range(4)]
    heard = on_each(4, url, numbers, tp=2)
    assert heard == [(160 * GIB, 124 * GIB - 3)] * 4


def test_groups_that_are_not_tied_keep_their_own_numbers(url):
    name, launch = f"dropin-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    numbers = [(9 * GIB, 5 * GIB), (8 * GIB, 6 * GIB), (3 * GIB, 2 * GIB), (4 * GIB, 1 * GIB)]
    stages = [[0, 1], [2, 3]]

    def runner(rank: int) -> tuple[int, int]:
        return agree_kv_budget(
            *numbers[rank],
            [stages[rank // 2]],
            rank=rank,
            world_size=4,
            url=url,
            engine=name,
            launch=launch,
        )

    with ThreadPoolExecutor(4) as pool:
        heard = list(pool.map(runner, range(4)))
    assert heard == [(8 * GIB, 5 * GIB)] * 2 + [(3 * GIB, 1 * GIB)] * 2


def test_a_budget_below_zero_fails_all_and_names_its_rank(url):
    heard = on_each(2, url, [(9 * GIB, 5 * GIB), (9 * GIB, -GIB)], tp=2)
    assert all(isinstance(fault, Failed) for fault in heard)
    assert {fault.decision.code for fault in heard} == {"does_not_fit"}
    assert all(fault.decision.ranks == [1] for fault in heard)


def test_a_rank_that_raises_before_the_reduction_is_named_to_those_in_it(url):
    heard = on_each(2, url, [(9 * GIB, 5 * GIB)] * 2, tp=2, raising=1)
    assert isinstance(heard[0], Failed)
    assert "no weights here" in str(heard[0])


def test_without_a_coordinator_the_engine_reduces_by_itself(monkeypatch):
    monkeypatch.delenv("KVACCORD_URL", raising=False)
    heard = agree_kv_budget(
        9, 5, [[0, 1]], rank=0, world_size=2, otherwise=lambda free, budget: (free - 1, budget - 1)
    )
    assert heard == (8, 4)


def test_mode_off_without_a_reduction_is_refused_since_nobody_would_agree(monkeypatch):
    monkeypatch.delenv("KVACCORD_URL", raising=False)
    with pytest.raises(Invalid, match="otherwise"):
        agree_kv_budget(9, 5, [[0, 1]], rank=0, world_size=2)


def test_observing_returns_what_the_engine_reduced():
    held = scripted("agreed").join(ranks=[0], mode="observe")
    heard = agree_kv_budget(
        9, 5, [[0]], rank=0, world_size=1, otherwise=lambda free, budget: (7, 3), held=held
    )
    assert heard == (7, 3)


def test_a_world_of_one_keeps_its_numbers(monkeypatch):
    monkeypatch.delenv("KVACCORD_URL", raising=False)
    assert agree_kv_budget(9, 5, [], rank=0, world_size=1) == (9, 5)


@pytest.mark.parametrize(
    ("rank", "groups", "members"),
    [
        (5, [[4, 5, 6, 7], [1, 5]], range(8)),
        (2, [[2, 3]], (2, 3)),
        (0, [], (0,)),
        (6, [[6, 7], [2, 6]], (2, 3, 6, 7)),
    ],
)
def test_reductions_one_after_the_other_tie_the_ranks_of_a_grid(rank, groups, members):
    assert tied(groups, rank) == tuple(members)


def test_a_group_that_lacks_its_own_rank_is_refused():
    with pytest.raises(Invalid, match="rank 3 is not in its group"):
        tied([[0, 1]], 3)
