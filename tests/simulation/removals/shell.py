"""Guards of what carries the rules out: the writer, the budgets, the service."""

from __future__ import annotations

from functools import partial

from tests.model.rules import Edit
from tests.simulation.removals.guard import Guard, hangs, one

facts, writing, budgets, serving, tokens = (
    partial(one, f"coordinator/{name}.py")
    for name in ("cell", "writer", "budgets", "service", "tokens")
)

APPEND = "await self._log.append(cell.name, Entry(events=events), n=cell.engine.entries)"

GUARDS: dict[str, Guard] = {
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
    # --- budgets ----------------------------------------------------------------------------------
    "a restart forgets a budget": budgets(
        "resume",
        "cell.clock.resume(last, elapsed[1], elapsed[2])",
        "pass",
        "elapsed carry-over: a restart goes on from what was counted",
        where=hangs,
    ),
    "a budget is never saved": budgets(
        "_spend",
        "self._spent[cell.name] = (round_.number, phase, spent_s)",
        "pass",
        "elapsed carry-over: what was counted is kept beside the log",
        where=hangs,
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
        where=hangs,
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
}
