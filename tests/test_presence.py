"""Sessions that end and return, alone and together. Time is real, but short."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from coordinator.commands import Finding, Lose, Suspect
from coordinator.events import EngineName
from coordinator.presence import Presence, Seat
from coordinator.served import served_sleep
from coordinator.service import Settings
from kvaccord.errors import Unavailable
from tests.wire import Coordinator, Worker, an_engine, serving

LLAMA = EngineName("default", "llama")


class Found:
    """Collects what presence finds."""

    def __init__(self, patience_s: float = 0.05, doubt_s: float = 0.3) -> None:
        self.findings: list[Finding] = []
        self.presence = Presence(
            self.keep, lambda _: patience_s, doubt_s, silent_after_s=0.2, lost_after_s=0.6
        )

    async def keep(self, name: EngineName, finding: Finding) -> None:
        self.findings.append(finding)

    def lost(self) -> list[int]:
        return [f.attempt for f in self.findings if isinstance(f, Lose)]

    def suspected(self) -> list[int]:
        return [f.attempt for f in self.findings if isinstance(f, Suspect)]


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def seat(attempt: int) -> Seat:
    return Seat(LLAMA, 1, attempt)


def test_a_session_that_ends_makes_suspect_at_once_and_lost_after_its_patience():
    async def story() -> None:
        found = Found()
        connection = found.presence.attach(seat(1), "a")
        found.presence.detach(connection, by_peer=True)
        await asyncio.sleep(0.01)
        assert [type(f) for f in found.findings] == [Suspect]
        await asyncio.sleep(0.1)
        assert found.lost() == [1]

    run(story())


def test_who_comes_back_is_not_lost_and_the_older_sessions_end_is_nothing():
    async def story() -> None:
        found = Found()
        older = found.presence.attach(seat(1), "a")
        newer = found.presence.attach(seat(1), "a")
        found.presence.detach(older, by_peer=True)
        await asyncio.sleep(0.1)
        assert found.findings == []
        found.presence.detach(newer, by_peer=True)
        await asyncio.sleep(0.01)
        found.presence.attach(seat(1), "a")
        await asyncio.sleep(0.1)
        assert found.lost() == []

    run(story())


def test_a_session_request_that_was_held_up_does_not_take_the_place_of_a_later_one():
    async def story() -> None:
        found = Found()
        connection = found.presence.attach(seat(1), "a", opening=2)
        with pytest.raises(Unavailable, match=r"session request 1 of attempt 1 .* request 2"):
            found.presence.attach(seat(1), "a", opening=1)
        assert found.presence.watched(LLAMA) == {1}
        found.presence.detach(connection, by_peer=True)
        with pytest.raises(Unavailable):  # its process may be dead: this is no return
            found.presence.attach(seat(1), "a", opening=1)
        await asyncio.sleep(0.1)
        assert found.lost() == [1]

    run(story())


def test_a_session_request_without_number_counts_as_the_newest():
    async def story() -> None:
        found = Found()
        found.presence.attach(seat(1), "a", opening=2)
        newest = found.presence.attach(seat(1), "a")
        found.presence.detach(newest, by_peer=True)
        await asyncio.sleep(0.01)
        assert found.suspected() == [1]

    run(story())


def test_the_numbers_of_a_process_are_kept_no_longer_than_its_session_is_waited_for():
    async def story() -> None:
        found = Found()
        for attempt in (1, 2, 3):
            connection = found.presence.attach(seat(attempt), "a", opening=7)
            found.presence.detach(connection, by_peer=attempt > 1)
        found.presence.forget([seat(2)])
        await asyncio.sleep(0.1)
        assert found.lost() == [3]
        assert found.presence._openings == {}

    run(story())


def test_ends_that_mean_nothing_find_nothing_and_put_nothing_in_doubt():
    async def story() -> None:
        found: list[Finding] = []

        async def keep(name: EngineName, finding: Finding) -> None:
            found.append(finding)

        presence = Presence(keep, lambda _: None, 0.3)  # as of a round that was sealed
        connections = [presence.attach(seat(n), f"host-{n}") for n in range(10)]
        for connection in connections:
            presence.detach(connection, by_peer=True)
        await asyncio.sleep(0.05)
        assert found == []
        assert presence.doubt_left_s == 0

    run(story())


def test_only_those_of_a_round_that_has_ended_are_forgotten():
    async def story() -> None:
        found = Found()
        for n in (1, 2):
            found.presence.detach(found.presence.attach(seat(n), "a"), by_peer=True)
        found.presence.forget([seat(1)])
        await asyncio.sleep(0.2)
        assert found.lost() == [2]

    run(story())


def test_a_session_that_the_coordinator_closed_starts_no_clock():
    async def story() -> None:
        found = Found()
        found.presence.detach(found.presence.attach(seat(1), "a"), by_peer=False)
        await asyncio.sleep(0.1)
        assert found.findings == []

    run(story())


def test_who_never_opens_a_session_is_lost_when_its_time_is_over():
    async def story() -> None:
        found = Found()
        found.presence.expect(seat(1), within_s=0.05)
        await asyncio.sleep(0.12)
        (lose,) = [f for f in found.findings if isinstance(f, Lose)]
        assert lose.session == "not opened"

    run(story())


def test_many_sessions_of_many_hosts_that_end_together_put_the_network_in_doubt():
    async def story() -> None:
        found = Found()
        open_ = [found.presence.attach(seat(n), f"host-{n % 4}") for n in range(20)]
        for connection in open_[:8]:
            found.presence.detach(connection, by_peer=True)
        await asyncio.sleep(0.15)
        assert found.lost() == []
        assert found.presence.doubt_left_s > 0
        for connection in open_[1:8]:
            found.presence.attach(connection.seat, connection.host)
        await asyncio.sleep(0.3)
        assert found.lost() == [0], "and the one that is really gone is lost in the end"

    run(story())


@pytest.mark.parametrize(("ending", "hosts"), [(8, 2), (3, 8)])
def test_few_sessions_or_few_hosts_are_no_reason_for_doubt(ending: int, hosts: int):
    async def story() -> None:
        found = Found()
        open_ = [found.presence.attach(seat(n), f"host-{n % hosts}") for n in range(40)]
        for connection in open_[:ending]:
            found.presence.detach(connection, by_peer=True)
        await asyncio.sleep(0.15)
        assert found.lost() == list(range(ending))

    run(story())


def test_a_pause_of_the_coordinator_counts_against_nobody():
    async def story() -> None:
        began_s = time.monotonic()
        waiting = asyncio.create_task(served_sleep(1.0))
        await asyncio.sleep(0.1)
        time.sleep(2.0)  # noqa: ASYNC251  the pause itself
        await asyncio.sleep(0.1)
        assert not waiting.done(), "only one tick of the pause has counted"
        await waiting
        assert time.monotonic() - began_s >= 2.5

    run(story())


# Behind a proxy


def test_a_proxied_session_without_beats_makes_suspect_and_then_lost_while_it_is_open():
    async def story() -> None:
        found = Found()
        found.presence.attach(seat(1), "a", proxied=True)
        await asyncio.sleep(0.1)
        assert found.findings == []
        assert found.presence.watched(LLAMA) == {1}
        await asyncio.sleep(0.25)
        assert [type(f) for f in found.findings] == [Suspect]
        assert found.presence.watched(LLAMA) == frozenset(), "nobody takes it for alive"
        await asyncio.sleep(0.55)
        (lose,) = [f for f in found.findings if isinstance(f, Lose)]
        assert (lose.session, lose.after_s) == ("silent", 0.6)
        await asyncio.sleep(0.5)
        assert len(found.findings) == 2, "it is said once"

    run(story())


def test_a_proxied_process_that_beats_is_there_and_one_that_is_not_proxied_need_not():
    async def story() -> None:
        found = Found()
        found.presence.attach(seat(1), "a", proxied=True)
        found.presence.attach(seat(2), "a")
        for _ in range(12):
            await asyncio.sleep(0.1)
            found.presence.heard(seat(1))
        assert found.findings == []
        assert found.presence.watched(LLAMA) == {1, 2}

    run(story())


def test_a_beat_of_a_silent_one_is_its_return_and_its_silence_is_counted_anew():
    async def story() -> None:
        found = Found()
        found.presence.attach(seat(1), "a", proxied=True)
        await asyncio.sleep(0.4)
        found.presence.heard(seat(1))
        assert found.presence.watched(LLAMA) == {1}
        await asyncio.sleep(0.4)
        assert (found.suspected(), found.lost()) == ([1, 1], [])
        await asyncio.sleep(0.5)
        assert found.lost() == [1]

    run(story())


def test_when_the_proxy_ends_the_stream_of_a_silent_one_it_need_not_wait_any_longer():
    async def story() -> None:
        found = Found()
        connection = found.presence.attach(seat(1), "a", proxied=True)
        await asyncio.sleep(0.3)
        found.presence.detach(connection, by_peer=True)
        await asyncio.sleep(0.1)
        (lose,) = [f for f in found.findings if isinstance(f, Lose)]
        assert lose.session == "ended"

    run(story())


def test_a_pause_of_the_coordinator_silences_nobody():
    async def story() -> None:
        found = Found()
        found.presence.attach(seat(1), "a", proxied=True)
        await asyncio.sleep(0.05)
        time.sleep(1.0)  # noqa: ASYNC251  the pause itself
        await asyncio.sleep(0.01)
        found.presence.heard(seat(1))
        await asyncio.sleep(0.1)
        assert found.findings == []

    run(story())


@pytest.mark.parametrize(("lost_after_s", "proxied_lost_after_s"), [(200.0, 120.0), (1.0, 49.0)])
def test_a_proxied_session_is_not_judged_sooner_than_others_nor_before_it_is_suspect(
    lost_after_s: float, proxied_lost_after_s: float
) -> None:
    with pytest.raises(ValueError, match=r"proxied_lost_after_s .* raise it"):
        Settings(lost_after_s=lost_after_s, proxied_lost_after_s=proxied_lost_after_s)


SERVE = """
    import sys
    import uvicorn
    from cli.serve import _listen, _Server
    from coordinator.api import create_app
    from coordinator.logs.memory import MemoryLog
    from coordinator.service import Service, Settings
    settings = Settings(lost_after_s=2.0, silent_after_s=1.0, proxied_lost_after_s=3.0)
    service = Service(MemoryLog(), settings)
    listener = _listen("127.0.0.1", int(sys.argv[-1]))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/ on memory", flush=True)
    _Server(uvicorn.Config(create_app(service), log_config=None), service, None).run([listener])
    """

WAIT = """
    import sys, time
    import worker_client.session
    from kvaccord import Layout
    from worker_client import Rendezvous
    worker_client.session.BEAT_S = 0.3
    with Rendezvous.join(
        url=sys.argv[1], engine=sys.argv[2], ranks=[1], layout=Layout(tp=2), launch="run-1"
    ):
        print("there", flush=True)
        time.sleep(60)
    """


class Brisk(Coordinator):
    """A real coordinator whose proxied sessions are silent after 1 s and lost after 3."""

    def start(self) -> None:
        self._command = [sys.executable, "-c", textwrap.dedent(SERVE)]
        super().start()


@pytest.fixture
def brisk() -> Iterator[Coordinator]:
    running = Brisk()
    yield running
    running.kill()


class Proxy:
    """Carries bytes to a port, signs requests as a proxy does, and never hangs up on the server."""

    def __init__(self, target: int, *, signs: bool) -> None:
        self._target, self._signs = target, signs
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._held: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._held += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._signs:
                    data = data.replace(b" HTTP/1.1\r\n", b" HTTP/1.1\r\nVia: 1.1 relay\r\n", 1)
                target.sendall(data)

    def close(self) -> None:
        self._listener.close()
        for held in self._held:
            held.close()


@contextlib.contextmanager
def a_process_behind_a_proxy(
    coordinator: Coordinator, engine: str, *, signs: bool
) -> Iterator[subprocess.Popen[str]]:
    proxy = Proxy(coordinator.port, signs=signs)
    command = [sys.executable, "-c", textwrap.dedent(WAIT), proxy.url, engine]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        yield process
    finally:
        process.kill()
        process.communicate()
        proxy.close()


def presence(worker: Worker) -> list[str]:
    return [m["presence"] for m in worker.http.get(f"{worker.at}/status").json()["members"]]


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_ends_or_stops_behind_a_proxy_that_holds_its_stream_is_lost(
    brisk: Coordinator, how: signal.Signals
) -> None:
    engine = an_engine()
    first = Worker(brisk.url, engine, 0, tp=2).enter()
    with a_process_behind_a_proxy(brisk, engine, signs=True) as process:
        time.sleep(2.0)  # nobody told it of the proxy, and it beats
        assert presence(first) == ["present", "present"]
        process.send_signal(how)
        began_s = time.monotonic()
        verdict = first.report(wait_s=15).json()["verdict"]
        assert 1.5 <= time.monotonic() - began_s < 3.0 + 3.0
    assert (verdict["code"], verdict["ranks"]) == ("rank_lost", [1])
    assert "held open by a proxy" in verdict["causes"][0]["text"]


def test_a_process_that_stops_is_not_lost_where_no_proxy_signs(brisk: Coordinator) -> None:
    engine = an_engine()
    first = Worker(brisk.url, engine, 0, tp=2).enter()
    with a_process_behind_a_proxy(brisk, engine, signs=False) as process:
        process.send_signal(signal.SIGSTOP)
        assert first.report(wait_s=5).status_code == 202
        assert presence(first) == ["present", "present"]


def a_session_that_nobody_reads(worker: Worker, query: str) -> socket.socket:
    """Its receive buffer is full of what a few ranks say, as a usual one is in a large start."""
    session = socket.socket()
    session.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    session.connect(("127.0.0.1", worker.http.base_url.port))
    head = f"GET {worker.at}/session?{query} HTTP/1.1\r\nHost: x\r\n"
    session.sendall(f"{head}Kvaccord-Attempt: {worker.token}\r\n\r\n".encode())
    return session


def test_a_busy_rank_that_asks_for_no_facts_keeps_its_session_however_much_the_others_say() -> None:
    with serving() as coordinator:
        engine = an_engine()
        talker, reader, busy = (Worker(coordinator.url, engine, n, tp=4).enter() for n in range(3))
        with (
            a_session_that_nobody_reads(reader, "facts=1"),
            a_session_that_nobody_reads(busy, "facts=0"),
        ):
            time.sleep(0.2)
            for _ in range(100):  # each time it is suspect, and cleared
                talker.hang_up()
                talker.attach()
                time.sleep(0.01)
            verdict = talker.report(wait_s=25).json()["verdict"]  # the kernel takes 8 s
            assert (verdict["code"], verdict["ranks"]) == ("rank_lost", [1])


def test_any_call_of_a_silent_process_clears_it_though_its_stream_never_ended(
    brisk: Coordinator,
) -> None:
    engine = an_engine()
    first = Worker(brisk.url, engine, 0, tp=2).enter()
    second = Worker(brisk.url, engine, 1, tp=2)
    second.http.headers["X-Forwarded-For"] = "10.0.0.1"
    second.enter()
    for _ in range(2):
        time.sleep(1.7)
        assert presence(first) == ["present", "suspect"]
        assert second.put("reports", {"1": {}}).status_code == 422
        assert presence(first) == ["present", "present"]
    time.sleep(1.7)
    first.report()
    assert second.report(wait_s=5).json()["verdict"]["outcome"] == "PASSED"
