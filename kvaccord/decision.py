"""The frozen documents as a reader sees them: the bytes, their digest, and what they say.

Fields that this version does not know are left alone, so that a newer coordinator can be read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from kvaccord import canonical


@dataclass(frozen=True)
class Frozen:
    """A document whose bytes are its identity."""

    body: bytes

    @cached_property
    def digest(self) -> str:
        """`sha256:HEX` over the bytes as received."""
        return canonical.digest(self.body)

    @cached_property
    def document(self) -> dict[str, Any]:
        """The parsed document. Raises ValueError when the bytes are no JSON object."""
        document = json.loads(self.body)
        if not isinstance(document, dict):
            raise ValueError(f"expected a JSON object, got {type(document).__name__}")
        return document

    @property
    def _verdict(self) -> dict[str, Any]:
        return self.document

    @property
    def round(self) -> int:
        return int(self.document["round"])

    @property
    def result(self) -> str:
        """PASSED or FAILED of a decision; SEALED or ABORTED of an outcome."""
        return str(self._verdict["outcome"])

    @property
    def code(self) -> str:
        return str(self._verdict["code"])

    @property
    def message(self) -> str:
        return str(self._verdict["message"])

    @property
    def ranks(self) -> list[int]:
        """The ranks that caused it."""
        return list(self._verdict["ranks"])

    @property
    def causes(self) -> list[dict[str, Any]]:
        """[{rank, host, code, text}], in order of receipt."""
        return list(self._verdict["causes"])

    @property
    def retryable(self) -> bool:
        """Whether the same start may pass when it is simply repeated."""
        return bool(self._verdict["retryable"])

    @property
    def sentence(self) -> str:
        """One line for a log, the same on every rank."""
        where = f"{self.document['engine']} round {self.round}"
        return f"{where} {self.result} {self.code}: {self.message}"


class Decision(Frozen):
    """The verdict of a round, and the plan when it PASSED."""

    @property
    def _verdict(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.document["verdict"])

    @property
    def passed(self) -> bool:
        return self.result == "PASSED"

    def entries(self, rank: int) -> dict[str, int]:
        """Agreed entries per cache class for one rank. Empty when the verdict is FAILED."""
        plan = self.document.get("plan", {})
        for row in plan.get("schedulers", ()):
            if rank in row["ranks"]:
                return {name: row["entries"][name] for name in self.entry_bytes(rank)}
        return {}

    def entry_bytes(self, rank: int) -> dict[str, int]:
        """Bytes of an entry of each class of one rank. Empty when the verdict is FAILED."""
        for shape in self.document.get("plan", {}).get("shapes", ()):
            if rank in shape["ranks"]:
                return dict(shape["entry_bytes"])
        return {}


class Outcome(Frozen):
    """How a PASSED round ended: SEALED (all built) or ABORTED."""

    @property
    def sealed(self) -> bool:
        return self.result == "SEALED"
