"""The log that each story is told over."""

import pytest

from tests.builders import Log


@pytest.fixture
def log():
    return Log()
