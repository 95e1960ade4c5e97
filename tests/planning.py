"""What the tests of the planner share: short ways to ask it, and starts of any kind."""

from hypothesis import strategies as st

from kvaccord import Layout, Report, page, state
from kvaccord.plan import plan

SLOT = state("slot", 100, entries_per_req=1)


def planned(layout, reports):
    """The plan of a start that has one."""
    result = plan(layout, dict(enumerate(reports)))
    assert result.findings == ()
    return result.schedulers


def the_row(layout, reports):
    """The plan of the only scheduler."""
    (row,) = planned(layout, reports)
    return row


def codes(layout, reports):
    """The findings of a start that has no plan, as (code, ranks)."""
    result = plan(layout, dict(enumerate(reports)))
    assert result.schedulers == ()
    return [(finding.code, finding.ranks) for finding in result.findings]


CLASSES = st.lists(
    st.one_of(
        st.builds(
            page,
            st.just("kv"),
            st.integers(1, 400),
            multiple_of=st.just(4),
            min_entries=st.none() | st.integers(0, 5),
            max_entries=st.none() | st.integers(8, 60),
        ),
        st.builds(state, st.just("slot"), st.integers(1, 90), entries_per_req=st.just(2)),
        st.builds(state, st.just("none"), st.integers(1, 90)),
    ),
    min_size=1,
    max_size=4,
)
ROOMY = st.builds(
    Report,
    free_bytes=st.integers(15_000, 60_000),
    kv_budget_bytes=st.integers(15_000, 60_000),
    reserve_bytes=st.integers(0, 900),
    max_num_seqs=st.just(3),
    classes=CLASSES,
)
REPORTS = st.builds(
    Report,
    free_bytes=st.integers(0, 60_000),
    kv_budget_bytes=st.integers(-500, 60_000),
    reserve_bytes=st.integers(0, 900),
    max_num_seqs=st.just(3),
    classes=CLASSES,
)
LAYOUTS = st.builds(
    Layout,
    **dict.fromkeys(("dp", "pp", "pcp", "tp"), st.integers(1, 2)),
    equal_over=st.sampled_from([(), ("dp",)]),
)


@st.composite
def starts(draw):
    layout = draw(LAYOUTS)
    reports = draw(st.sampled_from([ROOMY, ROOMY, REPORTS]))
    return layout, {rank: draw(reports) for rank in range(layout.world_size)}


HUGE = st.integers(1, 2**53 - 1)
ANY_REPORTS = st.builds(
    Report,
    free_bytes=HUGE,
    kv_budget_bytes=st.integers(-(2**53) + 1, 2**53 - 1),
    reserve_bytes=HUGE | st.just(0),
    total_bytes=st.just(2**53 - 1) | st.none(),
    max_num_seqs=st.just(3) | HUGE,
    classes=st.lists(
        st.builds(page, st.just("kv"), HUGE | st.integers(1, 9))
        | st.builds(
            state,
            st.just("slot"),
            HUGE | st.integers(1, 9),
            entries_per_req=HUGE | st.integers(0, 1),
            extra_entries=HUGE | st.just(0),
        ),
        min_size=1,
        max_size=1,
    ),
)
