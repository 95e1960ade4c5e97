"""The coordinator is replaced under those who wait: they are told, moved, and nobody is lost."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvaccord import Layout, Report, page
from tests.wire import Coordinator, Worker, an_engine, serving
from worker_client import Rendezvous

REPORT = Report(free_bytes=1000, kv_budget_bytes=900, classes=(page("kv", 100),))


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Coordinator]:
    with serving(store=f"sqlite:///{tmp_path}/kvaccord.db") as running:
        yield running


def a_pair(durable: Coordinator) -> list[Worker]:
    engine = an_engine()
    return [Worker(durable.url, engine, rank, tp=2).enter() for rank in range(2)]


def test_while_it_stops_it_answers_that_it_is_not_ready_also_on_new_connections(
    durable: Coordinator,
) -> None:
    a_pair(durable)
    durable.process.send_signal(signal.SIGTERM)
    said = []
    with contextlib.suppress(httpx.TransportError):
        while True:
            answer = httpx.get(f"{durable.url}/readyz")
            said.append((answer.status_code, answer.json()["code"] if answer.is_error else ""))
            time.sleep(0.02)
    assert said[-1] == (503, "unavailable")
    assert httpx.codes.OK not in [status for status, _ in said[1:]]
    assert durable._reap() == -signal.SIGTERM


def test_a_waiting_call_is_answered_and_every_session_is_moved(durable: Coordinator) -> None:
    first, second = a_pair(durable)
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(first.report(wait_s=20)))
    waiting.start()
    time.sleep(0.3)
    began_s = time.monotonic()
    durable.stop()
    waiting.join()
    assert time.monotonic() - began_s < 3
    assert answers[0].status_code == 202
    assert answers[0].json()["missing"] == [{"rank": 1, "host": "host-1"}]
    for worker in (first, second):
        assert [event for event, _, _ in worker.events()][-1] == "move"


def test_half_a_body_does_not_hold_it_up(durable: Coordinator) -> None:
    with socket.create_connection(("127.0.0.1", durable.port)) as half:
        half.sendall(b"POST /v1/plan HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.2)
        began_s = time.monotonic()
        durable.stop()
        assert time.monotonic() - began_s < 3
        assert half.recv(100).startswith(b"HTTP/1.1 503 ")


def test_replaced_again_and_again_under_five_engines_it_loses_nobody(durable: Coordinator) -> None:
    heard: list[tuple[str, int]] = []
    there, go = threading.Barrier(11), threading.Event()

    def play(engine: str, rank: int) -> None:
        with Rendezvous.join(
            url=durable.url, engine=engine, ranks=[rank], layout=Layout(tp=2), launch="run-1"
        ) as rdzv:
            there.wait(30)
            go.wait(60)
            agreed = rdzv.report(REPORT)
            heard.append((engine, agreed.entries["kv"]))
            rdzv.applied(built=agreed.entries)

    engines = [an_engine() for _ in range(5)]
    ranks = [threading.Thread(target=play, args=(e, rank)) for e in engines for rank in range(2)]
    for thread in ranks:
        thread.start()
    there.wait(30)
    for _ in range(5):
        assert durable.stop() == -signal.SIGTERM
        durable.start()
    go.set()
    for thread in ranks:
        thread.join(60)
    assert sorted(heard) == sorted((engine, 9) for engine in engines for _ in range(2))
    rows = httpx.get(f"{durable.url}/v1/budgets").json()["budgets"]
    assert [(row["round"], row["state"]) for row in rows] == [(1, "SEALED")] * 5
