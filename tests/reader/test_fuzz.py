"""The fuzzer's checks on seeds that hypothesis picks; `python -m tests.reader.fuzz` runs longer."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reader.fuzz import check, corpus, mutated

LOGS = corpus()


@settings(max_examples=100, deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_a_mutated_log_gets_an_answer(seed):
    rng = random.Random(seed)
    check(mutated(rng, LOGS), rng)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=3), st.integers(0, 2**32))
def test_any_bytes_get_an_answer(files, seed):
    check([file or b"\n" for file in files], random.Random(seed))
