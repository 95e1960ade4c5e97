"""Planted mistakes: one guard removed each. Every one must be refuted, by the property it names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tests.model.log import Process
from tests.model.rules import Edit, Rules
from tests.model.scopes.launch import LaunchScope
from tests.model.scopes.presence import PresenceScope
from tests.model.scopes.round import RoundScope
from tests.model.scopes.stale import StaleScope
from tests.model.search import Found, Scope, explore

Make = Callable[[Rules], Scope]

A0, A1, A2 = (Process(f"a{r}", (r,)) for r in range(3))
HEIR = Process("a0-again", (0,), after=0)  # a0's place, started when a0 has died
HEIR1 = Process("a1-again", (1,), after=1)
NEXT0 = Process("next0", (0,), restart=1)
NEXT1 = Process("next1", (1,), restart=1)
OTHER1 = Process("other1", (1,), run="B")
BOTH = Process("a01", (0, 1))
TERMS = Process("a1-tp3", (1,), tp=3)

SCOPES: dict[str, Make] = {
    "round of 3": lambda r: RoundScope(r, (A0, A1, A2), 3),
    "round of 3, unequal": lambda r: RoundScope(r, (A0, A1._replace(length=9), A2), 3),
    "round of 2+1": lambda r: RoundScope(r, (BOTH, Process("a2", (2,))), 3),
    "launch: restarts": lambda r: LaunchScope(r, (A0, A1, A2, HEIR, NEXT1), 3, watched=(0, 3)),
    "round of 2, short": lambda r: RoundScope(r, (A0, A1._replace(short=True)), 2),
    "launch: another run": lambda r: LaunchScope(r, (A0, A1, A2, OTHER1), 3),
    "launch: all": lambda r: LaunchScope(r, (A0, A1, HEIR, NEXT0, OTHER1), 2, watched=(0, 2)),
    "launch: chain": lambda r: LaunchScope(
        r, (A0, A1, HEIR, Process("a0-third", (0,), after=2)), 2, watched=(0, 2)
    ),
    "launch: terms": lambda r: LaunchScope(r, (A0, A1, TERMS, BOTH), 2, watched=(0, 1, 3)),
    "launch: served": lambda r: LaunchScope(
        r, (A0, A1, HEIR, OTHER1), 2, watched=(), serves=(0, 2), retires=True
    ),
    "launch: sealed twice": lambda r: LaunchScope(
        r, (A0, A1, HEIR, HEIR1), 2, watched=(), serves=(0,)
    ),
    "stale": lambda r: StaleScope(r, 3),
    "presence: one": lambda r: PresenceScope(r, crashes=2, orphans=True),
    "presence: serving": lambda r: PresenceScope(r, world=2, serves=True, orphans=True),
    "presence: two": lambda r: PresenceScope(r, coordinators=2, attach="always"),
}


class Mistake(NamedTuple):
    """what: the property that must refute it. scope: a name of SCOPES, or a scope of its own."""

    what: str
    scope: str | Make
    edits: tuple[Edit, ...] = ()
    note: str = ""


# An edit of one file of the rules: function, old, new.
state = partial(Edit, "engine.py")
judging = partial(Edit, "verdict.py")
deciding = partial(Edit, "round.py")
members, joining, claiming, calls, orders, findings, settling = (
    partial(Edit, f"rules/{file}.py")
    for file in ("members", "joining", "claiming", "calls", "orders", "findings", "settling")
)


APART = (deciding("decide", "back = _back(engine, command)", "back = ()"),)

MISTAKES: dict[str, Mistake] = {
    # S1, S2: one decision, and it stays
    "append at n is not compared": Mistake("S1", lambda r: StaleScope(r, 2, compares=False)),
    "append at n is not compared, with an outcome": Mistake(
        "S2", lambda r: StaleScope(r, 2, compares=False)
    ),
    "told before it is durable": Mistake("S1", lambda r: StaleScope(r, 2, tells_first=True)),
    "an append without an answer is repeated blindly": Mistake(
        "S1", lambda r: StaleScope(r, 2, repeats_blindly=True)
    ),
    "a budget's end after the round ended": Mistake(
        "S2",
        "round of 3",
        (findings("on_spend", "round_ is None or not round_.open", "round_ is None"),),
    ),
    "cancelled after the end": Mistake(
        "S2", "round of 3", (orders("on_cancel", "if not round_.open:", "if False:"),)
    ),
    "an abort rewrites the verdict": Mistake(
        "S1", "round of 3", (settling("end_round", "if round_.verdict is None", "if True"),)
    ),
    # S3: what PASSED means
    "passed over a veto": Mistake(
        "S3",
        "round of 3",
        (settling("settle", "round_.causes or round_.suspects", "round_.suspects"),),
    ),
    "passed while a suspect's loss is on its way": Mistake(
        "S3", "round of 3", (settling("settle", "or round_.suspects ", ""),)
    ),
    "passed over unequal inputs": Mistake(
        "S3",
        "round of 3, unequal",
        (judging("judge_reports", "if planned.findings:", "if False:"),),
    ),
    "planned over one report": Mistake(
        "S3",
        "round of 3",
        (
            judging(
                "judge_reports",
                "plan(layout, reports,",
                "plan(layout, dict.fromkeys(reports, reports[2]),",
            ),
        ),
    ),
    "passed before all have reported": Mistake(
        "TOTAL",
        "round of 3",
        (state("waiting_for", "if r not in self.sent]", "if r not in self.sent][1:]"),),
    ),
    "a replaced member's report counts": Mistake(
        "S3",
        "launch: restarts",
        (
            state("fits_in", "and round_.slots.keys().isdisjoint(join.ranks)", ""),
            claiming(
                "_claim_of_this_launch",
                "taken and all((m.gone or m.suspect for m in taken))",
                "False",
            ),
            claiming("_claim_of_this_launch", "if taken:", "if False:"),
        ),
    ),
    # S4: nobody is blamed whose word was acknowledged
    "who has reported is called missing": Mistake(
        "S4",
        "round of 3",
        (
            findings(
                "_time_ran_out",
                "waited_for, policy = (round_.waiting_for,",
                "waited_for, policy = (list(range(round_.layout.world_size)),",
            ),
        ),
    ),
    "who has reported is called stuck": Mistake(
        "S4", "round of 3", (findings("on_spend", " and r in round_.waiting_for", ""),)
    ),
    "a soft end blames who moves": Mistake(
        "RULE11", "round of 3", (findings("on_spend", "if s.stuck and r in", "if r in"),)
    ),
    "a budget that does not run ends the round": Mistake(
        "RULE3", "round of 3", (findings("on_spend", "command.what != round_.phase or ", ""),)
    ),
    "a shortfall cuts the grace of another cause": Mistake(
        "RULE3",
        "round of 2, short",
        (findings("on_spend", "if short and (not round_.causes)", "if short"),),
    ),
    "a spent budget drops the shortfall": Mistake(
        "RULE8", "round of 2, short", (findings("on_spend", "*causes, *short", "*causes"),)
    ),
    "passed over a shortfall": Mistake(
        "S3",
        "round of 2, short",
        (judging("judge_reports", "if planned.findings:", "if False:"),),
    ),
    # S5: nothing of what is past has any effect
    "no fence between attempts": Mistake(
        "S5",
        "launch: restarts",
        (state("_claimed", "if a > attempt or (", "if a != attempt or ("),),
    ),
    "the join claims": Mistake("S5", lambda r: LaunchScope(r, (A0, A1, HEIR), 2, one_step=True)),
    "a report for another round counts": Mistake(
        "S5",
        "launch: restarts",
        (
            members("member_of", "find_round(engine, number)", "engine.last"),
            members(
                "member_of",
                "round_.members.get(attempt)",
                "(engine.round_of(attempt) or round_).members.get(attempt)",
            ),
        ),
    ),
    "two restarts are one launch": Mistake(
        "S5",
        "launch: restarts",
        (
            claiming(
                "on_claim",
                "join.launch.run == last.launch.run and join.launch.restart == last.launch.restart",
                "join.launch.run == last.launch.run",
            ),
        ),
    ),
    "no fence between launches": Mistake(
        "S5", "launch: restarts", (claiming("_fence", "if old:", "if False:"),)
    ),
    "a run that was left comes back": Mistake(
        "S5",
        "launch: all",
        (claiming("_fence", "old = attempt <= left_at or not came_back", "old = False"),),
    ),
    "another run takes over from the living": Mistake(
        "RULE7",
        "launch: another run",
        (claiming("on_claim", "alive and (not same_run)", "False and (not same_run)"),),
    ),
    "who serves is not alive without a session": Mistake(
        "RULE7",
        "launch: served",
        (
            claiming(
                "_alive", "m.kept and (not m.suspect) and (m.departed is None)", "False and m.kept"
            ),
        ),
    ),
    "who is suspect after the seal is alive": Mistake(
        "RULE7", "launch: served", (claiming("_alive", "m.kept and (not m.suspect)", "m.kept"),)
    ),
    "only the last round has living members": Mistake(
        "RULE7",
        "launch: served",
        (claiming("on_claim", "engine.in_force and engine.in_force is not last", "False"),),
    ),
    "a claim lapses what another run has reserved": Mistake(
        "RULE7",
        "launch: all",
        (
            state(
                "_claimed",
                "ranks.isdisjoint(r.join.ranks) or r.join.launch.run != run",
                "ranks.isdisjoint(r.join.ranks)",
            ),
        ),
    ),
    "who was replaced after the seal stands": Mistake(
        "RULE7",
        "launch: served",
        (claiming("_claim_of_this_launch", "return (*left, *_open", "return (*(), *_open"),),
    ),
    "a late member is seated in the round that has ended": Mistake(
        "S5", "launch: restarts", (state("_claimed", "round_.open and ", ""),)
    ),
    "every newcomer is a late member": Mistake(
        "RULE7",
        "launch: chain",
        (claiming("_claim_of_this_launch", " and (not _was_here(last, join))", ""),),
    ),
    "a newcomer replaces a living holder": Mistake(
        "RULE7",
        "launch: terms",
        (claiming("_claim_of_this_launch", "all((m.gone", "any((True or m.gone"),),
    ),
    "a sealed round does not stand": Mistake(
        "RULE7",
        "launch: all",
        (claiming("_claim_of_this_launch", "last.ended == 'SEALED' and", "False and"),),
    ),
    "other terms are let in": Mistake(
        "S5",
        "launch: terms",
        (state("same_terms", "join.layout == round_.layout and ", ""),),
    ),
    "a finding about a round that has ended is kept": Mistake(
        "S5",
        "launch: restarts",
        (members("is_followed", "return round_.open or", "return True or"),),
    ),
    "a suspect of a round that has ended is cleared": Mistake(
        "S5", "round of 3", (deciding("_back", " or (not is_followed(round_, member))", ""),)
    ),
    "a session is followed that no server holds": Mistake(
        "S5",
        "round of 3",
        (
            members(
                "is_followed",
                "round_.ended == 'SEALED' and member.kept",
                "round_.ended == 'SEALED'",
            ),
        ),
    ),
    "who has departed is followed": Mistake(
        "S5", "round of 3", (members("is_followed", " or member.departed is not None", ""),)
    ),
    "who has not been sealed serves": Mistake(
        "S5", "round of 3", (calls("on_serve", "round_.ended != 'SEALED' or ", ""),)
    ),
    "who was replaced says that it serves": Mistake(
        "S5",
        "launch: served",
        (calls("on_serve", "_replaced(engine, round_, member)", "False"),),
    ),
    "an open round is retired": Mistake(
        "S5", "round of 3", (orders("on_retire", "round_.ended != 'SEALED'", "False"),)
    ),
    "a departure from a round of the past": Mistake(
        "S5",
        "launch: served",
        (calls("on_leave", "round_ in (engine.in_force, engine.last) and ", ""),),
    ),
    "a departure of another round": Mistake(
        "TOTAL",
        "launch: sealed twice",
        (
            calls("on_leave", "round_ in (engine.in_force, engine.last) and ", ""),
            calls("on_leave", "departures(round_, ", "departures(engine.last, "),
        ),
    ),
    "a process without a seat reports": Mistake(
        "S5", "launch: terms", (calls("on_submit", " or (not member.seated)", ""),)
    ),
    # S6: numbers never go back
    "attempts are counted by what is kept": Mistake(
        "S6",
        "launch: restarts",
        (joining("on_reserve", "engine.last_attempt + 1", "len(engine.reservations) + 1"),),
    ),
    "a round number is used again": Mistake(
        "S1",
        "launch: restarts",
        (claiming("_open", "engine.last.number + 1", "engine.last.number"),),
    ),
    "a floor forgets the round in force": Mistake(
        "S6",
        "launch: restarts",
        (Edit("compaction.py", "compaction", " or engine.rounds[n] is engine.in_force", ""),),
    ),
    "a floor forgets what is reserved": Mistake(
        "S6",
        "launch: restarts",
        (state("evolve", "still = dict(engine.reservations)", "still = {}"),),
    ),
    # S7: what SEALED means
    "sealed without comparing the digest": Mistake(
        "S7",
        "round of 3",
        (calls("on_apply", "said.digest != digest(round_.decision)", "False"),),
    ),
    "sealed without comparing what was built": Mistake(
        "S7",
        "round of 3",
        (
            calls(
                "on_apply",
                "(wrong := _built_otherwise(round_, member, said.built))",
                "(wrong := None)",
            ),
        ),
    ),
    "sealed before all have built": Mistake(
        "S7",
        "round of 3",
        (
            state(
                "waiting_for",
                "if m.applied is None",
                "if all(x.applied is None for x in self.seated)",
            ),
        ),
    ),
    # S12 and presence
    "lost without comparing the session": Mistake(
        "S12", "round of 3", (findings("on_presence", "member.suspect != connection", "False"),)
    ),
    "a return is answered before Cleared is appended": Mistake(
        "S12",
        lambda r: PresenceScope(r, coordinators=2, attach="always", tells_first=True),
    ),
    "Cleared is appended before the call, not with it": Mistake(
        "S12",
        lambda r: PresenceScope(r, apart=True),
        APART,
        note="a call that overtakes the suspicion on its way to the log is answered uncleared",
    ),
    "Cleared before the call settles the round that the call says no to": Mistake(
        "S3",
        lambda r: PresenceScope(r, apart=True),
        APART,
    ),
    "a long poll is answered to a suspect": Mistake(
        "S12", lambda r: PresenceScope(r, clears_polls=False)
    ),
    "two coordinators, and an attach is not in the log": Mistake(
        "S12", lambda r: PresenceScope(r, coordinators=2)
    ),
    "two coordinators, and one that starts expects everyone": Mistake(
        "S12",
        lambda r: PresenceScope(r, coordinators=2, attach="always", expects_all=True),
    ),
    "who serves need not open a session": Mistake(
        "L4",
        lambda r: PresenceScope(r, world=2, serves=True, expects_servers=False),
    ),
    "who serves and is not answered need not open a session": Mistake(
        "L4",
        lambda r: PresenceScope(r, world=2, serves=True, reads_again=False),
    ),
    # L4 and L3, and rule 8
    "nobody is expected after a restart": Mistake(
        "L4", lambda r: PresenceScope(r, expects_at_start=False)
    ),
    "the grace ends no round that has passed": Mistake(
        "L4",
        "round of 3",
        (
            findings(
                "on_spend",
                "if round_.causes else ()",
                "if round_.causes and (not round_.verdict) else ()",
            ),
        ),
    ),
    "a return settles nothing": Mistake(
        "L3",
        "round of 3",
        (
            findings(
                "on_presence", "return settle(engine, round_.number, cleared)", "return (cleared,)"
            ),
        ),
    ),
    "a return by a call that says nothing new settles nothing": Mistake(
        "L3",
        "round of 3",
        (deciding("decide", "return settle(engine, back[0].round, seen=back)", "return back"),),
    ),
    "the grace drops the first cause": Mistake(
        "RULE8",
        "round of 3",
        (
            settling(
                "end_round",
                "(*round_.causes, *more)",
                "(*round_.causes[1:], *more) or round_.causes",
            ),
        ),
    ),
}


def shipped(name: str) -> Scope:
    return SCOPES[name](Rules(()))


def searched(mistake: Mistake) -> Found:
    """Search for what refutes a mistake, by the one property that must."""
    make, edits = mistake.scope, mistake.edits
    if isinstance(make, str):
        make = SCOPES[make]
    return explore(make(Rules(edits)), only=(mistake.what,))
