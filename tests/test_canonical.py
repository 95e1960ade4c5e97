"""RFC 8785 as far as our documents need it: one byte string for one document."""

import hashlib
from enum import IntEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvaccord.canonical import INT_LIMIT, canonical, digest
from tests.builders import is_canonical

# No lone surrogates: they are no Unicode text and have no UTF-8.
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
ASCII = st.text(st.characters(max_codepoint=127))
WHOLE = st.integers(-INT_LIMIT + 1, INT_LIMIT - 1)
DOCUMENTS = st.dictionaries(
    ASCII,
    st.recursive(
        TEXT | WHOLE | st.booleans(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ASCII, inner, max_size=4),
        max_leaves=12,
    ),
    max_size=5,
)


def test_keys_stand_in_order_and_nothing_stands_between():
    document = {"b": [1, 2], "a": {"z": True, "A": "x"}, "10": 0, "9": -1, "": ""}
    assert canonical(document) == b'{"":"","10":0,"9":-1,"a":{"A":"x","z":true},"b":[1,2]}'


def test_text_is_escaped_only_where_it_must_be():
    # RFC 8785, 3.2.2.2: short escapes where there are some, \u00xx in lower case for the rest.
    text = '€$\x0f\nA\'B"\\\\"/\b\t\f\r\x1f\x7f'
    spelt = '{"t":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/\\b\\t\\f\\r\\u001f\x7f"}'
    assert canonical({"t": text}) == spelt.encode()


def test_text_is_utf_8_as_it_is():
    assert canonical({"t": "ö😂דּ\u2028"}) == '{"t":"ö😂דּ\u2028"}'.encode()


def test_text_is_not_normalised():
    assert canonical({"t": "é"}) != canonical({"t": "e\u0301"})


def test_tuples_are_arrays():
    assert canonical({"a": (1, (2,), ())}) == b'{"a":[1,[2],[]]}'


def test_booleans_are_no_numbers():
    assert canonical({"a": True, "b": 1}) == b'{"a":true,"b":1}'


def test_integers_are_whole_up_to_the_limit():
    assert canonical({"a": 2**53 - 1, "b": -(2**53) + 1, "c": 0}) == (
        b'{"a":9007199254740991,"b":-9007199254740991,"c":0}'
    )


def test_a_named_integer_is_its_number():
    assert canonical({"a": IntEnum("Number", {"SEVEN": 7})["SEVEN"]}) == b'{"a":7}'


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        0.1,
        float("nan"),
        float("inf"),
        None,
        2**53,
        -(2**53),
        b"bytes",
        {1},
        object(),
        "\ud800",
        {"é": 1},
        {1: 1},
        {None: 1},
    ],
    ids=repr,
)
def test_what_has_no_single_spelling_is_refused_however_deep(value):
    for document in ({"a": value}, {"a": [{"b": (value,)}]}):
        with pytest.raises(ValueError):  # noqa: PT011  a lone surrogate is a UnicodeError
            canonical(document)


def test_the_refusal_says_where():
    with pytest.raises(ValueError, match=r"\$\.plan\.rows\[1\]\.x: 0\.5"):
        canonical({"plan": {"rows": [{"x": 1}, {"x": 0.5}]}})


@given(DOCUMENTS)
def test_every_document_has_one_spelling(document):
    body = canonical(document)
    assert is_canonical(body)
    shuffled = dict(reversed(list(document.items())))
    assert canonical(shuffled) == body


def test_the_digest_is_over_the_bytes_as_they_are():
    assert digest(b"{}") == "sha256:" + hashlib.sha256(b"{}").hexdigest()
    assert digest(b"{ }") != digest(b"{}")
