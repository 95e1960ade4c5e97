"""S1 to S12 and L1 to L5 of docs/protocol.md, over a history: true, false or unknown.

A checker goes by what was durable, sent and heard, never by the coordinator's own state. It counts
what it judged: one that saw nothing to judge says unknown. Every breach names its events.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.simulation import clocks, documents, liveness, order
from tests.simulation.account import Account
from tests.simulation.history import History
from tests.simulation.verdicts import CHECKERS, Verdict

_ALL = (documents, order, clocks, liveness)  # each has registered its own


def check(history: History, names: Iterable[str] = ()) -> list[Verdict]:
    account = Account(history)
    verdicts = []
    for name in names or CHECKERS:
        promise, judge = CHECKERS[name]
        verdicts.append(Verdict(name, promise))
        judge(account, verdicts[-1])
    return verdicts
