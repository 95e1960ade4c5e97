"""Coordinates and groups, against what the engines themselves build."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvaccord.errors import Invalid
from kvaccord.layout import MAX_WORLD, Groups, Layout, as_ranges, named, scheduler_groups

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
def test_every_group_list_of_the_engine_is_ours(vector):
    layout = layout_of(vector)
    if "attn_cp" in vector["sizes"]:
        ours = layout.sglang_group_lists()
    else:
        ours = layout.group_lists(dcp=vector["sizes"]["dcp"])
    for name, groups in vector["groups"].items():
        assert ours[name] == sorted(groups), name


def test_every_vector_is_used():
    assert len(VECTORS) == 10
    assert len(WITH_GROUPS) == 9  # TensorRT-LLM's has coordinates alone


def test_attention_dp_inside_tp_is_a_grid_without_pp_only():
    # SGLang, TP 8 with attention DP 2 and CP 2: attn_tp_size = 8 // 2 // 2.
    assert Layout(dp=2, pcp=2, tp=2).sglang_group_lists() == {
        "tp": [list(range(8))],
        "pp": [[rank] for rank in range(8)],
        "attn_tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "attn_cp": [[0, 2], [1, 3], [4, 6], [5, 7]],
    }
    with pytest.raises(ValueError, match="name the groups of each rank"):
        Layout(dp=2, pp=2, tp=2).sglang_group_lists()


@pytest.mark.parametrize("dcp", [0, 3, 8])
def test_decode_context_parallel_divides_a_tp_group(dcp):
    with pytest.raises(ValueError, match=f"dcp {dcp} does not divide tp 4"):
        Layout(tp=4).group_lists(dcp=dcp)


@pytest.mark.parametrize("vector", WITH_GROUPS, ids=id_of)
def test_a_budget_group_is_what_the_tp_and_cp_groups_of_the_engine_connect(vector):
    layout, groups = layout_of(vector), vector["groups"]
    joined = [set(g) for g in groups.get("attn_tp") or groups["tp"]]
    for group in groups.get("attn_cp") or groups["pcp"]:
        touching = [g for g in joined if not g.isdisjoint(group)]
        joined = [g for g in joined if g.isdisjoint(group)] + [set().union(*touching)]
    assert sorted(map(sorted, joined)) == budget_groups(layout)


def budget_groups(layout):
    return [list(group.ranks) for row in scheduler_groups(layout) for group in row.budget_groups]


LAYOUTS = st.builds(Layout, **{axis: st.integers(1, 5) for axis in ("dp", "pp", "pcp", "tp")})


@given(LAYOUTS)
def test_groups_partition_the_ranks(layout):
    everyone = list(range(layout.world_size))
    assert [r for group in budget_groups(layout) for r in group] == everyone
    assert [r for group in scheduler_groups(layout) for r in group.ranks] == everyone
    for groups in layout.group_lists().values():
        assert sorted(rank for group in groups for rank in group) == everyone
        assert groups == sorted(groups)


@given(LAYOUTS)
def test_groups_hold_who_shares_their_coordinates(layout):
    lists = layout.group_lists()
    assert budget_groups(layout) == lists["budget_group"]
    assert [list(row.ranks) for row in scheduler_groups(layout)] == lists["scheduler_group"]
    for groups, axes in ((lists["ep"], {"pp"}), (lists["budget_group"], {"dp", "pp"})):
        places = [layout.coordinates(rank)._asdict() for rank in groups[-1]]
        assert all(len({place[axis] for place in places}) == 1 for axis in axes)


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
    with pytest.raises(Invalid, match="a world of 1040 ranks"):
        Layout(dp=65, tp=16)
    with pytest.raises(Invalid):
        Layout(tp=MAX_WORLD + 1)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
def test_a_size_is_a_whole_number_from_1(size):
    with pytest.raises(Invalid):
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


# --- groups by name -----------------------------------------------------------------------------


def test_named_groups_come_by_their_lowest_rank():
    names = [("b", "b1"), ("a", "a1"), ("a", "a2"), ("b", "b1"), ("b", "b0")]
    groups = {r: Groups(scheduler=s, budget=b) for r, (s, b) in enumerate(names)}
    first, second = scheduler_groups(Layout(tp=5), groups)
    assert (first.at, list(first.ranks)) == ("b", [0, 3, 4])
    assert [(g.at, list(g.ranks)) for g in first.budget_groups] == [("b1", [0, 3]), ("b0", [4])]
    assert (second.at, list(second.ranks)) == ("a", [1, 2])


@given(LAYOUTS)
def test_a_grid_by_name_is_the_grid(layout):
    at = [layout.coordinates(rank) for rank in range(layout.world_size)]
    groups = {
        rank: Groups(scheduler=f"dp{c.dp}", budget=f"dp{c.dp}.pp{c.pp}")
        for rank, c in enumerate(at)
    }

    def ranks(rows):
        return [(list(r.ranks), [list(g.ranks) for g in r.budget_groups]) for r in rows]

    assert ranks(scheduler_groups(layout, groups)) == ranks(scheduler_groups(layout))


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ü", "x" * 65, "a\n", None, 1])
def test_a_group_has_a_plain_name(name):
    with pytest.raises(Invalid):
        Groups(budget=name, scheduler="a")
    with pytest.raises(Invalid):
        Groups(budget="a", scheduler=name)
