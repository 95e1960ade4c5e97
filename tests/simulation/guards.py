"""Every guard removed in turn: what the simulation does not notice nobody needs, or nobody checks.

A guard is a condition, or an order of two steps, without which a promise of docs/protocol.md
breaks. Its removal is an edit of the shipped function, made in this process for as long as one
search lasts. `python -m tests.simulation --guards` goes through all of them.
"""

from __future__ import annotations

import ast
import importlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, count
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from tests.model.mistakes import MISTAKES
from tests.simulation.checkers import check
from tests.simulation.world import World, run

ROOT = Path(__file__).parents[2]
SEEDS = Path(__file__).with_suffix(".json")  # by name: the first seed that was found to catch it
WITHIN_S = 60.0  # of one core, for one guard
WORLD_S = 20.0  # a world that takes longer has been broken


class Edit(NamedTuple):
    """In this function of this file, `old` becomes `new`; both as `ast.unparse` spells them."""

    file: str
    function: str  # a method as Class.name where the file has several of the name
    old: str
    new: str


class Moved(Exception):
    """The guard that an edit removes is not where it was: point the edit to its new place."""


@dataclass(frozen=True)
class Guard:
    """keeps: the sentence of what it guards. spared: why the simulation need not notice.

    where: the worlds in which it may, if they can be told beforehand.
    """

    keeps: str
    edits: tuple[Edit, ...]
    spared: str = ""
    where: Callable[[World], bool] = lambda _: True


MOMENT = "a race of one moment, which a minute of worlds does not meet"
TOTAL = "the shell does not ask for it; the rules hold for any shell"
RARE = {
    "who has reported is called stuck": MOMENT,
    "a return by a call that says nothing new settles nothing": "not met: it ends a round",
    "a soft end blames who moves": "one rank stuck and another slow at one soft end is rare",
    "a budget that does not run ends the round": MOMENT,
    "a shortfall cuts the grace of another cause": MOMENT,
    "a spent budget drops the shortfall": MOMENT,
    "a late member is seated in the round that has ended": "nothing comes of a seat there",
    "an open round is retired": MOMENT,
    "lost without comparing the session": TOTAL,
    "Cleared is appended before the call, not with it": MOMENT,
    "Cleared before the call settles the round that the call says no to": MOMENT,
}


def _of_the_model() -> dict[str, Guard]:
    """The mistakes that the model refutes are removals of guards of the rules: each is one here."""
    return {
        name: Guard(
            mistake.note or f"{mistake.what}, in every order of a small world",
            tuple(Edit(f"coordinator/{e.file}", *e[1:]) for e in mistake.edits),
            f"{RARE[name]}; the model refutes it" if name in RARE else "",
        )
        for name, mistake in MISTAKES.items()
        if mistake.edits
    }


def _hangs(world: World) -> bool:
    return world.waits and world.mode != "calm"


def _hangs_behind_a_proxy(world: World) -> bool:
    return _hangs(world) and world.net.signed


def _one(
    file: str,
    function: str,
    old: str,
    new: str,
    keeps: str,
    spared: str = "",
    where: Callable[[World], bool] = lambda _: True,
) -> Guard:
    return Guard(keeps, (Edit(file, function, old, new),), spared, where)


calls, claiming, findings, joining, orders, settling = (
    partial(_one, f"coordinator/rules/{name}.py")
    for name in ("calls", "claiming", "findings", "joining", "orders", "settling")
)
engine, deciding, compacting, judging, facts, writing, budgets, serving, presence, served = (
    partial(_one, f"coordinator/{name}.py")
    for name in (
        *("engine", "round", "compaction", "verdict", "cell", "writer", "budgets", "service"),
        *("presence", "served"),
    )
)
tokens = partial(_one, "coordinator/tokens.py")
sessions = partial(_one, "coordinator/api/session.py")
memory = partial(_one, "coordinator/logs/memory.py")
sqlite = partial(_one, "coordinator/logs/sqlite.py")
logs = partial(_one, "coordinator/logs/__init__.py")
flow, stream = (partial(_one, f"worker_client/{name}.py") for name in ("flow", "session"))
reading = partial(_one, "worker_client/reading.py")

APPEND = "await self._log.append(cell.name, Entry(events=events), n=cell.engine.entries)"

GUARDS: dict[str, Guard] = _of_the_model() | {
    # --- the rules, beside those of the model -----------------------------------------------------
    "a report that was kept is kept again": calls(
        "on_submit",
        "member.seated and member.ranks[0] in round_.sent",
        "False",
        "idempotency: a report that is repeated says nothing new",
    ),
    "another report of the same rank is acknowledged": calls(
        "on_submit",
        "report != round_.sent[rank]",
        "False",
        "the first report of a rank stands, and another is refused",
    ),
    "a duplicate is answered with the plan": calls(
        "on_submit",
        "round_.verdict == 'PASSED' and (not member.seated)",
        "False",
        "who holds no slot is not told PASSED",
    ),
    "a report after the verdict or of one that is gone": calls(
        "on_submit",
        "round_.verdict or member.gone or (not member.seated)",
        "not member.seated",
        "a report after the verdict, or after the no of its process, changes nothing",
    ),
    "a no after the end": calls(
        "_said_no", "not round_.open or member.gone", "member.gone", "a round that is over is over"
    ),
    "who has said no says it again": calls(
        "_said_no",
        "not round_.open or member.gone",
        "not round_.open",
        "idempotency: a no that is repeated says nothing new",
    ),
    "who has left leaves again": calls(
        "on_leave",
        "not round_.open or member.gone",
        "not round_.open",
        "idempotency: leaving twice is leaving once",
    ),
    "leaving after the end": calls(
        "on_leave",
        "not round_.open or member.gone",
        "member.gone",
        "a round that is over is over",
    ),
    "applied after the end": calls(
        "on_apply", "not round_.open or member.gone", "member.gone", "a round that is over is over"
    ),
    "applied by one that is gone": calls(
        "on_apply",
        "not round_.open or member.gone",
        "not round_.open",
        "whoever said no has not built",
    ),
    "applied twice": calls(
        "on_apply",
        "or member.applied is not None ",
        "",
        "idempotency: applied that is repeated says nothing new",
    ),
    "applied without a seat": calls(
        "on_apply",
        " or (not member.seated)",
        "",
        "who holds no slot builds nothing that counts",
        spared="nobody without a seat is told PASSED, so none knows what to name",
    ),
    "serving twice": calls(
        "on_serve", "member.kept", "False", "idempotency: serving is said in the log once"
    ),
    "an older start is not told to exit": _one(
        "coordinator/engine.py",
        "taken_over",
        "last.launch.restart > round_.launch.restart",
        "False",
        "whoever a greater restart has taken over from hears of it",
    ),
    "a claim that was kept is claimed again": claiming(
        "on_claim",
        "engine.round_of(command.attempt)",
        "False",
        "idempotency: a claim that is repeated gets the same answer",
    ),
    "inputs of the joins are not compared": claiming(
        "_inputs_differ",
        "if join.inputs is None or",
        "if True or",
        "equal inputs, already before weights are loaded",
        spared="not met: two images in one start are rare here",
    ),
    "a run of MASTER_ADDR lets in who joined before it was left": claiming(
        "_fence",
        "attempt <= left_at or not came_back",
        "not came_back",
        "of a run that may come back, who joined before it was left stays out",
        spared="not met: a late claim of such a run is rare here",
    ),
    "a run that is left is not noted": engine(
        "_opened",
        "left[engine.last.launch.run] = engine.last_attempt",
        "pass",
        "a run that another took over from does not come back",
    ),
    "a run that comes back keeps its old place": engine(
        "_opened",
        "left.pop(engine.last.launch.run, None)",
        "pass",
        "of the runs that were left the latest are kept",
        spared="a matter of which 64 runs are remembered",
    ),
    "who departed stays suspect": engine(
        "_in_round",
        "departed=why, suspect=None",
        "departed=why",
        "a suspicion ends when it is known what became of the process",
        spared="nobody asks for it any more; what status shows",
    ),
    "a repeated join is another process": joining(
        "on_reserve",
        "find_attempt(engine, command.join) is not None",
        "False",
        "idempotency: a join that is repeated gets the same attempt",
    ),
    "a nonce that was used with another document is answered": joining(
        "find_attempt",
        "earlier != join",
        "False",
        "the first document of a nonce stands, and another is refused",
        spared="no simulated process uses a nonce twice",
    ),
    "a mark is kept again": joining(
        "on_mark",
        "set(command.touched) <= set(reserved.touched)",
        "False",
        "idempotency: what a fault rule did is noted once",
        spared="it is rare, and what comes of it is a longer log",
    ),
    "a cancel that is repeated": orders(
        "on_retire",
        "round_.retired is not None",
        "False",
        "idempotency: a round is retired once",
    ),
    "suspected twice for one session": findings(
        "on_presence",
        "member.suspect == connection",
        "False",
        "idempotency: the end of one session is logged once",
    ),
    "who is not suspect is cleared": findings(
        "on_presence",
        "member.suspect is None",
        "False",
        "a return is logged only of who was away",
    ),
    "a budget's end cuts a grace": findings(
        "on_spend",
        "command.what != round_.phase or round_.causes",
        "command.what != round_.phase",
        "with a cause the grace ends the round, not a budget that was found spent before it",
        spared="a race of one moment",
    ),
    "a grace without a cause": findings(
        "on_spend",
        "if round_.causes else ()",
        "if True else ()",
        "a grace that is over ends a round only for its causes",
        spared="the shell does not ask for it; the rules hold for any shell",
    ),
    "an ended round is settled again": settling(
        "settle",
        "not round_.open or round_.causes",
        "round_.causes",
        "a round ends once",
    ),
    "touches after the end": settling(
        "newly_touched",
        "new and round_.open",
        "new",
        "an ended round is frozen",
    ),
    "a touch is noted again": settling(
        "newly_touched",
        "t not in round_.touches",
        "True",
        "idempotency: what a fault rule did is noted once",
    ),
    "the decision hides fault rules": judging(
        "_shown_faults",
        "found = faults(touches)",
        "found = []",
        "a decision under a fault rule says so",
    ),
    "a fault rule that held back a join is hidden": settling(
        "end_round",
        "if r.join.launch == round_.launch",
        "if False",
        "a rank may be missing because a rule held it back: the decision says so",
        spared="not met: a rule that holds back until a budget ends is rare here",
    ),
    "a call that appends nothing hides its fault rule": deciding(
        "decide",
        "_decide(engine, command) or _touched_only(engine, command)",
        "_decide(engine, command)",
        "a fault rule on a call that says nothing new shows in the decision",
        spared="the history does not tell which calls a rule met",
    ),
    "commands of one entry are decided apart": deciding(
        "decide_together",
        "engine = reduce(evolve, events, engine)",
        "pass",
        "each command is decided on what those before it leave",
    ),
    "a floor forgets the last attempt": compacting(
        "compaction",
        "last_attempt=engine.last_attempt",
        "last_attempt=0",
        "attempts never go back",
    ),
    "a floor forgets the runs that were left": compacting(
        "compaction",
        "left_runs=dict(engine.left_runs)",
        "left_runs={}",
        "a run that another took over from does not come back",
        spared="not met: a run that comes back after a floor is rare here",
    ),
    "reservations are not carried over a floor": compacting(
        "compaction",
        "RESERVATIONS.dump_python(dict(engine.reservations), mode='json')",
        "RESERVATIONS.dump_python({}, mode='json')",
        "who has joined can claim, whatever was dropped meanwhile",
    ),
    "a floor keeps too few rounds": compacting(
        "compaction",
        "numbers[-keep_rounds:]",
        "numbers[len(numbers):]",
        "the latest rounds can be read",
    ),
    # --- the writer -------------------------------------------------------------------------------
    "told before it is durable": writing(
        "_append",
        APPEND,
        APPEND.replace("await ", "self._do_later(") + ")",
        "durable before told",
    ),
    "a conflict is taken for kept": writing(
        "_append",
        "return False",
        "pass",
        "who was overtaken on the log reads it and decides again",
    ),
    "after an append without an answer the old state is believed": writing(
        "_append",
        "cell.stale = True",
        "pass",
        "an append without an answer may have been kept: read before deciding again",
    ),
    "after an append without an answer nobody looks": writing(
        "_append",
        "self._do_later(self._read_again(cell))",
        "pass",
        "what was kept without an answer is found out though nobody calls",
        spared="it only comes later: the next call finds it",
    ),
    "what was read again is told to nobody": writing(
        "_read_again",
        "self._on_kept(cell, ())",
        "pass",
        "what was kept without an answer is told as soon as it is found",
        spared="it only comes later: the next call is told",
    ),
    "what the log turns out to hold waits for nobody": writing(
        "_refresh",
        "self._on_found(cell)",
        "pass",
        "whoever the log says is here must open a session, also where its answer was lost",
        spared="not met: who serves, is not answered and dies is rare here",
    ),
    "an entry whose caller went away waits for nobody": writing(
        "_carry_out",
        "self._on_found(cell)",
        "pass",
        "whoever the log says is here must open a session, also where it did not wait to hear it",
        spared="a caller that goes away while it is appended, and dies, is rare",
    ),
    "what speaks against a process shares the entry of its call": writing(
        "_together",
        "isinstance(w.command, AGAINST)",
        "False",
        "whoever is answered is not suspect",
        spared="a race of one moment",
    ),
    "who is answered does not go on first": writing(
        "_drain",
        "await asyncio.sleep(0)",
        "pass",
        "what is found after an answer comes after what the answered does now",
        spared="a race of one moment",
    ),
    "a finding is given up when the store is away": writing(
        "find",
        "await asyncio.sleep(RETRY_S)",
        "return False",
        "a finding is taken to the log for as long as the store needs",
        spared="not met: who dies while the store is away is rare here",
    ),
    "an open round is compacted": writing(
        "_compact",
        "cell.engine.last and cell.engine.last.open",
        "False",
        "the facts of an open round are still being told",
        spared="not met: nobody here resumes after a floor of an open round",
    ),
    "nothing is ever compacted": writing(
        "_tell",
        "len(cell.engine.rounds) > 2 * self._keep_rounds(cell.name)",
        "False",
        "nothing accumulates past retention",
    ),
    "compaction does not read what it may have written": writing(
        "_compact",
        "cell.stale = True",
        "pass",
        "an append without an answer may have been kept: read before deciding again",
        spared="the next append is refused by its number, and reads",
    ),
    # --- the stores -------------------------------------------------------------------------------
    "the number of an append is not compared": memory(
        "append", "following != n", "False", "the number fences off a second coordinator"
    ),
    "the number of an append is not compared in SQLite": sqlite(
        "_is_next",
        "bool(held == append.n)",
        "True",
        "the number fences off what was decided on an older state",
        spared="a second line: the primary key has the last word",
    ),
    "a drop takes the last entry": memory(
        "drop",
        "min(below - first, len(held) - 1)",
        "len(held)",
        "numbers go on where they were",
    ),
    "elapsed time goes back": logs(
        "further",
        "max(one, other or one, key=lambda e: (e[0], PHASES.find(e[1]), e[2]))",
        "one",
        "of what two coordinators count the furthest is kept",
        spared="two coordinators count, and with two at once L1 is not judged (issue H)",
    ),
    # --- budgets ----------------------------------------------------------------------------------
    "a restart forgets a budget": budgets(
        "resume",
        "cell.clock.resume(last, elapsed[1], elapsed[2])",
        "pass",
        "elapsed carry-over: a restart goes on from what was counted",
        where=_hangs,
    ),
    "a budget is never saved": budgets(
        "_spend",
        "self._spent[cell.name] = (round_.number, phase, spent_s)",
        "pass",
        "elapsed carry-over: what was counted is kept beside the log",
        where=_hangs,
    ),
    "what another round has spent counts": budgets(
        "resume",
        "last.number == elapsed[0]",
        "True",
        "a budget begins anew with its round",
    ),
    "what another phase has spent counts": facts(
        "Clock.resume",
        "round_.phase == phase and ",
        "",
        "a budget begins anew with its phase",
    ),
    "a pause counts in full": facts(
        "Clock.advance",
        "min(elapsed_s, TICK_S)",
        "elapsed_s",
        "of a pause of the coordinator a tick counts",
    ),
    "a budget goes on from the one before": facts(
        "Clock.advance",
        "((round_.number, round_.phase), 0.0)",
        "((round_.number, round_.phase), self._spent_s)",
        "a budget begins anew with its phase",
    ),
    "an abort goes on in the grace of the start": facts(
        "Clock._same_grace",
        "(phase == 'apply') == (round_.phase == 'apply')",
        "True",
        "an abort has a grace of its own",
        spared="dead: a round with a cause is never PASSED, so no grace has begun",
    ),
    "a budget is spent while the store is away": budgets(
        "_spend",
        "not self._writer.store_answers",
        "False",
        "no budget is spent while nobody could be answered",
    ),
    "a budget that is over is not looked at again": budgets(
        "_watched",
        "self.watch(cell)",
        "pass",
        "the budgets of every round are followed, not of the first alone",
        spared="what opens a round follows its budgets too; this is for the moment between",
    ),
    "budgets are not taken up after a restart": serving(
        "Service.start",
        "self._budgets.watch(cell)",
        "pass",
        "a new coordinator takes up every open round",
        where=_hangs,
    ),
    "who shows no progress is not looked at": budgets(
        "_signs",
        "age_s >= round_.policy.stall_s",
        "True",
        "only who showed no progress for stall_s is stuck",
    ),
    # --- the service ------------------------------------------------------------------------------
    "who has claimed need not open a session": serving(
        "Service.claim",
        "self.presence.expect(seat, within_s=self.settings.lost_after_s)",
        "pass",
        "whoever has claimed must open its session",
        spared="it only comes later: the budget ends the round",
    ),
    "a session that opens clears nobody": serving(
        "Service.attach",
        "await self._writer.carry_out(cell, Clear(number, attempt))",
        "pass",
        "a suspect's return is durable before it is answered",
    ),
    "an answer clears nobody": serving(
        "Service.seen",
        "await self._writer.carry_out(cell, Clear(number, attempt))",
        "pass",
        "cleared before answered",
    ),
    "an answer overtakes a suspicion on its way": serving(
        "Service.seen",
        "member.suspect or self.presence.follows(seat)",
        "member.suspect",
        "a suspicion that is on its way to the log comes before the answer",
        spared="a race of one moment",
    ),
    "a long poll clears nobody": serving(
        "Service._call",
        "await cell.change(left_s)\n    await self.seen(name, command.round, command.attempt)",
        "await cell.change(left_s)",
        "who is answered after a long wait is not suspect either",
        spared="not met: a suspicion in the middle of a long poll is rare here",
    ),
    "a refusal clears nobody": serving(
        "Service.refused",
        "await self.seen(name, round_.number, attempt)",
        "pass",
        "a refusal is an answer too, whatever was wrong with the call",
    ),
    "who was cleared or serves need not open a session": serving(
        "Service._kept",
        "isinstance(event, Cleared | Serving)",
        "False",
        "whoever called, and whoever serves, must have a session again",
    ),
    "who serves need not keep a session": serving(
        "Service._kept",
        "isinstance(event, Cleared | Serving)",
        "isinstance(event, Cleared)",
        "whoever says that it serves must have a session",
    ),
    "the living of an ended round are waited for": serving(
        "Service._kept",
        "self.presence.forget((Seat(cell.name, event.round, m) for m in members))",
        "pass",
        "nobody is waited for in a round that has ended",
        spared="what is found of them the rules refuse; it spares tasks",
    ),
    "a new coordinator waits for nobody": serving(
        "Service.start",
        "self._expect_members(cell)",
        "pass",
        "whoever was here before a restart must come back",
        spared="not met: who serves and dies with its coordinator is rare here",
    ),
    "the plan of a round that is not in force is checked": serving(
        "Service.check",
        "engine.in_force is None or engine.in_force.number != number",
        "False",
        "only the plan in force is sized for",
    ),
    "facts of one moment are never told": serving(
        "Service._kept",
        "cell.wake(at_once=settled or not events)",
        "pass",
        "whoever waits hears what was kept",
    ),
    "a token of another store is taken": tokens(
        "Tokens.attempt",
        "parts[0] != self._store_id",
        "False",
        "an attempt of a store that was replaced means nothing here",
        spared="a second line: the token is signed with the key of its store",
    ),
    "any token is taken": Guard(
        "an attempt of a store that was replaced means nothing here, nor a token that was guessed",
        (
            Edit("coordinator/tokens.py", "attempt", "parts[0] != self._store_id", "False"),
            Edit(
                "coordinator/tokens.py",
                "check",
                "not hmac.compare_digest(expected.encode(), (token or '').encode())",
                "False",
            ),
        ),
    ),
    # --- presence ---------------------------------------------------------------------------------
    "the end of an older session counts": presence(
        "Presence.detach",
        "self._open.get(seat) is not connection",
        "self._open.get(seat) is None",
        "of two sessions of one process the newer counts",
    ),
    "a stream that the coordinator ends makes suspect": presence(
        "Presence.detach",
        "by_peer and self._patience_s(seat) is not None",
        "self._patience_s(seat) is not None",
        "a stream that the coordinator ends makes nobody suspect",
        spared="it ends none of an open round but when it stops, and finds nothing then",
    ),
    "the end of a session says nothing": presence(
        "Presence.detach",
        "by_peer and self._patience_s(seat) is not None",
        "False",
        "whoever goes without a word is found out",
    ),
    "a session that opens ends no waiting": presence(
        "Presence.attach",
        "self._forget(seat)",
        "pass",
        "whoever is back is not waited for",
    ),
    "who is expected may be there already": presence(
        "Presence.expect",
        "seat not in self._open",
        "True",
        "nobody waits for a session that is open",
        spared="not met: its next call clears it",
    ),
    "nobody may stay away at all": presence(
        "Presence._await_return",
        "await self._wait(after_s)",
        "pass",
        "grace: a suspect has its time to come back",
    ),
    "no time to open a session": presence(
        "Presence._await_opening",
        "await self._wait(within_s)",
        "pass",
        "grace: whoever is expected has its time to open a session",
    ),
    "a mass end raises no doubt": presence(
        "Presence._wait",
        "(held_s := self.doubt_left_s) > 0",
        "(held_s := 0.0) > 0",
        "when many sessions end together nobody is judged for a while",
        spared="it asks for six ranks on three hosts that all come back late",
    ),
    "a silent session is not looked at": presence(
        "Presence.heard",
        "self._listening is None",
        "False",
        "behind a proxy a process must be heard",
    ),
    "a call is no beat": presence(
        "Presence.heard",
        "self._heard_at_s[seat] = self._served_s",
        "self._heard_at_s.setdefault(seat, self._served_s)",
        "behind a proxy any call counts as a beat",
        where=_hangs_behind_a_proxy,
        spared="not met: its next call clears it",
    ),
    "a silent session is watched": presence(
        "Presence._listen",
        "self._unwatch(seat)",
        "pass",
        "nobody takes a session for alive that a proxy alone holds",
    ),
    "silence is lost at once": presence(
        "Presence._await_word",
        "await self._wait(self._lost_after_s - self._silent_after_s)",
        "pass",
        "grace: who has fallen silent has its time to be heard",
    ),
    "a pause counts in full against who is away": served(
        "served_sleep",
        "min(loop.time() - began_s, step_s)",
        "loop.time() - began_s",
        "a pause of the coordinator counts against nobody",
    ),
    # --- the stream -------------------------------------------------------------------------------
    "a duplicate is pushed the plan": sessions(
        "_is_for_it",
        "round_.members[seat.attempt].seated",
        "True",
        "who holds no slot is not told PASSED",
    ),
    "a stream begins anew": _one(
        "coordinator/api/rounds.py",
        "session",
        "SessionStream(service, connection, last_event_id, facts=facts)",
        "SessionStream(service, connection, None, facts=facts)",
        "a stream goes on after the last fact that was heard",
    ),
    "who was told to give way is taken for alive": sessions(
        "__call__",
        "self._gave_way and (not by_peer)",
        "False",
        "whoever was told to exit must come back, or has departed",
    ),
    "an older start is not told by its stream": sessions(
        "_events",
        "refuse_if_taken_over(engine, round_)",
        "pass",
        "whoever a greater restart has taken over from hears of it",
        spared="a second line: its next call is refused",
    ),
    # --- the client -------------------------------------------------------------------------------
    "the client goes on after FAILED": Guard(
        "who hears FAILED allocates nothing",
        (
            Edit("worker_client/flow.py", "agree", "not decision.passed", "False"),
            # A second line: a decision without a plan offers no rank what it has.
            Edit("worker_client/flow.py", "agree", "check_offer(decision, reports)", "pass"),
        ),
    ),
    "the client serves after ABORTED": flow(
        "build", "not outcome.sealed", "False", "who hears ABORTED does not serve"
    ),
    "the client does not check the offer": flow(
        "agree",
        "check_offer(decision, reports)",
        "pass",
        "no rank builds more than it offered",
        spared="a second line: the plan would have to be wrong first, and S3 sees that",
    ),
    "the client takes PASSED before its own report": flow(
        "_settle",
        "news.document.result in ('PASSED', 'SEALED')",
        "False",
        "only what ends a round comes before this process's own word",
        spared="nobody is told PASSED before its own report; what is left is a repeated PUT",
    ),
    "the client does not look at what it was sent": reading(
        "_check",
        "about != (seat.name, seat.round, True)",
        "False",
        "a document is about the round of this process",
        spared="a second line: the simulated network garbles nothing",
    ),
    "the client asks once": flow(
        "_ask",
        "patience.left_s > 0",
        "patience.tries < 1",
        "a call without an answer is repeated",
    ),
    "the client reports once": flow(
        "_settle",
        "except _Again as again:\n            news = (yield from patience.pause(again,"
        " unless=what))\n            continue",
        "except _Again as again:\n            raise Refused(str(again))",
        "a call without an answer is repeated",
        spared="its process ends and its start begins anew: late, not wrong",
    ),
    "the client does not attach again": stream(
        "_run",
        "while not self._over",
        "if not self._over",
        "presence outlives the end of a stream",
        spared="it is lost and its start begins anew: late, not wrong",
    ),
    "the client goes on after a refusal of its session": stream(
        "_refuse",
        "self._problem = problem",
        "return",
        "whoever is told to exit by its session does",
        spared="a second line: its next call is refused",
    ),
    "the client sends no beats": stream(
        "_tell",
        "BEAT_S if self._beating else None",
        "None",
        "behind a proxy a process is heard",
        where=_hangs_behind_a_proxy,
        spared="not met: its next call clears it",
    ),
}

# What CI looks at: a guard of each room, whose seeds are small worlds.
FIXED = (
    "passed over a veto",
    "no fence between launches",
    "sealed without comparing the digest",
    "told before it is durable",
    "the number of an append is not compared",
    "an answer clears nobody",
    "nobody may stay away at all",
    "the client goes on after FAILED",
)


# --- planting -------------------------------------------------------------------------------------


@contextmanager
def removed(guard: Guard) -> Iterator[None]:
    """The shipped functions without this guard. Raises Moved when it is not found."""
    texts: dict[tuple[str, str], str] = {}
    for edit in guard.edits:
        place = (edit.file, _qualified(edit.file, edit.function))
        text = texts.get(place) or _source(*place)
        if text.count(edit.old) != 1:
            where = f"{edit.file} {edit.function}"
            raise Moved(f"{where}: {text.count(edit.old)} times {edit.old!r} in\n{text}")
        texts[place] = text.replace(edit.old, edit.new)
    # The code is exchanged, not the function: whoever has imported it gets the edited one.
    functions = {place: _function(*place) for place in texts}
    codes = {place: function.__code__ for place, function in functions.items()}
    try:
        for place, text in texts.items():
            functions[place].__code__ = _compiled(place, text, codes[place])
        yield
    finally:
        for place, function in functions.items():
            function.__code__ = codes[place]


@cache
def _sources(file: str) -> dict[str, str]:
    """Every function of a file without its decorators, by its qualified name."""
    found: dict[str, str] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + node.name
                node.decorator_list = []
                found[name] = ast.unparse(node)

    walk(ast.parse((ROOT / file).read_text()).body, "")
    return found


def _source(file: str, name: str) -> str:
    return _sources(file)[name]


def _qualified(file: str, name: str) -> str:
    names = [n for n in _sources(file) if n == name or n.endswith(f".{name}")]
    if len(names) != 1:
        raise Moved(f"{file} has {len(names)} functions {name}")
    return names[0]


def _function(file: str, name: str) -> FunctionType:
    dotted = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    place: Any = importlib.import_module(dotted)
    for part in name.split("."):
        place = vars(place)[part]
    if isinstance(place, property):
        place = place.fget
    assert isinstance(place, FunctionType), f"{file} {name} is a {type(place).__name__}"
    return place


def _compiled(place: tuple[str, str], text: str, shipped: CodeType) -> CodeType:
    module = compile(f"from __future__ import annotations\n{text}", f"{place[0]}, edited", "exec")
    name = place[1].rpartition(".")[2]
    codes = [c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == name]
    (code,) = codes
    assert code.co_freevars == shipped.co_freevars, f"{place}: it must be a closure of the same"
    return code


# --- searching ------------------------------------------------------------------------------------


class TooLong(KeyboardInterrupt):
    """Of all exceptions this kind alone gets out of an event loop."""


@dataclass(frozen=True)
class Caught:
    """by: the promises that the history of this seed breaks. seconds: of one core, in all."""

    seed: int
    by: tuple[str, ...]
    why: str
    seconds: float


def broken(seed: int) -> dict[str, str]:
    """What the history of a seed breaks, and why."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, WORLD_S)
    try:
        verdicts = check(run(seed))
    except TooLong:
        return {"endless": f"the world did not end within {WORLD_S:g} s of one core"}
    except Exception as fault:
        return {"sound": f"{type(fault).__name__}: {fault}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return {v.name: v.breaches[0][0] for v in verdicts if v.breaches}


def search(name: str, *, within_s: float = WITHIN_S, first: int = 0) -> Caught | None:
    """The seed that is known to catch a removal, else the first one that does, from `first` on.

    Counts only seeds whose worlds keep every promise with the guard in its place.
    """
    began_s = time.process_time()
    known = known_seeds().get(name)
    for seed in chain([known] if known is not None else [], count(first)):
        if time.process_time() - began_s > within_s:
            return None
        if not _fits(GUARDS[name], seed):
            continue
        with removed(GUARDS[name]):
            found = broken(seed)
        if found and not broken(seed):
            seconds = time.process_time() - began_s
            return Caught(seed, tuple(found), next(iter(found.values())), seconds)
    raise AssertionError("count() has no end")


def _fits(guard: Guard, seed: int) -> bool:
    world = World(str(seed))
    world.loop.close()
    return guard.where(world)


def known_seeds() -> dict[str, int]:
    return json.loads(SEEDS.read_text()) if SEEDS.exists() else {}  # type: ignore[no-any-return]


def guards(names: list[str], *, within_s: float = WITHIN_S, first: int = 0) -> int:
    """Print the table of these guards, or of all; keep the seeds. 0: each is caught or spared."""
    seeds, missed, began_s = known_seeds(), [], time.process_time()
    for name in names or GUARDS:
        guard = GUARDS[name]
        if guard.spared and not names:
            print(f"{name}: spared, {guard.spared}", flush=True)
            continue
        began = time.process_time()
        caught = search(name, within_s=within_s, first=first)
        if caught is None:
            missed.append(name)
            seeds.pop(name, None)
            print(f"{name}: NOT CAUGHT in {time.process_time() - began:.0f} s", flush=True)
        else:
            seeds[name] = caught.seed
            print(
                f"{name}: {', '.join(caught.by)}, seed {caught.seed}, {caught.seconds:.1f} s:"
                f" {caught.why}",
                flush=True,
            )
        SEEDS.write_text(json.dumps(seeds, indent=1) + "\n")
    print(f"\n{len(names or GUARDS)} guards, {time.process_time() - began_s:.0f} s of one core")
    if missed:
        print(f"not caught: {'; '.join(missed)}")
    return 1 if missed else 0
