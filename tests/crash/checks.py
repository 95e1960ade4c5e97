"""What must hold of a real history: the same words as docs/protocol.md, section 8."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from typing import Any

import httpx

from kvaccord.canonical import digest
from tests.simulation.history import History

ENGINE = re.compile(r"^/v1/engines/default/([^/]+)/")
ROUND = re.compile(r"/rounds/(\d+)/")


def check(history: History, url: str) -> Counter[str]:
    """Compares what was heard with itself, and with what the coordinator at `url` holds now.

    Raises AssertionError. Returns how much of each was compared.
    """
    seen: Counter[str] = Counter()
    asked = {e["x"]: e for e in history.of("request")}
    answers = [(asked[e["x"]], e) for e in history.of("answer")]
    documents = _one_decision(history, asked, seen)
    _tokens_stay(answers, seen)
    _facts_are_one_sequence(history, asked, seen)
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as http:
        _nothing_acknowledged_is_lost(http, answers, documents, seen)
    return seen


def _one_decision(
    history: History, asked: dict[int, Any], seen: Counter[str]
) -> dict[tuple[str, int, str], str]:
    """S1: one decision and one outcome a round, whoever told them, before and after any restart."""
    found: dict[tuple[str, int, str], str] = {}
    for event in history.of("answer", "fact"):
        if name := event.get("document"):
            body = history.documents[name]
            assert digest(body.encode()) == name == event.get("digest", name)
            document = json.loads(body)
            engine = _match(ENGINE, asked[event["x"]]["target"])
            assert document["engine"] == f"default/{engine}"
            kind = "decision" if "verdict" in document else "outcome"
            key = engine, document["round"], kind
            assert found.setdefault(key, name) == name, f"two different: {key} (S1)"
            seen["copies of documents"] += 1
    seen["documents"] += len(found)
    return found


def _tokens_stay(answers: list[tuple[Any, Any]], seen: Counter[str]) -> None:
    """S6 and rule 6: a repeated join or claim gets the same answer; attempts are never reused."""
    tokens: dict[str, str] = {}
    rounds: dict[tuple[str, int], int] = {}
    for request, answer in answers:
        if answer["status"] != 200 or "body" not in answer:
            continue
        if request["target"].endswith("/join"):
            token = json.loads(answer["body"])["token"]
            assert tokens.setdefault(request["who"], token) == token, request["who"]
            seen["joins"] += 1
        elif request["target"].endswith("/claim"):
            key = _match(ENGINE, request["target"]), request["attempt"]
            number = json.loads(answer["body"])["round"]
            assert rounds.setdefault(key, number) == number, key
    numbers = [
        (who.split("/")[0], int(token.split(".")[1]), token) for who, token in tokens.items()
    ]
    assert len({(engine, attempt) for engine, attempt, _ in numbers}) == len(numbers), "S6"
    assert len({token.split(".")[0] for token in tokens.values()}) <= 1, "one store"


def _facts_are_one_sequence(history: History, asked: dict[int, Any], seen: Counter[str]) -> None:
    """S10: in order, once, and every rank that heard both ends of a stretch heard all of it."""
    data: dict[tuple[str, str, tuple[int, int]], str] = {}
    heard: dict[str, list[tuple[int, int]]] = defaultdict(list)
    of_round: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
    place_of: dict[str, tuple[str, str]] = {}
    for fact in history.of("fact"):
        target = asked[fact["x"]]["target"]
        at = _match(ENGINE, target), _match(ROUND, target)
        entry, index = map(int, fact["id"].split("."))
        key = (*at, (entry, index))
        assert data.setdefault(key, fact["data"]) == fact["data"], f"one fact, one text: {key}"
        heard[fact["who"]].append((entry, index))
        of_round[at].add((entry, index))
        place_of[fact["who"]] = at
        seen["facts"] += 1
    for who, places in heard.items():
        assert places == sorted(set(places)), f"{who}: in order, once (S10)"
        between = {p for p in of_round[place_of[who]] if places[0] <= p <= places[-1]}
        assert between == set(places), f"{who}: a gap (S10)"


def _nothing_acknowledged_is_lost(
    http: httpx.Client,
    answers: list[tuple[Any, Any]],
    documents: dict[tuple[str, int, str], str],
    seen: Counter[str],
) -> None:
    """S2 and S8: what was answered once is there now."""
    kept: dict[str, set[int]] = {}
    held: dict[tuple[str, int], Any] = {}

    def is_kept(engine: str, number: int) -> bool:
        if engine not in kept:
            rows = http.get(f"/v1/engines/default/{engine}/rounds").json()["rounds"]
            kept[engine] = {row["round"] for row in rows}
            highest = max((n for e, n, _ in documents if e == engine), default=0)
            assert max(kept[engine], default=0) >= highest, "rounds never go back (S6)"
        return number in kept[engine]

    for (engine, number, kind), name in documents.items():
        if is_kept(engine, number):
            answer = http.get(f"/v1/engines/default/{engine}/rounds/{number}/{kind}")
            assert answer.status_code == 200, f"{engine} {number} {kind} is gone (S2)"
            assert digest(answer.content) == name, f"{engine} {number} {kind} changed (S2)"
            seen["documents read back"] += 1
    for request, answer in answers:
        target = request["target"]
        if answer["status"] not in (200, 202) or "/reports" not in target or not request["body"]:
            continue
        engine, number = _match(ENGINE, target), int(_match(ROUND, target))
        if not is_kept(engine, number):
            continue
        if (engine, number) not in held:
            path = f"/v1/engines/default/{engine}/rounds/{number}/reports"
            held[engine, number] = http.get(path).json()["reports"]
        for rank, report in json.loads(request["body"]).items():
            row = held[engine, number].get(rank)
            assert row is not None, f"{engine} {number}: rank {rank} is forgotten (S8)"
            assert report.items() <= _plain(row["sent"], report).items(), "another report (S8)"
            seen["acknowledged reports read back"] += 1


def _plain(sent: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """What is kept, without the defaults that nobody sent."""
    classes = [
        {name: row[name] for name in mine}
        for row, mine in zip(sent["classes"], like["classes"], strict=True)
    ]
    return {**sent, "classes": classes}


def _match(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    assert found is not None, text
    return found[1]
