"""Order of arrival never matters: the same reports make the same bytes, whoever comes first."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import event, given
from hypothesis import strategies as st

from coordinator.commands import Claim, Submit
from coordinator.policy import Policy
from kvaccord import Layout, Report, page, state
from kvaccord.decision import Decision
from tests.builders import Log, Process, a_join
from tests.properties.search import search

STEPS = ("join", "claim", "report")


@dataclass(frozen=True)
class Start:
    """A start as its ranks see it: who holds which ranks, and what each rank reports."""

    layout: Layout
    processes: tuple[tuple[int, ...], ...]
    reports: dict[int, Report]
    spread_limit: float | None


@st.composite
def starts(draw: st.DrawFn) -> Start:
    """Small worlds. Most have a plan; some fail by what one rank, or all together, say."""
    layout = Layout(
        dp=draw(st.sampled_from([1, 1, 2])),
        pp=draw(st.sampled_from([1, 2])),
        pcp=draw(st.sampled_from([1, 1, 2])),
        tp=draw(st.sampled_from([1, 2, 3])),
        equal_over=draw(st.sampled_from([(), (), ("dp",)])),
    )
    world = layout.world_size
    cuts = sorted(draw(st.sets(st.integers(1, world), max_size=world)) | {0, world})
    reports = {}
    with_state = draw(st.booleans())
    needed = draw(st.sampled_from([None, None, 1, 60]))
    for rank in range(world):
        classes = [page("kv", draw(st.sampled_from([1000, 700])), min_entries=needed)]
        if with_state:
            classes.append(state("slot", 50, entries_per_req=1))
        pages = draw(st.integers(1, 120) | st.sampled_from([0, 90, 90]))
        reports[rank] = Report(
            free_bytes=pages * 1000 + draw(st.integers(1, 99)),
            kv_budget_bytes=pages * 1000 + draw(st.sampled_from([0, 400, 5000])),
            reserve_bytes=draw(st.sampled_from([0, 0, 500])),
            max_num_seqs=4 if with_state else draw(st.sampled_from([0, 0, 0, 8])),
            inputs={"dtype": draw(st.sampled_from(["bf16"] * 20 + ["fp8"]))},
            classes=classes,
        )
    held = tuple(tuple(range(a, b)) for a, b in pairwise(cuts))
    return Start(layout, held, reports, draw(st.sampled_from([None, None, 0.3])))


def decided(start: Start, order: Iterable[int], *, twice: random.Random | None = None) -> Decision:
    """Every process takes its next step where its number stands in `order`."""
    log = Log()
    policy = Policy(spread_limit=start.spread_limit)
    joins = [
        a_join(*ranks, layout=start.layout, nonce=f"process-{ranks[0]}", pid=1000 + ranks[0])
        for ranks in start.processes
    ]
    here: dict[int, Process] = {}
    steps = dict.fromkeys(range(len(joins)), 0)
    for who in order:
        for again in range(2 if twice and twice.random() < 0.4 else 1):
            match STEPS[steps[who]]:
                case "join" if not again:
                    here[who] = log.joined(joins[who])
                case "claim":
                    log.do(Claim(here[who].attempt, policy, frozenset()))
                case "report":
                    said = {rank: start.reports[rank] for rank in joins[who].ranks}
                    log.do(Submit(1, here[who].attempt, said, said))
        steps[who] += 1
    assert log.round.verdict is not None, "everyone has reported"
    assert log.replayed() == log.engine
    return log.decision


def in_turn(start: Start) -> list[int]:
    return [who for _ in STEPS for who in range(len(start.processes))]


@search(150)
@given(start=starts(), rng=st.randoms(use_true_random=False))
def test_any_order_of_joins_claims_and_reports_makes_the_same_decision(
    start: Start, rng: random.Random
) -> None:
    order = in_turn(start)
    rng.shuffle(order)
    decision = decided(start, order)
    event(decision.code)
    assert decision.body == decided(start, in_turn(start)).body


@search(60)
@given(start=starts(), rng=st.randoms(use_true_random=False))
def test_whatever_is_said_twice_changes_nothing(start: Start, rng: random.Random) -> None:
    order = in_turn(start)
    rng.shuffle(order)
    assert decided(start, order, twice=rng).body == decided(start, order).body


@search(60)
@given(start=starts(), rng=st.randoms(use_true_random=False))
def test_how_ranks_are_spread_over_processes_does_not_matter(
    start: Start, rng: random.Random
) -> None:
    alone = Start(
        start.layout,
        tuple((rank,) for rank in range(start.layout.world_size)),
        start.reports,
        start.spread_limit,
    )
    one, other = (decided(each, in_turn(each)).document for each in (alone, start))
    if one["verdict"]["outcome"] == "PASSED":
        # A process has one host, so only the names of hosts may differ.
        assert _without_hosts(one) == _without_hosts(other)
    else:
        assert one["verdict"]["code"] == other["verdict"]["code"]
        assert one["verdict"]["ranks"] == other["verdict"]["ranks"]


@search(150)
@given(start=starts(), more=st.integers(1, 50_000), data=st.data())
def test_more_memory_on_a_rank_never_lowers_a_count_nor_fails_a_start_that_passed(
    start: Start, more: int, data: st.DataObject
) -> None:
    rank = data.draw(st.sampled_from(sorted(start.reports)))
    field = data.draw(st.sampled_from(["free_bytes", "kv_budget_bytes", "both"]))
    before = start.reports[rank]
    changes = {
        name: getattr(before, name) + more
        for name in ("free_bytes", "kv_budget_bytes")
        if field in (name, "both")
    }
    roomier = Start(
        start.layout,
        start.processes,
        {**start.reports, rank: before.model_copy(update=changes)},
        None,  # a spread may well grow
    )
    start = Start(start.layout, start.processes, start.reports, None)
    old, new = (decided(each, in_turn(each)) for each in (start, roomier))
    if old.result == "PASSED":
        assert new.result == "PASSED"
        for each in range(start.layout.world_size):
            was, now = old.entries(each), new.entries(each)
            assert all(now[name] >= was[name] for name in was)


@search(150)
@given(start=starts())
def test_no_rank_is_asked_for_more_than_it_offered_as_a_reader_of_the_bytes_finds(
    start: Start,
) -> None:
    decision = decided(start, in_turn(start))
    if decision.result != "PASSED":
        return
    for rank, report in start.reports.items():
        asked = sum(
            n * decision.entry_bytes(rank)[name] for name, n in decision.entries(rank).items()
        )
        assert asked <= report.kv_budget_bytes - report.reserve_bytes
        assert asked <= report.free_bytes - report.reserve_bytes


def _without_hosts(value: object) -> object:
    if isinstance(value, dict):
        return {k: _without_hosts(v) for k, v in value.items() if k not in ("hosts", "message")}
    if isinstance(value, list):
        return [_without_hosts(item) for item in value]
    return value
