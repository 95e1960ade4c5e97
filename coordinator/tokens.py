"""The tokens that join answers: who calls. Derived, not stored: a repeated join gets the same."""

from __future__ import annotations

import hashlib
import hmac

from coordinator.engine import Engine
from coordinator.events import EngineName
from kvaccord.errors import StoreReplaced, Superseded, Unauthorized
from kvaccord.messages import Join


class Tokens:
    """Those of one store. key: its secret, in bytes."""

    def __init__(self, store_id: str, key: bytes) -> None:
        self._store_id = store_id
        self._key = key

    def of(self, name: EngineName, join: Join, attempt: int) -> str:
        said = "\n".join(
            [name.namespace, name.engine, str(list(join.ranks)), join.nonce, str(attempt)]
        )
        mac = hmac.new(self._key, said.encode(), hashlib.sha256).hexdigest()
        return f"{self._store_id}.{attempt}.{mac}"

    def attempt(self, token: str | None) -> int:
        """The attempt that a token speaks of. Raises Unauthorized, StoreReplaced."""
        parts = (token or "").split(".")
        if len(parts) != 3 or not (parts[1].isascii() and parts[1].isdigit()):
            raise Unauthorized(
                "header Kvaccord-Attempt must carry the token that join answered",
                field="Kvaccord-Attempt",
                value="absent" if token is None else "malformed",
            )
        if parts[0] != self._store_id:
            raise StoreReplaced(
                f"the token is of store {parts[0][:32]!r}, this is store {self._store_id}:"
                " the coordinator's store was replaced; this process must exit and start anew",
                field="Kvaccord-Attempt",
                value=parts[0][:32],
            )
        return int(parts[1][:18])

    def check(self, name: EngineName, join: Join, attempt: int, token: str | None) -> None:
        """Raises Unauthorized unless it is the one that this join was answered."""
        expected = self.of(name, join, attempt)
        if not hmac.compare_digest(expected.encode(), (token or "").encode()):
            raise Unauthorized(
                f"the token for attempt {attempt} of {name} is not the one that join answered",
                rank=join.ranks[0],
                field="Kvaccord-Attempt",
                value="another token",
            )


def join_of(engine: Engine, attempt: int, number: int | None, keep_rounds: int) -> Join:
    """What a process joined with; number: the round it speaks of. Raises Superseded."""
    if attempt in engine.reservations:
        return engine.reservations[attempt].join
    if round_ := engine.round_of(attempt):
        return round_.members[attempt].join
    last = engine.last.number if engine.last else 0
    raise Superseded(
        f"round {number} of {engine.name} was dropped: of rounds that have ended the log keeps"
        f" the latest {keep_rounds} and the one in force; this process must exit, and be started"
        " anew to join"
        if number is not None and number < last and number not in engine.rounds
        else f"attempt {attempt} of {engine.name} has lapsed: a newer process holds its ranks;"
        " this one must exit",
        field="Kvaccord-Attempt",
        value=str(attempt),
    )
