"""Where the stores of these tests lie."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import mounted
from tests.stores.files import VERSION_1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvaccord.db"


@pytest.fixture
def version_1(path: Path) -> Path:
    shutil.copy(VERSION_1, path)
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", size="512k") as disk:
        yield disk
