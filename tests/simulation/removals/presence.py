"""Guards of presence and of the stream."""

from __future__ import annotations

from functools import partial

from tests.simulation.removals.guard import Guard, hangs_behind_a_proxy, one

presence, served = (partial(one, f"coordinator/{name}.py") for name in ("presence", "served"))
sessions = partial(one, "coordinator/api/session.py")

GUARDS: dict[str, Guard] = {
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
        where=hangs_behind_a_proxy,
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
    "a stream begins anew": one(
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
}
