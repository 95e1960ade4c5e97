"""kill -9 of the coordinator at random moments: nothing acknowledged is lost, nobody is lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvaccord.canonical import canonical
from tests.crash.checks import check
from tests.crash.crowd import Crowd
from tests.crash.server import Server, serving
from tests.crash.storm import Storm, weather
from tests.simulation.history import History


def test_a_coordinator_killed_again_and_again_loses_nothing_and_nobody(tmp_path: Path) -> None:
    storm = Storm(engines=10, kills=8, seed=1, lives_s=(0.1, 3.0))
    weathered = weather(storm, tmp_path)
    assert weathered.sealed >= 10
    for promise in ("S1", "S2", "S3", "S5", "S6", "S7", "S8", "S10"):
        assert weathered.compared[f"judgements of {promise}"] > 20, promise
    assert weathered.compared["acknowledged reports read back"] > 20
    assert weathered.sessions > 3 * weathered.sealed, "they came back after kills"


@pytest.fixture(scope="module")
def one_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, bytes]]:
    """A coordinator that is still there, and the history of one start."""
    with serving(tmp_path_factory.mktemp("one-start")) as server:
        crowd = Crowd(server.port, 1, 3, 0.1, random.Random(1), over=False)

        async def play() -> None:
            asyncio.get_running_loop().call_later(0.1, setattr, crowd, "over", True)
            await crowd.play()

        asyncio.run(play())
        assert crowd.wrong == []
        yield server, crowd.history.to_bytes()


def again(body: bytes, folder: Path) -> History:
    path = folder / "history.json"
    path.write_bytes(body)
    return History.read(path)


def test_the_checks_pass_what_is_true(one_start: tuple[Server, bytes], tmp_path: Path) -> None:
    server, body = one_start
    compared = check(again(body, tmp_path), server.url)
    assert compared["documents read back"] == 2
    assert compared["acknowledged reports read back"] >= 3
    assert compared["facts"] >= 3 * 5


def test_the_checks_find_a_second_decision(one_start: tuple[Server, bytes], tmp_path: Path) -> None:
    server, body = one_start
    history = again(body, tmp_path)
    told = next(e for e in history.of("answer") if "verdict" in _document(history, e))
    other = _document(history, told)
    other["verdict"]["message"] += "!"
    told["document"] = told["digest"] = history.keep(canonical(other))
    with pytest.raises(AssertionError, match=r"two different.*S1"):
        check(history, server.url)


def test_the_checks_find_a_decision_that_is_gone(
    one_start: tuple[Server, bytes], tmp_path: Path
) -> None:
    _, body = one_start
    with (
        serving(tmp_path) as empty,
        pytest.raises(Exception, match=r"rounds|never go back"),
    ):
        check(again(body, tmp_path), empty.url)


def test_the_checks_find_an_acknowledged_report_that_is_gone(
    one_start: tuple[Server, bytes], tmp_path: Path
) -> None:
    server, body = one_start
    history = again(body, tmp_path)
    for each in history.of("request"):
        if "/reports" in each["target"]:
            each["body"] = json.dumps({"7": {"free_bytes": 1}})
    with pytest.raises(AssertionError, match=r"rank 7 is forgotten \(S8\)"):
        check(history, server.url)


@pytest.mark.parametrize(("fault", "found"), [("gap", "a gap"), ("twice", "in order, once")])
def test_the_checks_find_facts_that_are_left_out_or_come_twice(
    one_start: tuple[Server, bytes], tmp_path: Path, fault: str, found: str
) -> None:
    server, body = one_start
    history = again(body, tmp_path)
    facts = [e for e in history.of("fact") if e["who"].endswith("/0")]
    if fault == "gap":
        history.events.remove(facts[2])
    else:
        history.events.append(facts[2])
    with pytest.raises(AssertionError, match=found):
        check(history, server.url)


def _document(history: History, event: dict[str, str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(
        history.documents.get(event.get("document", ""), "{}")
    )
    return found
