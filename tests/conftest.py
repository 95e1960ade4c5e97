from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.wire import Coordinator, close_workers, serving


@pytest.fixture(scope="session")
def coordinator() -> Iterator[Coordinator]:
    """One real coordinator with short budgets; tests keep apart by engine name."""
    with serving("--gather-s", "3", "--report-s", "3", "--apply-s", "3") as running:
        yield running


@pytest.fixture(scope="session")
def url(coordinator: Coordinator) -> str:
    return coordinator.url


@pytest.fixture(autouse=True)
def workers_hang_up() -> Iterator[None]:
    yield
    close_workers()
