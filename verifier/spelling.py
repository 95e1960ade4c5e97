"""The one spelling that a frozen document may have: RFC 8785, integers alone. Pure."""

from __future__ import annotations

import json
from typing import Any

from verifier.lies import Json, Lie

LIMIT = 2**53


def read(body: bytes, lies: list[Lie]) -> Json | None:
    """The document, if its bytes are the one spelling it may have (RFC 8785, integers alone)."""
    faults: list[str] = []

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in found]
        if len(set(keys)) < len(keys):
            faults.append("a key stands twice")
        if not all(key.isascii() for key in keys):
            faults.append("a key is not ASCII")
        return dict(found)

    def number(text: str) -> int:
        if "." in text or "e" in text.lower() or not -LIMIT < int(text) < LIMIT:
            faults.append(f"{text[:40]} is no integer below 2^53")
            return 0
        return int(text)

    def other(text: str) -> int:
        faults.append(f"{text} is no integer")
        return 0

    try:
        document = json.loads(
            body.decode(),
            object_pairs_hook=pairs,
            parse_int=number,
            parse_float=number,
            parse_constant=other,
        )
    except (ValueError, RecursionError) as fault:
        lies.append(Lie("$", f"{type(fault).__name__}: {fault}", "canonical JSON"))
        return None
    if not isinstance(document, dict):
        lies.append(Lie("$", f"a JSON {type(document).__name__}", "a JSON object"))
        return None
    if spelt(document).encode(errors="replace") != body:
        end = " (the file ends with a newline)" if body.endswith(b"\n") else ""
        faults.append(f"other bytes than its canonical form{end}")
    if "null" in spelt(document) and _has_null(document):
        faults.append("null")
    lies += [Lie("$", fault, "canonical JSON") for fault in dict.fromkeys(faults)]
    return document


def spelt(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{spelt(k)}:{spelt(value[k])}" for k in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spelt, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _has_null(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_null, value.values() if isinstance(value, dict) else value))
    return value is None
