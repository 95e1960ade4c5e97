"""Faults that staging injects: rules, what they do to a call, and the proof they leave.

Not called at all unless the coordinator was started with --enable-faults.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from coordinator.events import EngineName, Touch
from kvaccord.errors import NotFound, SlowDown
from kvaccord.faulty import Message, impossible
from kvaccord.messages import Positive, Rank, Report

MAX_ACTIVE = 100
MAX_EXPIRES_S = 3600.0
MAX_DELAY_S = 600.0

CallName = Literal["join", "claim", "report", "veto", "leave", "applied"]
Glob = Annotated[str, Field(min_length=1, max_length=128)]
# What a rank measured may not be shrunk into what no rank can measure: free memory stays positive.
LEAST = {"free_bytes": 1, "kv_budget_bytes": -(2**53) + 1}


class Rule(Message):
    """Where, what, how much, until when. Durations in seconds, sizes in bytes.

    delay: the call is taken up `delay_s` later. shrink_memory: `field` of a report is lowered by
    `bytes` or `per_cent` before planning. drop_answer: the call is carried out, its answer is cut.
    ranks: those it may touch, all when absent. count: how many calls it may touch, all when absent.
    """

    kind: Literal["delay", "shrink_memory", "drop_answer"]
    namespace: Glob = "*"
    engine: Glob
    ranks: Annotated[tuple[Rank, ...], Field(min_length=1, fail_fast=True)] | None = None
    call: CallName = "report"
    delay_s: Annotated[float, Field(gt=0, le=MAX_DELAY_S)] | None = None
    field: Literal["free_bytes", "kv_budget_bytes"] | None = None
    bytes: Positive | None = None
    per_cent: Annotated[float, Field(gt=0, le=100)] | None = None
    count: Positive | None = None
    expires_s: Annotated[float, Field(gt=0, le=MAX_EXPIRES_S)]
    reason: Annotated[str, Field(min_length=1, max_length=500)]

    @model_validator(mode="after")
    def _fields_belong_to_the_kind(self) -> Rule:
        wanted = {
            "delay": {"delay_s"},
            "shrink_memory": {"field", "bytes" if self.per_cent is None else "per_cent"},
            "drop_answer": set[str](),
        }[self.kind]
        for name in ("delay_s", "field", "bytes", "per_cent"):
            value = getattr(self, name)
            if name in wanted and value is None:
                raise impossible(name, "absent", f"a {self.kind} rule needs {name}; add it")
            if name not in wanted and value is not None:
                raise impossible(
                    name, value, f"a {self.kind} rule takes no {name} beside the rest; remove it"
                )
        if self.kind == "shrink_memory" and self.call != "report":
            raise impossible(
                "call", self.call, "shrink_memory acts on reports only; leave `call` out"
            )
        return self


@dataclass
class Armed:
    """A rule that is active until `expires_at_s` on the loop's clock."""

    rule: Rule
    expires_at_s: float
    id: str = field(default_factory=lambda: f"fault-{secrets.token_hex(4)}")
    touched: int = 0

    def matches(self, name: EngineName, call: CallName, ranks: tuple[int, ...]) -> bool:
        rule = self.rule
        return (
            rule.call == call
            and (rule.count is None or self.touched < rule.count)
            and fnmatchcase(name.namespace, rule.namespace)
            and fnmatchcase(name.engine, rule.engine)
            and (rule.ranks is None or not set(rule.ranks).isdisjoint(ranks))
        )


@dataclass(frozen=True)
class Effect:
    """What the rules do to one call. touched: to be appended with whatever the call appends."""

    touched: tuple[Touch, ...] = ()
    planned: Mapping[int, Report] = field(default_factory=dict)
    drop_answer: bool = False
    delay_s: float = 0.0


NO_EFFECT = Effect()


class Faults:
    """The active rules of this coordinator. They end on its own monotonic clock."""

    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        self._now_s = now_s or (lambda: asyncio.get_running_loop().time())
        self._armed: dict[str, Armed] = {}

    def arm(self, rule: Rule) -> dict[str, Any]:
        """Raises SlowDown when too many rules are active."""
        self._expire()
        if len(self._armed) >= MAX_ACTIVE:
            raise SlowDown(
                f"{len(self._armed)} fault rules are active, {MAX_ACTIVE} may be; end some first",
                field="rule",
            )
        armed = Armed(rule, self._now_s() + rule.expires_s)
        self._armed[armed.id] = armed
        return self._line(armed)

    def active(self) -> list[dict[str, Any]]:
        self._expire()
        return [self._line(armed) for armed in self._armed.values()]

    def disarm(self, rule_id: str) -> None:
        """Raises NotFound when no such rule is active."""
        self._expire()
        if self._armed.pop(rule_id, None) is None:
            raise NotFound(
                f"no active fault rule {rule_id[:64]!r}; GET /v1/faults lists them",
                field="id",
                value=rule_id[:64],
            )

    def disarm_all(self) -> None:
        self._armed.clear()

    def on(
        self,
        name: EngineName,
        call: CallName,
        ranks: tuple[int, ...],
        reports: Mapping[int, Report] | None = None,
    ) -> Effect:
        """What the rules do to a call, on receipt, before anything is decided about it."""
        self._expire()
        touched: list[Touch] = []
        planned: dict[int, Report] = {}
        drop, delay_s = False, 0.0
        for armed in [a for a in self._armed.values() if a.matches(name, call, ranks)]:
            armed.touched += 1
            rule = armed.rule
            hit = tuple(r for r in ranks if rule.ranks is None or r in rule.ranks)
            if rule.kind == "shrink_memory":
                for rank in hit:
                    report = planned.get(rank) or (reports or {})[rank]
                    planned[rank], touch = _shrink(armed, report, rank)
                    touched.append(touch)
                continue
            touched.append(Touch(rule=armed.id, kind=rule.kind, call=call, ranks=hit))
            drop = drop or rule.kind == "drop_answer"
            delay_s += rule.delay_s or 0.0
        return Effect(tuple(touched), planned, drop, delay_s)

    def _expire(self) -> None:
        now_s = self._now_s()
        self._armed = {i: a for i, a in self._armed.items() if a.expires_at_s > now_s}

    def _line(self, armed: Armed) -> dict[str, Any]:
        return {
            "id": armed.id,
            "expires_in_s": round(armed.expires_at_s - self._now_s(), 3),
            "touched": armed.touched,
            "rule": armed.rule.model_dump(mode="json", exclude_none=True),
        }


def _shrink(armed: Armed, report: Report, rank: int) -> tuple[Report, Touch]:
    rule = armed.rule
    assert rule.field is not None, "a shrink_memory rule names its field"
    before: int = getattr(report, rule.field)
    less = rule.bytes or int(abs(before) * (rule.per_cent or 0) / 100)
    after = max(before - less, min(before, LEAST[rule.field]))
    touch = Touch(
        rule=armed.id,
        kind=rule.kind,
        call="report",
        ranks=(rank,),
        field=rule.field,
        before=before,
        after=after,
    )
    return report.model_copy(update={rule.field: after}), touch
