"""Canonical JSON (RFC 8785) of objects, arrays, strings, booleans and integers below 2^53."""

from __future__ import annotations

import hashlib
import json
from typing import Any

INT_LIMIT = 2**53


def canonical(document: dict[str, Any]) -> bytes:
    """The one byte string of a document: sorted ASCII keys, no spaces, no floats, no null.

    Raises ValueError for what has no single spelling here (float, null, integer of 2^53 and more,
    a key outside ASCII): such a document is our mistake, never the sender's.
    """
    _check(document, "$")
    return json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest(body: bytes) -> str:
    """`sha256:HEX` over the bytes as they are."""
    return "sha256:" + hashlib.sha256(body).hexdigest()


def _check(value: Any, path: str) -> None:
    match value:
        case bool() | str():
            return
        case int() if -INT_LIMIT < value < INT_LIMIT:
            return
        case dict():
            for key, item in value.items():
                if not (isinstance(key, str) and key.isascii()):
                    raise ValueError(f"{path}: key {key!r} is not an ASCII string")
                _check(item, f"{path}.{key}")
        case list() | tuple():
            for index, item in enumerate(value):
                _check(item, f"{path}[{index}]")
        case _:
            raise ValueError(f"{path}: {value!r} has no canonical form")
