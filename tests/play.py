"""Plays a story to the shipped coordinator.

The application, service, rules and session streams are the real ones, without sockets; the clock is
virtual. A process does what the client does: it joins, claims, keeps a session, and once it hears a
plan it builds its row, and once it hears the seal it serves. What ends its round ends it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

from coordinator.api import create_app
from coordinator.logs.memory import MemoryLog
from coordinator.policies import Match, Policies, PolicyFile, PolicyRule
from coordinator.service import Service, Settings
from kvaccord.canonical import digest
from kvaccord.decision import Decision, Frozen, Outcome
from tests.story import (
    Act,
    Comes,
    Dies,
    Heard,
    History,
    Leaves,
    Look,
    Raises,
    Refusal,
    Reports,
    Restart,
    Returns,
    Seen,
    Shows,
    Story,
    Who,
)
from tests.virtual import run_virtually

BUILD_S = 3.0  # how long every process builds its pools; chosen
NETWORK_S = 0.05  # until the other side knows of a stream's end; chosen
LONGEST_S = 12 * 3600.0  # the budgets have ended every round long before


class Actor:
    """A process of the story."""

    def __init__(self, stage: Stage, who: Who) -> None:
        self.stage, self.who = stage, who
        self.token = ""
        self.round = 0
        self.alive = True
        self.over = False  # its round has ended other than well: it exits
        self._hung_up = asyncio.Event()
        self._session: asyncio.Task[None] | None = None
        self._building: asyncio.Task[None] | None = None

    async def call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        answer = await self.stage.call(
            method, f"/v1/engines/default/{self.who.engine}{path}", body, token=self.token
        )
        if answer.status_code >= 400:
            self.stage.refuse(self.who, answer)
        elif digest_ := answer.headers.get("Kvaccord-Digest"):
            self.hear(answer.content)
            assert digest(answer.content) == digest_
        return answer

    def hear(self, body: bytes) -> None:
        document = json.loads(body)
        frozen: Frozen = Decision(body) if "verdict" in document else Outcome(body)
        self.stage.history.heard.append(Heard(self.stage.now_s, self.who, frozen))
        if frozen.result in ("FAILED", "ABORTED"):
            self.over = True
        elif frozen.result == "PASSED" and self._building is None:
            self._building = asyncio.create_task(self._build(Decision(body)))

    async def _build(self, decision: Decision) -> None:
        await asyncio.sleep(BUILD_S)
        if self.alive and not self.over:
            built = {str(rank): decision.entries(rank) for rank in self.who.ranks}
            said = {"digest": decision.digest, "built": built}
            await self.call("PUT", f"/rounds/{self.round}/applied", said)

    async def comes(self, join: Mapping[str, Any]) -> None:
        """Join and claim, for as long as another start holds the name; then attach."""
        joined = await self.call("POST", "/join", join)
        if joined.status_code != 200:
            return
        self.token = joined.json()["token"]
        until_s = self.stage.now_s + joined.json()["patience_s"]
        while self.alive:
            claimed = await self.call("POST", "/claim")
            if claimed.status_code == 200:
                self.round = claimed.json()["round"]
                if claimed.json()["outcome"] in ("FAILED", "ABORTED"):
                    await self.call("GET", f"/rounds/{self.round}/outcome")
                else:
                    self.attach()
                return
            again_s = claimed.json().get("retry_after_s")
            if again_s is None or self.stage.now_s > until_s:
                return
            await asyncio.sleep(again_s)

    def attach(self) -> None:
        if self._session is None or self._session.done():
            self._hung_up = asyncio.Event()
            self._session = asyncio.create_task(self._listen())

    async def hang_up(self) -> None:
        self._hung_up.set()
        if self._session:
            await self._session

    async def _listen(self) -> None:
        """The session, as the application streams it."""

        async def receive() -> dict[str, Any]:
            await self._hung_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: Mapping[str, Any]) -> None:
            for line in message.get("body", b"").split(b"\n"):
                if line.startswith(b"event: "):
                    event.append(line[7:])
                elif line.startswith(b"data: ") and event[-1] in (b"decision", b"outcome"):
                    self.hear(line[6:])
                    if event[-1] == b"outcome" and not self.over:
                        serving = self.call("POST", f"/rounds/{self.round}/serving")
                        self.stage.do(serving)

        event: list[bytes] = []
        path = f"/v1/engines/default/{self.who.engine}/rounds/{self.round}/session"
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"kvaccord-attempt", self.token.encode())],
        }
        await self.stage.app(scope, receive, send)  # type: ignore[arg-type]


class Stage:
    """The coordinator, and everyone who has come."""

    def __init__(self, story: Story) -> None:
        self.story, self.history = story, History()
        self.actors: dict[Who, Actor] = {}
        self.log = MemoryLog()
        self._began_s = asyncio.get_running_loop().time()
        self._chores: set[asyncio.Task[Any]] = set()

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began_s

    def do(self, chore: Any) -> None:
        task = asyncio.create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def open(self) -> None:
        rules = tuple(
            PolicyRule(match=Match(engine=engine), set=fields)
            for engine, fields in self.story.engines.items()
        )
        settings = Settings(
            policies=Policies(file=PolicyFile(rules=rules)), lost_after_s=self.story.lost_after_s
        )
        self.service = Service(self.log, settings)
        self.app = create_app(self.service)
        await self.service.start()

    async def restart(self) -> None:
        await self.service.close()
        await asyncio.sleep(NETWORK_S)  # the streams end by themselves
        await self.open()
        for actor in self.actors.values():
            if actor.alive and not actor.over and actor.round:
                actor.attach()

    async def call(self, method: str, path: str, body: Any, token: str = "") -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as client:
            headers = {"Kvaccord-Attempt": token} if token else {}
            if body is not None:
                # As the standard library writes it, also what is no JSON: the answer shows it.
                headers["Content-Type"] = "application/json"
                return await client.request(method, path, headers=headers, content=json.dumps(body))
            return await client.request(method, path, headers=headers)

    def refuse(self, who: Who, answer: httpx.Response) -> None:
        refusal = Refusal(self.now_s, who, answer.status_code, answer.json())
        self.history.refusals.append(refusal)

    # --- playing --------------------------------------------------------------------------------

    async def play(self) -> History:
        await self.open()
        self.do(self._note_documents())
        for act in sorted(self.story.acts, key=lambda act: act.at_s):
            await asyncio.sleep(max(0.0, act.at_s - self.now_s))
            match act:
                case Look(engine=engine):
                    self.history.seen.append(Seen(self.now_s, engine, await self.look(engine)))
                case Restart():
                    await self.restart()
                case _:
                    await self.act(act)
        await self._end()
        for engine in self.story.engines:
            self.history.status[engine] = await self.look(engine)
        self.history.rounds = {who: a.round for who, a in self.actors.items() if a.round}
        await self.service.close()
        await asyncio.sleep(NETWORK_S)
        for task in self._chores:
            task.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        return self.history

    async def act(self, act: Act) -> None:
        actor = self.actors.get(act.who)
        if isinstance(act, Comes):
            if actor is None:
                actor = self.actors[act.who] = Actor(self, act.who)
            coming = asyncio.create_task(actor.comes(act.join))
            await asyncio.wait({coming}, timeout=NETWORK_S)  # it may have to wait for the name
            self._chores.add(coming)
            coming.add_done_callback(self._chores.discard)
            return
        assert actor is not None, f"{act.who} acts before it comes"
        here = f"/rounds/{actor.round}"
        if not actor.round:
            return  # it was refused when it came
        match act:
            case Shows(phase=phase, progress=progress):
                if not actor.over:
                    said = {"phase": phase, "progress": progress}
                    await actor.call("POST", f"{here}/phase", said)
            case Reports(report=report):
                said = {str(rank): dict(report) for rank in actor.who.ranks}
                answer = await actor.call("PUT", f"{here}/reports", said)
                if answer.status_code == 422:  # the client leaves its start with what it heard
                    text = answer.json()["detail"]
                    await actor.call(
                        "PUT", f"{here}/veto", {"rank": actor.who.ranks[0], "text": text}
                    )
            case Raises(text=text):
                await actor.call("PUT", f"{here}/veto", {"rank": actor.who.ranks[0], "text": text})
            case Leaves(reason=reason):
                await actor.call("PUT", f"{here}/leave", {"reason": reason})
            case Dies():
                actor.alive = False
                await actor.hang_up()
                await asyncio.sleep(NETWORK_S)
            case Returns():
                actor.alive = True
                actor.attach()
            case _:
                raise AssertionError(f"no such act: {act}")

    async def look(self, engine: str) -> dict[str, Any]:
        answer = await self.call("GET", f"/v1/engines/default/{engine}/rounds/current", None)
        assert answer.status_code == 200, f"{engine}: nobody has claimed: {answer.text}"
        status: dict[str, Any] = answer.json()
        return status

    async def _note_documents(self) -> None:
        """Note every document when it is logged, to the tenth of a second."""
        while True:
            for engine in self.service.engines:
                for number, round_ in engine.rounds.items():
                    key = (engine.name.engine, number)
                    if round_.decision and key not in self.history.decisions:
                        self.history.decisions[key] = (self.now_s, Decision(round_.decision))
                    if round_.outcome and key not in self.history.outcomes:
                        self.history.outcomes[key] = (self.now_s, Outcome(round_.outcome))
            await asyncio.sleep(0.1)

    async def _end(self) -> None:
        """Until every round has ended, nobody waits for a name, and every absence is judged."""
        while any(e.last and e.last.open for e in self.service.engines):
            assert self.now_s < LONGEST_S, "a round that nothing ends"
            await asyncio.sleep(1.0)
        await asyncio.sleep(self.story.lost_after_s + 2.0)


def play(story: Story) -> History:
    async def stage() -> History:
        return await Stage(story).play()

    history = run_virtually(stage())
    _check_copies(history)
    return history


def _check_copies(history: History) -> None:
    """Whoever heard a document heard the same bytes, and they are those of the log."""
    for heard in history.heard:
        kept: Mapping[tuple[str, int], tuple[float, Frozen]] = (
            history.decisions if isinstance(heard.document, Decision) else history.outcomes
        )
        _, logged = kept[(heard.who.engine, heard.document.round)]
        assert heard.document.body == logged.body, heard.who
