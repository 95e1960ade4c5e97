"""What one message alone shows to be impossible is refused; a "no" never is."""

import json
import math

import pytest
from pydantic import TypeAdapter, ValidationError

from kvaccord import CacheClass, Layout, Report, page, state
from kvaccord.errors import Invalid
from kvaccord.messages import Applied, Join, Launch, Leave, RankKey, Veto, cut, cut_front
from tests.builders import a_join, a_report

GIB = 2**30
KV = {"kind": "page", "name": "kv", "entry_bytes": 1000}
SLOT = {"kind": "state", "name": "slot", "entry_bytes": 10, "entries_per_req": 1}
TRUE = {"free_bytes": 100_000, "kv_budget_bytes": 90_000, "classes": [KV]}


def refusal(model, document):
    """Why a document is refused: both as Python values and as the JSON that crosses the wire."""
    with pytest.raises(ValidationError) as refused:
        model.model_validate(document)
    with pytest.raises(ValidationError):
        model.model_validate_json(json.dumps(document))
    return refused.value


def fields_of(refused):
    return {error.get("ctx", {}).get("field") or error["loc"][-1] for error in refused.errors()}


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [-1, 2**53, 2**63, True, 1.0, 0.5, math.nan, math.inf, "1", None, [1]], ids=repr
)
@pytest.mark.parametrize("field", ["free_bytes", "reserve_bytes"])
def test_a_size_is_a_whole_number_below_2_to_the_53(field, value):
    assert fields_of(refusal(Report, TRUE | {field: value})) == {field}


@pytest.mark.parametrize("value", [2**53, -(2**53), True, 1.0, math.nan, "1", None], ids=repr)
def test_a_budget_is_signed_and_bounded_too(value):
    assert fields_of(refusal(Report, TRUE | {"kv_budget_bytes": value})) == {"kv_budget_bytes"}


@pytest.mark.parametrize("budget", [-1, -(2**53) + 1, 0, 2**53 - 1])
def test_a_negative_budget_is_a_measurement_like_another(budget):
    assert Report.model_validate(TRUE | {"kv_budget_bytes": budget}).kv_budget_bytes == budget


@pytest.mark.parametrize("field", ["total_bytes", "initial_free_bytes", "requested_bytes"])
@pytest.mark.parametrize("value", [-1, 2**53, True, 1.0], ids=repr)
def test_optional_sizes_are_held_to_the_same(field, value):
    refusal(Report, TRUE | {field: value})


@pytest.mark.parametrize("field", ["max_num_seqs", "max_model_len", "block_tokens", "local_count"])
@pytest.mark.parametrize("value", [-1, 2**53, True, 2.0, "8"], ids=repr)
def test_counts_are_whole_numbers(field, value):
    assert fields_of(refusal(Report, TRUE | {field: value})) == {field}


# --- what cannot be true ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field", ["free_bytes", "kv_budget_bytes", "initial_free_bytes", "requested_bytes"]
)
def test_nothing_on_a_device_is_more_than_its_total(field):
    whole = {**TRUE, "free_bytes": 50_000, "kv_budget_bytes": 40_000, "total_bytes": 60_000}
    refused = refusal(Report, {**whole, field: 60_001})
    assert fields_of(refused) == {field}
    assert "60001 is above total_bytes 60000" in str(refused)
    assert Report.model_validate({**whole, field: 60_000})


def test_a_budget_above_free_is_no_contradiction_by_itself():
    assert Report.model_validate(TRUE | {"kv_budget_bytes": 2**50}).kv_budget_bytes == 2**50


@pytest.mark.parametrize("entry_bytes", [0, -1, 1.0, True, 2**53], ids=repr)
def test_an_entry_has_a_size(entry_bytes):
    refused = refusal(Report, TRUE | {"classes": [KV | {"entry_bytes": entry_bytes}]})
    # The list of classes then counts as too short as well; what is wrong comes first.
    assert refused.errors()[0]["loc"] == ("classes", 0, "entry_bytes")


def test_a_state_class_needs_sequences_to_size_it():
    refused = refusal(Report, TRUE | {"classes": [KV, SLOT]})
    assert fields_of(refused) == {"max_num_seqs"}
    assert Report.model_validate(TRUE | {"classes": [KV, SLOT], "max_num_seqs": 1})


def test_a_report_has_a_class():
    refusal(Report, TRUE | {"classes": []})
    refusal(Report, {k: v for k, v in TRUE.items() if k != "classes"})


def test_only_one_page_class_can_take_what_remains():
    refused = refusal(Report, TRUE | {"classes": [KV, KV | {"name": "other"}]})
    assert "more than one page class: ['kv', 'other']" in str(refused)


@pytest.mark.parametrize(
    ("first", "second", "field"),
    [
        (KV, KV | {"multiple_of": 2}, "multiple_of"),
        (KV, SLOT | {"name": "kv"}, "kind"),
        (SLOT, SLOT | {"entries_per_req": 2}, "entries_per_req"),
        (SLOT, SLOT | {"extra_entries": 3}, "extra_entries"),
    ],
)
def test_declarations_of_one_name_are_one_index_space(first, second, field):
    refused = refusal(Report, TRUE | {"classes": [first, second], "max_num_seqs": 4})
    assert fields_of(refused) == {f"classes.{first['name']}.{field}"}


def test_declarations_of_one_name_may_differ_in_bytes_and_bounds():
    draft = KV | {"entry_bytes": 250, "min_entries": 5, "max_entries": 50}
    assert len(Report.model_validate(TRUE | {"classes": [KV, draft]}).classes) == 2


@pytest.mark.parametrize("field", ["entries_per_req", "extra_entries"])
def test_a_page_class_is_not_sized_per_request(field):
    assert fields_of(refusal(CacheClass, KV | {field: 1})) == {field}


@pytest.mark.parametrize(
    ("field", "value"), [("multiple_of", 2), ("min_entries", 1), ("max_entries", 9)]
)
def test_a_state_class_is_sized_by_requests_alone(field, value):
    assert fields_of(refusal(CacheClass, SLOT | {field: value})) == {field}


@pytest.mark.parametrize(
    "bounds",
    [
        {"max_entries": 9, "min_entries": 10},
        {"max_entries": 15, "multiple_of": 16},
        {"max_entries": 31, "multiple_of": 16, "min_entries": 17},
        {"max_entries": 0},
    ],
)
def test_bounds_leave_room_for_a_count(bounds):
    assert fields_of(refusal(CacheClass, KV | bounds)) == {"max_entries"}


def test_equal_bounds_are_an_override():
    assert page("kv", 1000, min_entries=7, max_entries=7).max_entries == 7


def test_the_bytes_of_one_name_add_up_to_a_size_that_can_be_said():
    # The sum stands in the plan as entry_bytes; a decision holds no integer of 2^53 and more.
    nothing = {**SLOT, "entries_per_req": 0, "entry_bytes": 2**53 - 1}
    refusal(Report, TRUE | {"classes": [KV, nothing, nothing], "max_num_seqs": 4})


# --- names, maps, unknown fields ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a b", "kv\n", "ü", "x" * 65, "a/b", None, 1], ids=repr)
def test_a_class_has_a_plain_name(name):
    assert fields_of(refusal(CacheClass, KV | {"name": name})) == {"name"}


@pytest.mark.parametrize(
    ("model", "document"),
    [
        (Report, TRUE | {"free_byte": 1}),
        (Report, TRUE | {"capacity": {}}),
        (Report, TRUE | {"classes": [KV | {"entries": 1}]}),
        (Join, a_join(0).model_dump() | {"rank": 0}),
        (Join, a_join(0).model_dump() | {"launch": {"run": "a", "attempt": 1}}),
        (Veto, {"rank": 0, "text": "no", "why": "x"}),
        (Leave, {"why": "x"}),
        (Applied, {"digest": "sha256:" + "0" * 64, "built": {}, "also": 1}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_misspelt_field_is_not_silently_ignored(model, document):
    refused = refusal(model, document)
    assert refused.errors()[0]["type"] == "extra_forbidden"


@pytest.mark.parametrize("field", ["inputs", "inputs_stage", "parts"])
@pytest.mark.parametrize(
    "values",
    [
        {"a": 1.0},
        {"a": math.nan},
        {"a": None},
        {"a": [1]},
        {"a": {}},
        {"a": 2**53},
        {"": 1},
        {"é": 1},
        {"x" * 129: 1},
        {"a": "x" * 1025},
        {str(n): n for n in range(257)},
    ],
    ids=lambda value: repr(value)[:20],
)
def test_open_maps_hold_what_has_one_spelling(field, values):
    refusal(Report, TRUE | {field: values})


def test_open_maps_keep_true_and_1_apart():
    report = Report.model_validate(TRUE | {"inputs": {"a": True, "b": 1, "c": "1", "d": -1}})
    assert [type(v) for v in report.inputs.values()] == [bool, int, str, int]


def test_a_report_says_the_same_after_it_crossed_the_wire():
    report = a_report(
        9,
        total_bytes=90 * GIB,
        max_num_seqs=8,
        inputs={"a": True, "b": 1, "c": "ö"},
        classes=[page("kv", 1000, min_entries=3), state("slot", 10, entries_per_req=1)],
    )
    assert Report.model_validate_json(report.model_dump_json(exclude_none=True)) == report


# --- ranks --------------------------------------------------------------------------------------

KEYED = TypeAdapter(dict[RankKey, int])


@pytest.mark.parametrize("key", ["0", "3", "1023"])
def test_a_rank_key_is_its_number(key):
    assert KEYED.validate_python({key: 1}) == {int(key): 1}


@pytest.mark.parametrize(
    "key",
    [
        *["03", "00", "-0", "-1", "+3", " 3", "3 ", "3.0", "3e0", "0x1", "1_0", "", "٣", "²"],
        *["1024", "9" * 30, "1" * 5000, True, 1.0, None],
    ],
    ids=lambda key: repr(key)[:12],
)
def test_a_rank_has_one_name(key):
    with pytest.raises(ValidationError):
        KEYED.validate_python({key: 1})


@pytest.mark.parametrize(
    "ranks", [[], [2], [-1], [True], ["0"], [0.0], [0, 0], [0, 1, 0]], ids=repr
)
def test_a_join_names_ranks_of_its_layout_once(ranks):
    document = a_join(0, layout=Layout(tp=2)).model_dump() | {"ranks": ranks}
    refusal(Join, document)


@pytest.mark.parametrize("run", ["", "a b", "a\n", "é", "x" * 201, None], ids=lambda r: repr(r)[:9])
def test_a_run_is_printable(run):
    refusal(Launch, {"run": run})


@pytest.mark.parametrize(
    "nonce", ["short", "x" * 65, "has space", "nonce-001\n"], ids=lambda n: n[:9]
)
def test_a_nonce_is_plain(nonce):
    refusal(Join, a_join(0).model_dump() | {"nonce": nonce})


@pytest.mark.parametrize("protocol", [0, -1, True, "1"], ids=repr)
def test_a_protocol_is_a_number(protocol):
    refusal(Join, a_join(0).model_dump() | {"protocol": protocol})


# --- a no ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["x" * 100_000, "ö" * 100_000, "😂" * 100_000])
def test_the_text_of_a_veto_is_cut_never_refused(text):
    veto = Veto(rank=0, text=text, trace=text)
    assert 2045 <= len(veto.text.encode()) <= 2048
    assert 6141 <= len(veto.trace.encode()) <= 6144
    assert text.startswith(veto.text)
    assert text.endswith(veto.trace)


def test_a_veto_keeps_the_beginning_of_its_text_and_the_end_of_its_trace():
    veto = Veto(rank=0, text="first" + "x" * 9000, trace="x" * 9000 + "last")
    assert veto.text.startswith("first")
    assert veto.trace.endswith("last")


def test_a_veto_may_hold_half_a_character():
    # A path that is no UTF-8 comes out of Python as a lone surrogate.
    assert Veto(rank=0, text="no such file: \udcff").text == "no such file: ?"


@pytest.mark.parametrize("text", [None, 1, {"a": 1}], ids=repr)
def test_a_veto_says_why(text):
    refusal(Veto, {"rank": 0, "text": text})


def test_cutting_never_leaves_half_a_character():
    for limit in range(12):
        assert "aö😂".startswith(cut("aö😂", limit))
        assert len(cut("aö😂", limit).encode()) <= limit
        if limit:
            assert "aö😂".endswith(cut_front("aö😂", limit))
            assert len(cut_front("aö😂", limit).encode()) <= limit


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"built": {}, "failed": {"text": "no"}},
        {"built": {"kv": -1}},
        {"built": {"kv": 1.0}},
        {"built": {"kv": True}},
        {"built": {"k v": 1}},
        {"built": {"0": {"kv": 1}, "kv": 1}},
        {"built": {"03": {"kv": 1}}},
        {"built": {"1024": {"kv": 1}}},
        {"built": {"0": {"kv": {}}}},
        {"built": {"0": {"kv": -1}}},
        {"failed": {}},
    ],
    ids=repr,
)
def test_a_process_built_or_failed(said):
    refusal(Applied, {"digest": "sha256:" + "0" * 64, **said})


@pytest.mark.parametrize("built", [{}, {"kv": 0}, {"0": {"kv": 1}, "1": {}}, {"8192": 7}], ids=repr)
def test_what_was_built_says_the_same_after_it_crossed_the_wire(built):
    said = Applied.model_validate({"digest": "sha256:" + "0" * 64, "built": built})
    assert json.loads(said.model_dump_json(exclude_none=True))["built"] == built
    assert Applied.model_validate_json(said.model_dump_json(exclude_none=True)) == said


@pytest.mark.parametrize(
    "digest",
    ["", "0" * 64, "sha256:" + "0" * 63, "sha256:" + "A" * 64, "sha256:" + "0" * 64 + "\n"],
)
def test_a_digest_is_spelt_in_full(digest):
    refusal(Applied, {"digest": digest, "built": {}})


# --- groups by name, capacities -----------------------------------------------------------------

GROUPS = {"budget": "dp0.pp0", "scheduler": "dp0"}


def test_a_join_names_the_groups_of_exactly_its_ranks():
    layout = Layout(tp=4)
    join = a_join(1, 3, layout=layout, groups={"1": GROUPS, "3": GROUPS})
    assert join.groups is not None
    assert join.groups[3].scheduler == "dp0"
    assert Join.model_validate_json(join.model_dump_json()) == join
    for ranks in ((), ("1",), ("1", "2"), ("1", "2", "3"), ("01", "3")):
        with pytest.raises(Invalid):
            a_join(1, 3, layout=layout, groups=dict.fromkeys(ranks, GROUPS))


def test_a_capacity_is_a_number_of_bytes_with_a_plain_name():
    assert Report(**TRUE, capacities={"host": 0}).capacities == {"host": 0}
    for wrong in ({"host": -1}, {"host": 1.5}, {"a b": 1}, {"host": 2**53}, {"host": None}):
        with pytest.raises(Invalid):
            Report(**TRUE, capacities=wrong)
