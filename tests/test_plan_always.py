"""What must always hold of a plan, whatever the start."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.verdict import judge_reports
from kvaccord import Layout
from kvaccord.canonical import canonical
from kvaccord.plan import plan, plan_document
from kvaccord.room import available_bytes, needs
from tests.planning import ANY_REPORTS, starts


def counted(layout, ranks, reports):
    """The page count by hand: per rank, one page at a time would come to the same."""
    counts = {}
    for rank in ranks:
        pages = [c for c in reports[rank].classes if c.kind == "page"]
        if not pages:
            continue
        r = reports[rank]
        states = sum(
            c.entry_bytes * (r.max_num_seqs * c.entries_per_req + c.extra_entries)
            for c in r.classes
            if c.kind == "state"
        )
        rest = min(r.free_bytes, r.kv_budget_bytes) - r.reserve_bytes - states
        fit = rest // sum(c.entry_bytes for c in pages)
        fit = min([fit] + [c.max_entries for c in pages if c.max_entries is not None])
        counts[rank] = fit - fit % pages[0].multiple_of
    return counts


@given(starts())
def test_counts_are_the_minima_over_exactly_these_reports(start):
    layout, reports = start
    for row in plan(layout, reports).schedulers:
        ranks = range(layout.world_size) if layout.equal_over else row.group.ranks
        counts = counted(layout, ranks, reports)
        if any(rank in counts for rank in row.group.ranks):
            assert row.entries["kv"] == min(counts.values())
            tight = tuple(r for r in counts if counts[r] == min(counts.values()))
            here = tuple(r for r in tight if r in row.group.ranks)
            assert row.binding["kv"] == (here or tight[:1])
        else:
            assert "kv" not in row.entries


@given(starts())
def test_no_rank_is_asked_for_more_than_it_offered(start):
    layout, reports = start
    for row in plan(layout, reports).schedulers:
        for share in row.by_rank:
            report = reports[share.rank]
            offered = min(report.free_bytes, report.kv_budget_bytes) - report.reserve_bytes
            assert sum(share.reserved_bytes.values()) + share.stranded_bytes == offered
            assert share.stranded_bytes >= 0
            assert share.reserved_bytes == {
                name: row.entries[name] * size for name, size in share.entry_bytes.items()
            }
            assert share.entry_bytes.keys() == {c.name for c in report.classes}


@given(starts())
def test_no_floor_is_broken_by_a_plan(start):
    layout, reports = start
    for row in plan(layout, reports).schedulers:
        for rank in row.group.ranks:
            if reports[rank].has_page:
                assert row.entries["kv"] >= max(1, needs(reports[rank]).page_min)


@given(starts(), st.randoms(use_true_random=False))
def test_the_order_of_the_reports_does_not_matter(start, random):
    layout, reports = start
    shuffled = list(reports.items())
    random.shuffle(shuffled)
    assert plan(layout, dict(shuffled)) == plan(layout, reports)


@given(starts(), st.data())
def test_more_memory_on_one_rank_never_lowers_a_count(start, data):
    layout, reports = start
    rank = data.draw(st.sampled_from(sorted(reports)))
    more = data.draw(st.integers(0, 10_000))
    roomier = reports[rank].model_copy(
        update={
            "free_bytes": reports[rank].free_bytes + more,
            "kv_budget_bytes": reports[rank].kv_budget_bytes + more,
        }
    )
    before, after = plan(layout, reports), plan(layout, {**reports, rank: roomier})
    if before.schedulers:
        assert after.findings == ()
        for old, new in zip(before.schedulers, after.schedulers, strict=True):
            assert all(new.entries[name] >= n for name, n in old.entries.items())


@given(starts())
def test_published_minima_are_those_of_the_group(start):
    layout, reports = start
    for row in plan(layout, reports).schedulers:
        ranks = [r for g in row.budget_groups for r in g.group.ranks]
        assert ranks == list(row.group.ranks)
        for group in row.budget_groups:
            members = [reports[r] for r in group.group.ranks]
            assert group.free_bytes == min(r.free_bytes for r in members)
            assert group.budget_bytes == min(r.kv_budget_bytes for r in members)
            assert group.available_bytes == min(map(available_bytes, members))
            assert available_bytes(reports[group.binding_rank]) == group.available_bytes


@given(st.lists(ANY_REPORTS, min_size=2, max_size=2))
def test_every_plan_and_every_finding_has_a_canonical_form(reports):
    layout, by_rank = Layout(tp=2), dict(enumerate(reports))
    canonical(plan_document(plan(layout, by_rank), {0: "a", 1: "b"}))
    canonical(judge_reports(layout, by_rank, {0: "a", 1: "b"}).document())
