"""Coordinates and groups, against what the engines themselves build."""

import json
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvaccord.layout import MAX_WORLD, Layout, as_ranges, named

VECTORS = json.loads((Path(__file__).parent / "vectors" / "topology.json").read_text())["vectors"]
WITH_GROUPS = [v for v in VECTORS if "groups" in v]


def layout_of(vector):
    """The vector's sizes on our axes: SGLang's and TensorRT-LLM's CP is our pcp."""
    sizes = vector["sizes"]
    if "attn_cp" in sizes:
        assert sizes["attn_dp"] == 1, "attention DP inside TP is no grid"
        return Layout(pp=sizes["pp"], pcp=sizes["attn_cp"], tp=vector["attn_tp_size"])
    if "cp" in sizes:
        return Layout(pp=sizes["pp"], pcp=sizes["cp"], tp=sizes["tp"])
    return Layout(dp=sizes["dp"], pp=sizes["pp"], pcp=sizes["pcp"], tp=sizes["tp"])


def along(layout, *axes):
    """The groups of ranks that differ on these axes only."""

    def rest(rank):
        return [v for k, v in layout.coordinates(rank)._asdict().items() if k not in axes]

    ranks = sorted(range(layout.world_size), key=lambda rank: (rest(rank), rank))
    return sorted(list(group) for _, group in groupby(ranks, rest))


def id_of(vector):
    return f"{vector['engine']} {json.dumps(vector['sizes'])}".replace('"', "")


@pytest.mark.parametrize("vector", VECTORS, ids=id_of)
def test_ranks_stand_where_the_engine_puts_them(vector):
    layout = layout_of(vector)
    for line in vector.get("coords", ()):
        ours = layout.coordinates(line["rank"])
        assert ours.pp == line["pp"]
        assert ours.tp == line["tp"]
        assert ours.pcp == line.get("pcp", line.get("cp"))
        assert ours.dp == line.get("dp", 0)


@pytest.mark.parametrize("vector", WITH_GROUPS, ids=id_of)
def test_groups_are_those_of_the_engine(vector):
    layout, groups = layout_of(vector), vector["groups"]
    if "attn_cp" in vector["sizes"]:
        # SGLang's TP group spans attention TP and CP: the ranks whose minimum is published.
        assert budget_groups(layout) == sorted(groups["tp"])
        assert along(layout, "tp") == sorted(groups["attn_tp"])
        assert along(layout, "pcp") == sorted(groups["attn_cp"])
        assert along(layout, "pp") == sorted(groups["pp"])
        return
    for axis in ("dp", "pp", "pcp", "tp"):
        assert along(layout, axis) == sorted(groups[axis])
    assert scheduler_groups(layout) == sorted(groups["scheduler_group"])


@pytest.mark.parametrize("vector", WITH_GROUPS, ids=id_of)
def test_a_budget_group_is_what_the_tp_and_cp_groups_of_the_engine_connect(vector):
    layout, groups = layout_of(vector), vector["groups"]
    joined = [set(g) for g in groups.get("attn_tp") or groups["tp"]]
    for group in groups.get("attn_cp") or groups["pcp"]:
        touching = [g for g in joined if not g.isdisjoint(group)]
        joined = [g for g in joined if g.isdisjoint(group)] + [set().union(*touching)]
    assert sorted(map(sorted, joined)) == budget_groups(layout)


def budget_groups(layout):
    return sorted(
        list(layout.budget_group(dp, pp)) for dp in range(layout.dp) for pp in range(layout.pp)
    )


def scheduler_groups(layout):
    return [list(layout.scheduler_group(dp)) for dp in range(layout.dp)]


LAYOUTS = st.builds(Layout, **{axis: st.integers(1, 5) for axis in ("dp", "pp", "pcp", "tp")})


@given(LAYOUTS)
def test_groups_partition_the_ranks(layout):
    everyone = list(range(layout.world_size))
    assert [r for group in budget_groups(layout) for r in group] == everyone
    assert [r for group in scheduler_groups(layout) for r in group] == everyone


@given(LAYOUTS)
def test_groups_hold_who_shares_their_coordinates(layout):
    assert budget_groups(layout) == along(layout, "pcp", "tp")
    assert scheduler_groups(layout) == along(layout, "pp", "pcp", "tp")


@given(LAYOUTS)
def test_no_two_ranks_stand_in_one_place(layout):
    places = [layout.coordinates(r) for r in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert places == sorted(places)
    assert all(at < size for place in places for at, size in zip(place, sizes(layout), strict=True))


def sizes(layout):
    return (layout.dp, layout.pp, layout.pcp, layout.tp)


def test_the_largest_world_is_admitted_and_the_next_is_not():
    assert Layout(dp=4, pp=4, pcp=8, tp=8).world_size == MAX_WORLD
    with pytest.raises(ValidationError, match="a world of 1040 ranks"):
        Layout(dp=65, tp=16)
    with pytest.raises(ValidationError):
        Layout(tp=MAX_WORLD + 1)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
def test_a_size_is_a_whole_number_from_1(size):
    with pytest.raises(ValidationError):
        Layout(tp=size)


def test_what_a_layout_does_not_know_is_refused():
    with pytest.raises(ValidationError):
        Layout.model_validate({"ep": 2})
    with pytest.raises(ValidationError):
        Layout.model_validate({"equal_over": ["tp"]})
    with pytest.raises(ValidationError):
        Layout.model_validate({"equal_over": ["dp", "dp"]})


def test_ranks_are_named_as_ranges():
    assert as_ranges([5, 0, 2, 1]) == "0-2, 5"
    assert as_ranges([]) == ""
    assert named([3]) == "rank 3"
    assert named(range(4)) == "ranks 0-3"
