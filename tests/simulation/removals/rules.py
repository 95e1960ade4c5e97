"""Guards of the rules: those of the model's mistakes, and those beside them."""

from __future__ import annotations

from functools import partial

from tests.model.mistakes import MISTAKES
from tests.simulation.removals.guard import Guard, one

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
            tuple(e._replace(file=f"coordinator/{e.file}") for e in mistake.edits),
            f"{RARE[name]}; the model refutes it" if name in RARE else "",
        )
        for name, mistake in MISTAKES.items()
        if mistake.edits
    }


calls, claiming, findings, joining, orders, settling = (
    partial(one, f"coordinator/rules/{name}.py")
    for name in ("calls", "claiming", "findings", "joining", "orders", "settling")
)
engine, deciding, compacting, judging = (
    partial(one, f"coordinator/{name}.py") for name in ("engine", "round", "compaction", "verdict")
)

GUARDS: dict[str, Guard] = _of_the_model() | {
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
    "an older start is not told to exit": one(
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
}
