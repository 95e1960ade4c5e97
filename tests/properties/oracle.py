"""What must hold of all that a coordinator has answered: S1 to S7, S9, S10 and S12.

It knows what was said to whom, and none of the coordinator's own state or rules.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvaccord.canonical import digest
from kvaccord.errors import PROBLEMS
from tests.builders import is_canonical
from tests.properties.world import APPLY_S, GATHER_S, REPORT_S, Session


@dataclass
class Process:
    """One process and what it said and heard."""

    engine: str
    ranks: list[int]
    body: dict[str, Any]  # of its join
    token: str | None = None
    attempt: int = 0
    round: int = 0
    claimed: bool = False  # it sent its claim, whatever came of it
    seated: bool = False  # nobody of its start disputes its slots or its layout
    # Its reports and its accounts of what it built that were not refused: what the coordinator may
    # have kept. Of those that were acknowledged there is one.
    sent: list[dict[str, Any]] = field(default_factory=list)
    reported: dict[str, Any] | None = None
    built: list[dict[str, Any]] = field(default_factory=list)
    session: Session | None = None
    hung_up: bool = False  # of its sessions one ended, or a coordinator's life did
    heard_of: str | None = None  # the last id

    @property
    def launch(self) -> tuple[str, int]:
        return self.body["launch"]["run"], self.body["launch"]["restart"]

    @property
    def at(self) -> str:
        return f"/v1/engines/default/{self.engine}"


@dataclass
class Told:
    """One engine, as its processes know it."""

    processes: list[Process] = field(default_factory=list)
    attempts: dict[int, Process] = field(default_factory=dict)
    documents: dict[tuple[int, str], bytes] = field(default_factory=dict)
    facts: dict[tuple[int, str], str] = field(default_factory=dict)  # (round, id) -> data
    last_round: int = 0
    opened_s: dict[int, float] = field(default_factory=dict)  # no earlier than this
    never_passes: set[int] = field(default_factory=set)
    cancelled: set[int] = field(default_factory=set)


class Oracle:
    def __init__(self) -> None:
        self.engines: dict[str, Told] = defaultdict(Told)
        self.seen: set[str] = set()

    # --- any answer -----------------------------------------------------------------------------

    def hears(self, engine: str, answer: httpx.Response, now_s: float) -> None:
        status = answer.status_code
        if status >= 400:
            problem = answer.json()
            code = problem["code"]
            assert code not in ("unavailable", "problem", "refused"), problem
            assert PROBLEMS[code].http_status == status or code == "invalid", problem
            assert problem["status"] == status
            assert problem["detail"]
            self.seen.add(code)
            return
        assert status in (200, 201, 202, 204), answer.text
        if status == 202:
            said = answer.json()
            assert said["remaining_s"] >= 0
            for row in said["missing"]:
                assert set(row) <= {"rank", "host"}
        if "Kvaccord-Digest" in answer.headers:
            assert digest(answer.content) == answer.headers["Kvaccord-Digest"]
            self.document(engine, answer.content, now_s)

    def joined(self, process: Process, answer: dict[str, Any], newest_before: int) -> None:
        told = self.engines[process.engine]
        attempt = answer["attempt"]
        if attempt == process.attempt:
            assert answer["token"] == process.token, "same question, same answer"
        else:
            assert not process.attempt or self._lapsed(process), "same question, same answer"
            assert attempt > newest_before, "attempts never go back (S6)"
            assert attempt not in told.attempts
        process.attempt, process.token = attempt, answer["token"]
        told.attempts[attempt] = process

    def _lapsed(self, process: Process) -> bool:
        """A newer process of its run has claimed one of its ranks before it did."""
        return not process.round and any(
            other.attempt > process.attempt
            and other.launch[0] == process.launch[0]
            and set(other.ranks) & set(process.ranks)
            and other.claimed
            for other in self.engines[process.engine].processes
        )

    def claimed(
        self, process: Process, answer: dict[str, Any], last_before: int, sent_s: float
    ) -> None:
        told = self.engines[process.engine]
        number = answer["round"]
        if process.round:
            assert number == process.round, "one process, one round"
            return
        assert number >= last_before, "rounds never go back (S6)"
        assert number <= told.last_round + 1, "rounds are not left out"
        told.last_round = max(told.last_round, number)
        told.opened_s.setdefault(number, sent_s)
        process.round = number
        process.seated = not any(
            other is not process
            and other.claimed
            and other.launch == process.launch
            and other.round in (0, number)
            and (set(other.ranks) & set(process.ranks) or other.body["layout"] != layout)
            for other in told.processes
            for layout in [process.body["layout"]]
        )

    # --- documents ------------------------------------------------------------------------------

    def document(self, engine: str, body: bytes, now_s: float) -> None:
        told = self.engines[engine]
        document = json.loads(body)
        kind = "decision" if "verdict" in document else "outcome"
        key = document["round"], kind
        if key in told.documents:
            assert told.documents[key] == body, "one decision, in every copy (S1, S2)"
            return
        assert is_canonical(body)
        assert document["engine"] == f"default/{engine}"
        told.documents[key] = body
        if kind == "decision":
            self._decided(told, document, now_s)
        else:
            self._ended(told, document, now_s)

    def _members(self, told: Told, number: int) -> list[Process]:
        return [p for p in told.processes if p.round == number]

    def _holder(self, told: Told, number: int, rank: int) -> Process | None:
        """Who could have spoken for a rank in a round: its claim may still be under way."""
        sure = [p for p in self._members(told, number) if rank in p.ranks and p.sent]
        return sure[-1] if sure else None

    def _decided(self, told: Told, document: dict[str, Any], now_s: float) -> None:
        number, verdict = document["round"], document["verdict"]
        self.seen.add(verdict["code"])
        launch = document["launch"]["run"], document["launch"]["restart"]
        self._blames_rightly(told, number, document["verdict"], now_s, before_verdict=True)
        if verdict["outcome"] != "PASSED":
            return
        assert number not in told.never_passes, "it was vetoed, left or cancelled before (S3)"
        layout = document["layout"]
        world = layout["dp"] * layout["pp"] * layout["pcp"] * layout["tp"]
        said: dict[int, dict[str, Any]] = {}
        for rank in range(world):
            who = self._holder(told, number, rank)
            assert who is not None, f"rank {rank} never reported in round {number} (S3)"
            assert who.launch == launch, "of one start (S5)"
            may_be = [who.reported] if who.reported else who.sent
            if may_be != may_be[:1] * len(may_be):
                return  # two are under way at once, and either may have been kept
            said[rank] = may_be[0][str(rank)]
        assert len({json.dumps(r.get("inputs"), sort_keys=True) for r in said.values()}) == 1
        for row in document["plan"]["schedulers"]:
            rooms = [_room(said[rank]) for rank in row["ranks"]]
            assert row["entries"] == {"kv": min(rooms)}, "the minimum of exactly these (S3)"

    def _ended(self, told: Told, document: dict[str, Any], now_s: float) -> None:
        number = document["round"]
        self.seen.add(document["code"])
        decision = told.documents.get((number, "decision"))
        if decision:
            assert document["decision_digest"] == digest(decision)
        if document["outcome"] == "ABORTED":
            self._blames_rightly(told, number, document, now_s, before_verdict=False)
            return
        assert decision is not None, "whoever built it had read it"
        plan = json.loads(decision)["plan"]
        for row in plan["schedulers"]:
            for rank in row["ranks"]:
                who = self._holder(told, number, rank)
                assert who is not None
                right = {"digest": digest(decision), "built": row["entries"]}
                assert right in who.built, "S7"

    def _blames_rightly(
        self,
        told: Told,
        number: int,
        document: dict[str, Any],
        now_s: float,
        *,
        before_verdict: bool,
    ) -> None:
        members = self._members(told, number)
        for cause in document["causes"]:
            self.seen.add(cause["code"])
            rank = cause.get("rank")
            holders = [p for p in members if rank in p.ranks]
            if cause["code"] == "ranks_missing" and before_verdict:
                assert all(p.reported is None for p in holders), "S4"
                shortest = REPORT_S if holders else GATHER_S
                assert now_s >= told.opened_s[number] + min(shortest, REPORT_S), "S9"
            if cause["code"] == "ranks_missing" and not before_verdict:
                assert now_s >= told.opened_s[number] + APPLY_S, "S9"
            if cause["code"] == "rank_lost" and len(holders) == 1:
                (who,) = holders
                whole = who.session is not None and who.session.open and not who.hung_up
                assert not whole, "its session never ended (S12)"

    # --- sessions -------------------------------------------------------------------------------

    def follows(self, process: Process, session: Session, now_s: float) -> None:
        """What a session brought, in full, as far as it is by now."""
        told = self.engines[process.engine]
        places = []
        for kind, id_, data in session.events:
            if not id_:
                continue
            places.append(tuple(map(int, id_.split("."))))
            key = process.round, id_
            assert told.facts.setdefault(key, data) == data, "one fact, one text (S10)"
            if kind in ("decision", "outcome"):
                self.document(process.engine, data.encode(), now_s)
        assert places == sorted(set(places)), "in order, once (S10)"
        if places:
            process.heard_of = ".".join(map(str, places[-1]))

    def has_no_gap(self, process: Process, session: Session) -> None:
        """A session that began at the beginning brings every fact that anyone heard."""
        told = self.engines[process.engine]
        heard = {id_ for _, id_, _ in session.events}
        known = {id_ for number, id_ in told.facts if number == process.round}
        assert known <= heard, "without gaps (S10)"


def _room(report: dict[str, Any]) -> int:
    free = report["free_bytes"]
    return int(min(free, report["kv_budget_bytes"]) // report["classes"][0]["entry_bytes"])
