"""A history for people: one line for what happened, who was there, and what the log then held."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.simulation.checkers import Verdict
from tests.simulation.history import History


def timeline(history: History) -> Iterator[str]:
    """One line an event, numbered as the verdicts name them."""
    yield f"seed {history.seed}, mode {history.mode}, {json.dumps(history.settings)}"
    for place, event in enumerate(history.events):
        yield f"{place:5} {event['t']:10.3f} s  {_said(event)}"


def judged(verdicts: list[Verdict]) -> Iterator[str]:
    for verdict in verdicts:
        word = {True: "true", False: "FALSE", None: "unknown"}[verdict.holds]
        yield f"{verdict.name:5} {word:7} {verdict.judged:5} judged  {verdict.promise}"
        for text, places in verdict.breaches[:5]:
            yield f"      {text} (events {', '.join(map(str, places)) or 'none'})"


def _said(event: dict[str, Any]) -> str:
    e = event
    match e["kind"]:
        case "request":
            return f"{e['who']:10} → {e['method']} {e['target']} #{e['x']}{_body(e)}"
        case "arrived":
            return f"{e['at']:10}   #{e['x']} arrives"
        case "answer":
            said = (
                e.get("document", "")[:19] + " " + e.get("outcome", "")
                if "document" in e
                else (e.get("body", "")[:110])
            )
            return f"{e['at']:10} ← {e['status']} #{e['x']} {said}"
        case "pushed" | "fact":
            arrow, who = ("⇐", e["at"]) if e["kind"] == "pushed" else ("  hears", e["who"])
            return f"{who:10} {arrow} {e['event']} {e['id']} #{e['x']}"
        case "append":
            events = ", ".join(map(_event, e["events"]))
            return f"{e['at']:10} ■ entry {e['n']}: {events}{' (found)' if e.get('found') else ''}"
        case "appended":
            return f"{e['at']:10}   entry {e['n']} is durable"
        case "process" | "coordinator":
            rest = {k: v for k, v in e.items() if k not in ("t", "kind", "who", "what")}
            return f"{e['who']:10} * {e['what']} {json.dumps(rest) if rest else ''}"
    rest = {k: v for k, v in e.items() if k not in ("t", "kind")}
    return f"{'':10} ! {e['kind']} {json.dumps(rest)}"


def _event(event: dict[str, Any]) -> str:
    where = f" in round {event['round']}" if "round" in event else ""
    who = f" attempt {event['attempt']}" if "attempt" in event else ""
    what = f" {event['result']}" if "result" in event else ""
    if "cause" in event:
        what = f" {event['cause']['code']}"
    if "join" in event:
        what = f" ranks {event['join']['ranks']} of {event['join']['launch']['run']}"
    return f"{event['event']}{who}{where}{what}"


def _body(event: dict[str, Any]) -> str:
    return f" {event['body'][:100]}" if event["body"] else ""
