"""What happened in a world, in order: a list of plain events, the same from the same seed.

A history is all that the checkers see. `t` is virtual seconds; a frozen document stands once under
`documents`, by its digest, and events name the digest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvaccord.canonical import digest

Event = dict[str, Any]


@dataclass
class History:
    seed: str
    mode: str = "safety"
    settings: dict[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    documents: dict[str, str] = field(default_factory=dict)
    now_s: Callable[[], float] = field(default=lambda: 0.0, repr=False)
    closed: bool = False  # what the end of a world stirs up is no part of it

    def add(self, kind: str, **fields: Any) -> None:
        if not self.closed:
            event = {"t": round(self.now_s(), 6), "kind": kind}
            event.update((k, v) for k, v in fields.items() if v is not None)
            self.events.append(event)

    def keep(self, document: bytes) -> str:
        """The digest under which a frozen document stands."""
        name = digest(document)
        self.documents[name] = document.decode(errors="replace")
        return name

    def of(self, *kinds: str) -> list[Event]:
        return [e for e in self.events if e["kind"] in kinds]

    def to_bytes(self) -> bytes:
        head = {"seed": self.seed, "mode": self.mode, "settings": self.settings}
        whole = head | {"documents": self.documents, "events": self.events}
        return json.dumps(whole, separators=(",", ":")).encode()

    @classmethod
    def read(cls, path: Path) -> History:
        d = json.loads(path.read_bytes())
        return cls(d["seed"], d["mode"], d["settings"], d["events"], d["documents"])
