"""Any calls, in any order, of several processes and starts: what was answered must hold."""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

import httpx
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvaccord.canonical import digest
from tests.properties.oracle import Oracle, Process
from tests.properties.search import TIMES, search
from tests.properties.world import APPLY_S, GATHER_S, LOST_AFTER_S, REPORT_S, Session, World

ENGINES = st.sampled_from(["one", "one", "one", "two"])
LAUNCHES = st.sampled_from([("a", 0), ("a", 0), ("a", 0), ("a", 1), ("b", 0), ("c", 0)])
PAGES = st.sampled_from([90, 90, 90, 70, 5])
WAITS = st.sampled_from([0, 0, 0, 0.2, 3])
# What a search of any use comes by.
REACHED = {"agreed", "sealed", "rank_lost", "rank_left", "superseded", "conflict", "cancelled"}
VERBS = ("claim", "report", "applied", "veto", "leave", "phase", "serving", "check", "join")


class Calls(RuleBasedStateMachine):
    """Two engines. A process is anyone who joins; it may say anything at any time, and twice."""

    processes = Bundle("processes")

    @initialize()
    def begin(self) -> None:
        self.world = World()
        self.oracle = Oracle()
        self.made = 0

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.settle()
                Calls.seen |= self.oracle.seen
            finally:
                self.world.close()

    seen: ClassVar[set[str]] = set()

    # --- whole starts ---------------------------------------------------------------------------

    @rule(target=processes, engine=ENGINES, launch=LAUNCHES, tp=st.integers(1, 3), data=st.data())
    def a_process_joins(
        self, engine: str, launch: tuple[str, int], tp: int, data: st.DataObject
    ) -> Process:
        ranks = data.draw(st.sampled_from([[r] for r in range(tp)] + [list(range(tp))]))
        process = self.a_process(engine, launch, tp, ranks)
        self.do(process, "join")
        return process

    @rule(target=processes, engine=ENGINES, launch=LAUNCHES, tp=st.integers(1, 3), late=st.data())
    def a_start_comes(
        self, engine: str, launch: tuple[str, int], tp: int, late: st.DataObject
    ) -> Any:
        """Every rank joins, claims and attaches, and goes on, as far as it may."""
        start = [self.a_process(engine, launch, tp, [rank]) for rank in range(tp)]
        pages, steps = late.draw(PAGES), late.draw(st.integers(3, 5))
        for verb in ("join", "claim", "attach", "report", "applied")[:steps]:
            for process in start:
                self.do(process, verb, pages=pages)
        return multiple(*start)

    @rule(process=processes, data=st.data())
    def the_start_goes_on(self, process: Process, data: st.DataObject) -> None:
        """Whoever is in the round of this one does what comes next."""
        told = self.oracle.engines[process.engine]
        verb = data.draw(st.sampled_from(["attach", "report", "applied"]))
        for each in told.processes:
            if each.round == process.round > 0:
                self.do(each, verb)

    # --- single calls ---------------------------------------------------------------------------

    @rule(process=processes, verb=st.sampled_from(VERBS), pages=PAGES, wait_s=WAITS)
    def it_calls(self, process: Process, verb: str, pages: int, wait_s: float) -> None:
        self.do(process, verb, pages=pages, wait_s=wait_s)

    @rule(process=processes)
    def it_attaches(self, process: Process) -> None:
        self.do(process, "attach")

    @rule(process=processes)
    def its_session_ends(self, process: Process) -> None:
        if process.session is not None and process.session.open:
            process.hung_up = True
            self.world.run(process.session.hang_up())

    @rule(process=processes, fault=st.sampled_from(["built", "digest", "failed"]))
    def it_builds_otherwise(self, process: Process, fault: str) -> None:
        self.do(process, "applied", fault=fault)

    @rule(process=processes, reports=st.sampled_from(["inputs", "rank", "none", "nonsense"]))
    def it_reports_nonsense(self, process: Process, reports: str) -> None:
        self.do(process, "report", fault=reports)

    @rule(process=processes, round_=st.integers(1, 6), verb=st.sampled_from(VERBS[1:]))
    def it_calls_another_round(self, process: Process, round_: int, verb: str) -> None:
        if round_ != process.round:
            self.do(process, verb, round_=round_)

    @rule(process=processes, other=processes)
    def it_uses_the_token_of_another(self, process: Process, other: Process) -> None:
        if process.engine != other.engine and other.token:
            path = f"{process.at}/rounds/1/reports"
            answer = self.call(process.engine, "PUT", path, other.token, self.reports(process, 90))
            assert answer.status_code in (401, 404, 410), answer.text

    @rule(
        data=st.data(),
        moment=st.lists(
            st.tuples(st.integers(0, 20), st.sampled_from(VERBS), WAITS), min_size=2, max_size=6
        ),
    )
    def they_call_at_one_moment(
        self, data: st.DataObject, moment: list[tuple[int, str, float]]
    ) -> None:
        everyone = [p for told in self.oracle.engines.values() for p in told.processes]
        if everyone:
            calls = [
                self.doing(everyone[at % len(everyone)], verb, wait_s=wait_s)
                for at, verb, wait_s in moment
            ]
            self.world.run(_all(calls))

    # --- operators, time, and the coordinator itself --------------------------------------------

    @rule(engine=ENGINES, what=st.sampled_from(["cancel", "retire"]), back=st.integers(0, 1))
    def an_operator_orders(self, engine: str, what: str, back: int) -> None:
        told = self.oracle.engines[engine]
        number = max(1, told.last_round - back)
        path = f"/v1/engines/default/{engine}/rounds/{number}/{what}"
        answer = self.call(engine, "POST", path, None, {"reason": "a test"})
        if what == "cancel" and answer.status_code == 200:
            told.cancelled.add(number)
            assert answer.headers["Kvaccord-Outcome"] != "open"

    @rule(engine=ENGINES, what=st.sampled_from(["decision", "outcome", "status", "reports", ""]))
    def someone_reads(self, engine: str, what: str) -> None:
        told = self.oracle.engines[engine]
        for number in (*range(max(1, told.last_round - 2), told.last_round + 1), "current"):
            path = f"/v1/engines/default/{engine}/rounds/{number}/{what}".rstrip("/")
            self.call(engine, "GET", path, None, None)
        for path in ("/v1/budgets", "/v1/engines", f"/v1/engines/default/{engine}/rounds"):
            self.call(engine, "GET", path, None, None)

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.2, 3.0, 6.0, 16.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.sleep(seconds)

    @rule()
    def the_coordinator_crashes(self) -> None:
        for told in self.oracle.engines.values():
            for process in told.processes:
                process.hung_up = True
        self.listen()
        self.world.crash()

    @precondition(lambda self: hasattr(self, "world"))
    @invariant()
    def what_the_sessions_brought_holds(self) -> None:
        self.listen()

    # --- how ------------------------------------------------------------------------------------

    def a_process(self, engine: str, launch: tuple[str, int], tp: int, ranks: list[int]) -> Process:
        self.made += 1
        body = {
            "ranks": ranks,
            "layout": {"tp": tp},
            "nonce": f"nonce-{self.made:04}",
            "launch": {"run": launch[0], "restart": launch[1]},
            "host": f"host-{ranks[0]}",
            "pid": self.made,
        }
        process = Process(engine, ranks, body)
        self.oracle.engines[engine].processes.append(process)
        return process

    def call(self, engine: str, method: str, path: str, token: str | None, body: Any) -> Any:
        answer = self.world.run(self.world.call(method, path, token, body))
        note(f"{method} {path} -> {answer.status_code} {answer.text[:120]}")
        self.oracle.hears(engine, answer, self.world.now_s)
        return answer

    def do(self, process: Process, verb: str, **how: Any) -> None:
        self.world.run(self.doing(process, verb, **how))

    async def doing(
        self,
        process: Process,
        verb: str,
        *,
        pages: int = 90,
        wait_s: float = 0,
        fault: str = "",
        round_: int = 0,
    ) -> None:
        if verb != "join" and process.token is None:
            return
        if verb == "attach":
            await self.attaching(process)
            return
        told, number = self.oracle.engines[process.engine], round_ or process.round or 1
        at, mine = f"{process.at}/rounds/{number}", number == process.round
        newest, last, sent_s = max(told.attempts, default=0), told.last_round, self.world.now_s
        method, path, body = "PUT", f"{at}/{verb}", None
        match verb:
            case "join":
                method, path, body = "POST", f"{process.at}/join", process.body
            case "claim":
                method, path = "POST", f"{process.at}/claim"
                process.claimed = True
            case "report":
                body = self.reports(process, pages, fault)
                path = f"{at}/reports?wait_s={wait_s}"
                if mine:
                    process.sent.append(body)
            case "applied":
                body = self.built(process, fault)
                path = f"{at}/applied?wait_s={wait_s}"
                if mine:
                    process.built.append(body)
            case "veto":
                body = {"rank": process.ranks[0], "text": "CUDA out of memory"}
            case "leave":
                body = {"reason": "a test"}
            case "phase":
                method, body = "POST", {"phase": "loading", "progress": int(sent_s * 10)}
            case "serving":
                method = "POST"
            case "check":
                method, body = "POST", self.reports(process, pages)
        token = None if verb == "join" else process.token
        answer = await self.world.call(method, path, token, body)
        note(f"{process.body['nonce']} {method} {path} -> {answer.status_code} {answer.text[:150]}")
        self.oracle.hears(process.engine, answer, self.world.now_s)
        if answer.status_code >= 300:
            if mine and verb in ("report", "applied"):  # refused: nothing of it is kept
                (process.sent if verb == "report" else process.built).remove(body)
            return
        if verb == "join":
            self.oracle.joined(process, answer.json(), newest)
        elif verb == "claim":
            self.oracle.claimed(process, answer.json(), last, sent_s)
        elif verb == "report" and mine and process.seated:
            assert process.reported in (None, body), "another report of the same rank is refused"
            process.reported = body
        elif verb in ("veto", "leave") and mine and answer.status_code == 202:
            decision = await self.world.call("GET", f"{at}/decision", None, None)
            if decision.status_code == 404:  # undecided, and a no is in the log
                told.never_passes.add(number)

    async def attaching(self, process: Process) -> None:
        if not process.round:
            return
        before = process.session
        path = f"{process.at}/rounds/{process.round}/session"
        assert process.token is not None
        session = Session(self.world, path, process.token, process.heard_of)
        await session.answered()
        note(f"{process.body['nonce']} GET {path} -> {session.status} {session.body[:80]!r}")
        if session.status != 200:
            answer = httpx.Response(session.status, content=session.body)
            self.oracle.hears(process.engine, answer, self.world.now_s)
            return
        if before is not None and before.open:  # of two sessions the newer one counts
            self.oracle.follows(process, before, self.world.now_s)
            await before.hang_up()
        process.session = session
        # From here on it must not be lost, unless it is already.
        status = await self.world.call("GET", path.removesuffix("/session"), None, None)
        ended = status.json()["state"] in ("FAILED", "SEALED", "ABORTED")
        process.hung_up = ended or bool(status.json()["causes"])

    def reports(self, process: Process, pages: int, fault: str = "") -> dict[str, Any]:
        one: dict[str, Any] = {
            "free_bytes": pages * 1000 + 500,
            "kv_budget_bytes": pages * 1000,
            "classes": [{"kind": "page", "name": "kv", "entry_bytes": 1000}],
            "inputs": {"dtype": "bf16"},
        }
        match fault:
            case "rank":
                return {str(rank + 1): one for rank in process.ranks}
            case "none":
                return {}
            case "nonsense":
                one |= {"free_bytes": -1}
            case "inputs":
                one |= {"classes": [], "unknown": 1}
        return {str(rank): one for rank in process.ranks}

    def built(self, process: Process, fault: str = "") -> dict[str, Any]:
        told = self.oracle.engines[process.engine]
        known = told.documents.get((process.round, "decision"))
        what = digest(known) if known and fault != "digest" else f"sha256:{'0' * 64}"
        if fault == "failed":
            return {"digest": what, "failed": {"text": "hipMalloc failed"}}
        plan = json.loads(known).get("plan") if known else None
        entries = plan["schedulers"][0]["entries"] if plan else {"kv": 1}
        if fault == "built":
            entries = {"kv": entries["kv"] + 1}
        return {"digest": what, "built": entries}

    def listen(self) -> None:
        for told in self.oracle.engines.values():
            for process in told.processes:
                if process.session is not None and process.session.status == 200:
                    self.oracle.follows(process, process.session, self.world.now_s)

    def settle(self) -> None:
        """Whatever was begun ends within its budgets, and the facts of it have no gap."""
        for _ in range(3):
            self.world.sleep(GATHER_S + 1)
        self.world.sleep(REPORT_S + APPLY_S + LOST_AFTER_S)
        self.listen()
        for engine, told in self.oracle.engines.items():
            if told.last_round:
                path = f"/v1/engines/default/{engine}/rounds/current"
                status = self.call(engine, "GET", path, None, None).json()
                assert status["state"] in ("FAILED", "SEALED", "ABORTED"), status
                assert status["round"] == told.last_round
                for name in ("decision", "outcome"):
                    self.call(engine, "GET", f"{path}/{name}", None, None)
            for process in told.processes:
                if process.round == told.last_round and process.round:
                    process.heard_of = None
                    self.do(process, "attach")
                    if process.session is not None and process.session.open:
                        self.world.sleep(0.1)
                        self.oracle.has_no_gap(process, process.session)


async def _all(calls: list[Any]) -> None:
    await asyncio.gather(*calls)


def test_any_order_of_calls_keeps_what_must_hold() -> None:
    Calls.seen = set()
    run_state_machine_as_test(Calls, settings=search(45, steps=40))
    lacking = REACHED - Calls.seen
    assert not lacking, f"the search never reached {lacking}: it proves less than it should"


if __name__ == "__main__":
    test_any_order_of_calls_keeps_what_must_hold()
    print(TIMES, sorted(Calls.seen))
