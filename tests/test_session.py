"""The session: what it reads, and how it holds on."""

import socket
import time

import pytest

from kvaccord.errors import Superseded
from tests.fake_coordinator import CUT, a_decision, fake_coordinator
from tests.test_flow import SEAT
from worker_client.session import EVENT_MAX_BYTES, Event, Session, events
from worker_client.wire import Wire


@pytest.fixture
def server():
    with fake_coordinator() as server:
        yield server


@pytest.fixture
def session(server):
    wire = Wire(server.url)
    session = Session(wire, SEAT)
    yield session
    session.close(wait_s=1.0)
    assert not session._thread.is_alive()
    wire.close()


def headers_of(server):
    return [headers for word, headers, _ in server.told if word == "session"]


# Reading


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_read_however_they_are_cut_into_parts(size):
    sent = (
        b": hello\n\nevent: fact\nid: 3.0\ndata: {}\n\n: comment\n\n"
        b'event:decision\r\nid:3.1\r\ndata:{"a":1}\r\n\r\ndata: x\ndata: y\n\nevent: cut\nda'
    )
    parts = [sent[i : i + size] for i in range(0, len(sent), size)]
    assert list(events(iter(parts))) == [
        Event("fact", "3.0", b"{}"),
        Event("decision", "3.1", b'{"a":1}'),
        Event("", "3.1", b"x\ny"),
    ]


def test_an_event_without_end_is_not_kept_for_ever():
    with pytest.raises(ValueError, match="without end"):
        list(events(iter([b"data: ", b"x" * EVENT_MAX_BYTES, b"x"])))


# Holding on


def test_the_session_is_up_when_start_returns(server, session):
    session.start(wait_s=5.0)
    assert session.hear("decision", 0.0).attached
    [headers] = headers_of(server)
    assert headers["kvaccord-attempt"] == "t0k3n"
    assert "last-event-id" not in headers


def test_the_kernel_takes_a_large_decision_while_this_process_does_not_read(server, session):
    with socket.socket() as usual:
        before_bytes = usual.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    session.start(wait_s=5.0)
    room_bytes = session._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    assert room_bytes >= 2 * before_bytes


def test_a_decision_ends_the_wait(server, session):
    session.start(wait_s=5.0)
    server.push("decision", a_decision().body)
    news = session.hear("decision", 5.0)
    assert news.document == a_decision()


def test_a_cut_stream_is_taken_up_within_the_servers_second(server, session):
    session.start(wait_s=5.0)
    server.push("fact", b"{}", ident="4.2")
    server.events.put(CUT)
    assert server.attached.acquire(timeout=1.0)  # the first
    began_s = time.monotonic()
    assert server.attached.acquire(timeout=1.0)
    assert time.monotonic() - began_s < 1.0
    assert headers_of(server)[-1]["last-event-id"] == "4.2"


def test_each_request_for_the_stream_has_a_greater_number(server, session):
    server.events.put(CUT)
    server.events.put(CUT)
    session.start(wait_s=5.0)
    for _ in range(3):
        assert server.attached.acquire(timeout=5.0)
    assert server.openings[:3] == ["1", "2", "3"]


def test_a_cut_ends_the_wait_unless_it_is_a_pause(server, session):
    session.start(wait_s=5.0)
    server.answers["session"] = (503, {"code": "unavailable", "detail": "draining"})
    server.events.put(CUT)
    assert not session.hear("decision", 5.0).attached
    began_s = time.monotonic()
    session.hear("decision", 0.3, through_cuts=True)
    assert time.monotonic() - began_s >= 0.3


def test_garbage_on_the_stream_is_asked_for_again(server, session):
    session.start(wait_s=5.0)
    server.push("decision", a_decision(round=8).body, ident="5.0")
    assert server.ended.acquire(timeout=5.0)
    server.push("decision", a_decision().body, ident="5.0")
    assert session.hear("decision", 5.0, through_cuts=True).document == a_decision()
    assert "last-event-id" not in headers_of(server)[-1]


def test_a_refused_session_is_remembered_and_not_tried_again(server, session):
    server.answers["session"] = (410, {"code": "superseded", "detail": "restart 2 runs"})
    session.start(wait_s=5.0)
    news = session.hear("decision", 5.0)
    assert isinstance(news.problem, Superseded)
    session._thread.join(1.0)
    assert not session._thread.is_alive()
    assert len(headers_of(server)) == 1


@pytest.mark.parametrize("answer", [(404, b"<html>"), (202, b""), (500, b"oops")])
def test_a_proxy_without_a_coordinator_is_tried_again(server, session, answer):
    server.answers["session"] = answer
    session.start(wait_s=0.0)
    while len(headers_of(server)) < 2:
        time.sleep(0.02)
    server.answers["session"] = (200, b"")
    assert server.attached.acquire(timeout=10.0)


def test_the_stream_ends_with_the_round(server, session):
    session.start(wait_s=5.0)
    server.push("decision", a_decision("FAILED").body)
    session._thread.join(2.0)
    assert not session._thread.is_alive()
    assert session.hear("decision", 0.0).document == a_decision("FAILED")


def beats_of(server):
    return [body for word, _, body in server.told if word == "phase"]


def test_beats_begin_when_the_coordinator_has_seen_a_proxy(server, session, monkeypatch):
    monkeypatch.setattr("worker_client.session.BEAT_S", 0.1)
    session.start(wait_s=5.0)
    time.sleep(0.5)
    assert beats_of(server) == [], "nothing lies between, as far as anyone knows"
    server.headers["session"] = {"Kvaccord-Proxied": "1"}
    server.events.put(CUT)
    assert server.attached.acquire(timeout=1.0)
    assert server.attached.acquire(timeout=1.0)
    time.sleep(1.0)
    assert len(beats_of(server)) >= 2


def test_a_process_that_tells_its_phases_beats_too_once_a_proxy_is_seen(
    server, session, monkeypatch
):
    monkeypatch.setattr("worker_client.session.BEAT_S", 0.1)
    session.tell_phase(b'{"phase":"load","progress":3}')  # its thread waits for the next phase
    time.sleep(0.5)
    assert len(beats_of(server)) == 1
    server.headers["session"] = {"Kvaccord-Proxied": "1"}
    session.start(wait_s=5.0)
    time.sleep(1.0)
    assert len(beats_of(server)) >= 3
    assert beats_of(server)[-1] == {"phase": "load", "progress": 3}


@pytest.mark.parametrize("answer", [(200, b""), None])
def test_closing_ends_the_thread_while_it_reads(server, session, answer):
    server.answers["session"] = answer
    session.start(wait_s=0.3)
    began_s = time.monotonic()
    session.close(wait_s=5.0)
    assert time.monotonic() - began_s < 1.0
    assert not session._thread.is_alive()
