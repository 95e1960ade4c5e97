"""Another implementation of canonical JSON, in another language, finds the same digests."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvaccord.canonical import canonical, digest
from tests.builders import lacking
from tests.properties.search import search
from tests.test_canonical import DOCUMENTS

HERE = Path(__file__).parent
DECISIONS = sorted((HERE.parents[1] / "examples" / "decisions").glob("*.json"))


class Node:
    """One process for all documents: they go in a line each."""

    def __init__(self, node: str) -> None:
        self.process = subprocess.Popen(
            [node, str(HERE / "canonical.js")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def digest(self, text: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert "\n" not in text
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        found, _, self.size = self.process.stdout.readline().strip().partition(" ")
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    found = shutil.which("node")
    if found is None:
        lacking("node, the other implementation")
    assert found is not None
    node = Node(found)
    yield node
    node.close()


@search(300)
@given(document=DOCUMENTS, seed=st.integers(0, 99), ascii=st.booleans())
def test_any_document_has_one_digest_in_both(
    node: Node, document: dict[str, Any], seed: int, ascii: bool
) -> None:
    text = json.dumps(_shuffled(document, random.Random(seed)), ensure_ascii=ascii)
    assert node.digest(text) == digest(canonical(document))


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_the_bytes_of_a_decision_are_those_that_another_reader_would_write(
    node: Node, path: Path
) -> None:
    body = path.read_bytes()
    pretty = json.dumps(_shuffled(json.loads(body), random.Random(1)), separators=(" , ", " : "))
    assert node.digest(pretty) == digest(body)
    assert node.size == str(len(body))


def test_there_are_decisions_to_compare() -> None:
    assert len(DECISIONS) > 20


def _shuffled(value: Any, rng: random.Random) -> Any:
    """The same document, its keys in another order."""
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: _shuffled(value[key], rng) for key in keys}
    if isinstance(value, list):
        return [_shuffled(item, rng) for item in value]
    return value
