"""What the simulation found, each as a plain story. docs/reliability.md has the seeds."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI
from starlette.types import Message

from coordinator.api import create_app
from coordinator.api.session import SessionStream
from coordinator.events import Departed, EngineName
from coordinator.logs import Elapsed
from coordinator.logs.memory import MemoryLog
from coordinator.service import Service, Settings
from kvaccord import Layout, messages
from kvaccord.decision import Decision
from kvaccord.errors import DuplicateRank
from tests.builders import Log, a_join, a_launch, a_report
from tests.simulation.night import search


def test_a_process_of_two_ranks_departs_once():
    log = Log()
    old = log.claimed(0, 1, layout=Layout(tp=2))
    old.reports()
    old.applies()
    newer = log.joined(a_join(0, 1, layout=Layout(tp=2)))
    departed = [e for e in newer.claims() if isinstance(e, Departed)]
    assert [e.attempt for e in departed] == [old.attempt]


def test_a_duplicate_is_not_told_passed():
    log = Log()
    log.passed(90, 90)
    duplicate = log.claimed(0, layout=Layout(tp=2))
    assert not duplicate.member.seated
    with pytest.raises(DuplicateRank, match=r"rank 0 .* holds no slot of round 1"):
        duplicate.reports()


def test_a_session_request_that_was_held_up_does_not_end_the_session_that_counts():
    name, ended = EngineName("default", "llama"), asyncio.Event()

    async def story() -> tuple[str, bool]:
        service = Service(MemoryLog(), Settings(reattach_s=0.05))
        app = create_app(service)
        await service.start()
        joined = await service.join(name, a_join(0, layout=Layout(tp=2)))
        attempt, token = joined["attempt"], joined["token"]
        await service.claim(name, attempt)
        later = asyncio.create_task(ask(app, token, "opening=2", asyncio.Event()))
        await asyncio.sleep(0.05)
        ended.set()  # its process has long given it up
        early = await ask(app, token, "opening=1", ended)
        await asyncio.sleep(0.2)
        round_ = service.round(name, 1)
        there = attempt in service.presence.watched(name) and not round_.causes
        later.cancel()
        await service.close()
        return early, there

    async def ask(app: FastAPI, token: str, query: str, left: asyncio.Event) -> str:
        sent: list[Message] = []

        async def receive() -> Message:
            if not sent:
                return {"type": "http.request", "body": b""}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        path = f"/v1/engines/{name}/rounds/1/session"
        headers = [(b"kvaccord-attempt", token.encode())]
        scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
        await app({**scope, "query_string": query.encode()}, receive, send)
        return str(sent[0]["status"])

    assert asyncio.run(story()) == ("503", True)


def test_nobody_is_given_up_while_a_coordinator_that_starts_reads_the_logs_of_others():
    class SlowLog(MemoryLog):
        async def elapsed(self, engine: EngineName) -> Elapsed | None:
            await asyncio.sleep(0.5)
            return await super().elapsed(engine)

    names = [EngineName("default", "first"), EngineName("default", "second")]

    async def story() -> list[str]:
        log = SlowLog()
        before = Service(log, Settings())
        await before.start()
        for name in names:
            attempt = (await before.join(name, a_join(0, layout=Layout(tp=2))))["attempt"]
            await before.claim(name, int(attempt))
        after = Service(log, Settings(reattach_s=0.1, lost_after_s=0.3))
        await after.start()
        codes = [cause.code for cause in after.round(names[0], 1).causes]
        await after.close()
        return codes

    assert asyncio.run(story()) == []


def test_a_late_member_of_a_failed_start_still_hears_why():
    log = Log()
    first = log.claimed(0, layout=Layout(tp=2))
    first.vetoes()
    log.spends("grace")
    late = log.claimed(1, layout=Layout(tp=2))
    assert late.reports() == ()
    assert late.round.state == "FAILED"


@pytest.mark.parametrize("seed", [256, 7016, 7118, 30231, 30244, 30417, 240819595])
def test_a_seed_that_once_broke_a_promise_keeps_it(seed):
    assert search(seed).broken == []


def test_who_serves_and_is_told_to_give_way_is_not_taken_for_alive_for_ever():
    name = EngineName("default", "llama")

    async def enter(service: Service, restart: int) -> int:
        join = a_join(0, layout=Layout(), launch=a_launch(restart=restart))
        attempt = int((await service.join(name, join))["attempt"])
        await service.claim(name, attempt)
        return attempt

    async def story() -> list[int]:
        service = Service(MemoryLog(), Settings(reattach_s=0.05, lost_after_s=0.05))
        await service.start()
        old = await enter(service, restart=0)
        stream = SessionStream(service, await service.attach(name, 1, old), None)
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        streaming = asyncio.create_task(stream({"type": "http"}, asyncio.Future, send))
        await service.report(name, 1, old, {0: a_report()}, planned={}, wait_s=0)
        built = Decision(service.round(name, 1).decision)
        said = messages.Applied(digest=built.digest, built=built.entries(0))
        await service.applied(name, 1, old, said, wait_s=0)
        await service.serve(name, 1, old)
        await enter(service, restart=1)
        await streaming
        assert b"event: problem" in sent[-2]["body"]
        await asyncio.sleep(0.5)  # and then it is killed, without a word
        departed = service.round(name, 1).departed
        await service.close()
        return departed

    assert asyncio.run(story()) == [0]
