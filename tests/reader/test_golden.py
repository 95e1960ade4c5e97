"""What is said of a log of each engine and version, word for word."""

import pytest

from tests.reader.golden import GOLDEN, spoken
from tests.reader.reading import LOGS

logs = pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)


@logs
def test_a_log_is_read_as_it_was_when_somebody_looked(log):
    text, document = spoken(log)
    assert text == (GOLDEN / f"{log.stem}.txt").read_text()
    assert document == (GOLDEN / f"{log.stem}.json").read_text()


def test_every_golden_file_has_a_log():
    assert {path.stem for path in GOLDEN.iterdir()} == {path.stem for path in LOGS}
