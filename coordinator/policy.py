"""What an operator may set for a round: budgets, graces, limits. Pure.

Source of the defaults: docs/timeouts.md, which lists each with what it must exceed.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from kvaccord.faulty import impossible
from kvaccord.messages import AskedBudgets, AskedEnds

# Strict: YAML reads `yes` as true, which would be one second.
Seconds = Annotated[float, Strict(), Field(gt=0, le=10**7, allow_inf_nan=False)]
Share = Annotated[float, Strict(), Field(gt=0, le=1)]


class Setting(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Ends(Setting):
    """Soft: who shows no progress by then is blamed. Hard: whoever is missing is. Seconds."""

    soft: Seconds
    hard: Seconds

    @model_validator(mode="after")
    def _in_order(self) -> Ends:
        if self.soft > self.hard:
            raise impossible(
                "soft",
                self.soft,
                f"soft {self.soft:g} is above hard {self.hard:g}; the soft end comes first:"
                " lower soft or raise hard",
            )
        return self


class Policy(Setting):
    """The effective settings of one round; stored in its first entry. Durations in seconds."""

    gather_s: Seconds = 1800.0
    report_s: Ends = Ends(soft=1800.0, hard=7200.0)
    apply_s: Ends = Ends(soft=600.0, hard=1800.0)
    stall_s: Seconds = 300.0  # without progress for so long is stuck
    grace_s: Seconds = 0.5
    shortfall_grace_s: Seconds = 2.0
    spread_limit: Share | None = None  # above it: a failure
    keep_rounds: Annotated[int, Strict(), Field(ge=1, le=1000)] = 50

    @model_validator(mode="after")
    def _ends_exceed_what_they_wait_for(self) -> Policy:
        shortest = min(self.gather_s, self.report_s.hard, self.apply_s.hard)
        if self.grace_s > shortest:
            raise impossible(
                "grace_s",
                self.grace_s,
                f"grace_s {self.grace_s:g} is above the shortest budget, {shortest:g}; a grace"
                " never outlasts a budget: lower it",
            )
        return self

    def shortened(self, asked: AskedBudgets | None) -> Policy:
        """This policy with the shorter budgets that the first claim's join asked for.

        The graces shrink along: no grace outlasts a budget.
        """
        if asked is None:
            return self
        gather_s = min(self.gather_s, asked.gather_s or self.gather_s)
        report_s = _shorter(self.report_s, asked.report_s)
        apply_s = _shorter(self.apply_s, asked.apply_s)
        shortest_s = min(gather_s, report_s.hard, apply_s.hard)
        shorter = {
            "gather_s": gather_s,
            "report_s": report_s,
            "apply_s": apply_s,
            "grace_s": min(self.grace_s, shortest_s),
            "shortfall_grace_s": min(self.shortfall_grace_s, shortest_s),
        }
        return Policy.model_validate({**dict(self), **shorter})


def _shorter(ends: Ends, asked: AskedEnds | None) -> Ends:
    if asked is None:
        return ends
    hard = min(ends.hard, asked.hard or ends.hard)
    return Ends(soft=min(ends.soft, asked.soft or ends.soft, hard), hard=hard)
