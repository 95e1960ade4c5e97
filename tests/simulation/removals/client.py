"""Guards of the client."""

from __future__ import annotations

from functools import partial

from tests.model.rules import Edit
from tests.simulation.removals.guard import Guard, hangs_behind_a_proxy, one

flow, stream, reading = (
    partial(one, f"worker_client/{name}.py") for name in ("flow", "session", "reading")
)

GUARDS: dict[str, Guard] = {
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
        where=hangs_behind_a_proxy,
        spared="not met: its next call clears it",
    ),
}
