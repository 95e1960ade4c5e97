"""Where a document is false, and by how much. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Lie:
    """Where a document is false: the path of the field, what it says, and what was computed."""

    path: str
    said: object
    computed: object

    def __str__(self) -> str:
        return f"{self.path}: the document says {_short(self.said)}, it is {_short(self.computed)}"


def differences(path: str, said: Any, computed: Any) -> Iterator[Lie]:
    """Where two values differ, as deep as they are alike in form."""
    if isinstance(said, dict) and isinstance(computed, dict):
        for key in sorted(said.keys() | computed.keys()):
            yield from differences(f"{path}.{key}", said.get(key), computed.get(key))
    elif isinstance(said, list) and isinstance(computed, list) and len(said) == len(computed):
        for index, pair in enumerate(zip(said, computed, strict=True)):
            yield from differences(f"{path}[{index}]", *pair)
    elif type(said) is not type(computed) or said != computed:
        yield Lie(path, said, computed)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 160 else f"{text[:157]}…"
