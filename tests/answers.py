"""What kvaccord answers to the reported failures, beside what each case expects."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

from kvaccord.decision import Frozen
from kvaccord.layout import named
from tests.convert import CASES, a_case, story_of
from tests.play import play
from tests.story import Comes, Dies, History, Raises, Reports, Story

ALL = sorted(path.name[:3] for path in CASES.glob("*.json"))

# The cases were written before the protocol had codes of its own. Where two words are not one and
# the same thing, the reason stands beside them.
OUR_CODE = {
    "OK": "agreed",
    "OK_REDUCED_TO_MIN": "agreed",  # the plan says who binds; a minimum is no other verdict
    "FREE_BELOW_REQUEST": "request_exceeds_free",
    "MAX_LEN_DOES_NOT_FIT": "does_not_fit",  # one request is the greatest min_entries
    "STATE_SLOTS_TOO_FEW": "state_floor_exceeds_budget",
    "NO_KV_MEMORY": "does_not_fit",  # no room for one entry is no room for min_entries
    "IMPLAUSIBLE_REPORT": "implausible_report",
    "CONFIG_MISMATCH": "inputs_disagree",
    "RANK_RAISED": "rank_vetoed",
    "RANK_DIED": "rank_lost",  # a session's end is all that is seen of a death
    "MISSING_RANKS": "ranks_missing",
    "IMBALANCED": "spread_too_wide",  # a warning is `imbalanced`, a policy's refusal this
    "DUPLICATE_RANK": "duplicate_rank",
    # A process of a round that is over is no member of the next: there its rank is missing, and
    # the text names the process that was left behind.
    "STALE_RANK": "ranks_missing",
    # `superseded` is ours for another launch; within one a newcomer replaces.
    "ATTEMPT_SUPERSEDED": "rank_replaced",
}

# Where an expected answer is not ours, and why.
DISAGREE = {
    "034": "`sub_code` PORT_IN_USE: a code of ours says what the round did, and the rank's own"
    " exception says the rest. Guessing sub-codes from its text is for the hints",
    "036": "the hint knows that 71 % were read and that host memory is free. Our text has the phase"
    " and when it last moved; a share, and the host's memory, are not in it",
    "045": "the verdict that rank 1 is missing comes when `gather_s` is spent after the last"
    " restart. Until then every restart ends its round as `rank_replaced` of rank 0, and the status"
    " says all along that rank 1 is missing",
    "050": "`other_group` should be warned of the card that both share. A verdict of ours comes"
    " from the log of one engine alone, so that it can be replayed. A process that says how much"
    " was free when it began may have `memory_moved`; who else is on a device is for a hint, made"
    " on reading",
    "055": "a process that is deadlocked but lives keeps its session, for the kernel answers for"
    " it: the round stays whole. Played is the other reading, in which its streams end. Whether a"
    " serving engine gets on is for the engine's own health check",
    "056": "as rows the ranks raise before the verdict, so the answer is `rank_vetoed`; in the"
    " engine they raise while they take the plan, which ends the round ABORTED as `apply_failed`",
}


class Played(NamedTuple):
    case: dict[str, Any]
    story: Story
    history: History

    @property
    def expected(self) -> dict[str, Any]:
        expected: dict[str, Any] = self.case["expected"]
        return expected

    @property
    def engine(self) -> str:
        """The engine that the expected answer speaks of: the one that is not the `other_group`."""
        other = self.expected.get("other_group", {}).get("group")
        return next(engine for engine in self.story.engines if engine != other)

    @property
    def answer(self) -> tuple[float, Frozen]:
        """When the expected code was last given, and the document; the last one if it never was."""
        documents = self.history.documents(self.engine)
        code = OUR_CODE[self.expected["reason_code"]]
        return next((d for d in reversed(documents) if d[1].code == code), documents[-1])

    @property
    def document(self) -> Frozen:
        return self.answer[1]

    @property
    def verdict(self) -> dict[str, Any]:
        """The part of the document that says outcome, code, causes."""
        document = self.document.document
        verdict: dict[str, Any] = document.get("verdict", document)
        return verdict

    @property
    def plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = self.document.document["plan"]
        return plan

    def told(self, engine: str | None = None) -> list[str]:
        """`ROUND OUTCOME code [ranks]` of every document, in order."""
        documents = self.history.documents(engine or self.engine)
        return [f"{d.round} {d.result} {d.code} {d.ranks}" for _, d in documents]

    @property
    def known_since_s(self) -> float:
        """When the last of the blamed ranks did what it is blamed for; 0 if it did nothing."""
        decided_s, document = self.answer
        if document.code == "ranks_missing":
            return 0.0
        return max(
            act.at_s
            for act in self.story.acts
            if isinstance(act, Comes | Reports | Raises | Dies)
            and act.at_s <= decided_s
            and not {*act.who.ranks}.isdisjoint(document.ranks)
        )

    @property
    def unheard(self) -> list[int]:
        """The ranks of the round whose report had not been sent when it was decided."""
        document = self.document
        decided_s = self.history.decisions[self.engine, document.round][0]
        heard = {
            rank
            for act in self.story.acts
            if isinstance(act, Reports) and act.at_s <= decided_s
            if self.history.rounds.get(act.who) == document.round
            for rank in act.who.ranks
        }
        layout = self.history.decisions[self.engine, document.round][1].document["layout"]
        world = layout["dp"] * layout["pp"] * layout["pcp"] * layout["tp"]
        return [rank for rank in range(world) if rank not in heard]


def played(case: dict[str, Any]) -> Played:
    story = story_of(case)
    return Played(case, story, play(story))


@cache
def played_case(number: str) -> Played:
    return played(a_case(number))


def check_verdicts_told(one: Played) -> None:
    """A verdict that the story tells of is ours at that time."""
    told = [e for e in one.case["input"].get("events", ()) if "verdict" in e]
    for event in told:
        at_s, engine = event["t"], event.get("group", one.engine)
        (seen,) = [s for s in one.history.seen if s.engine == engine and abs(s.at_s - at_s) < 0.1]
        states = {"pass": {"PASSED", "SEALED"}, "fail": {"FAILED", "ABORTED"}}[event["verdict"]]
        assert seen.status["state"] in states


def check_readiness(one: Played) -> None:
    """Of every time that the case asks: 200 is a plan in force that stands whole."""
    for asked in one.expected["readiness"]:
        (seen,) = [s for s in one.history.seen if 0.4 < s.at_s - asked["t"] < 0.6]
        assert seen.ready == (asked["http_status"] == 200), asked
    assert one.expected["readiness"]


# --- the table of docs/cases.md -----------------------------------------------------------------

SEEN_CHARACTERS, SAID_CHARACTERS = 200, 240


def table() -> str:
    """One row for each case, as it stands in docs/cases.md."""
    rows = [f"| {number} | {_seen(number)} | {_said(number)} |" for number in ALL]
    return "\n".join(["| case | what users saw | what kvaccord says |", "|---|---|---|", *rows])


def _seen(number: str) -> str:
    case = played_case(number).case
    return _plain(f"{case['engine']}: {case['symptom']}", SEEN_CHARACTERS)


def _said(number: str) -> str:
    one = played_case(number)
    document, standing = one.document, one.history.status[one.engine]["standing"]
    said = f"`{document.result} {document.code}` {_plain(document.message, SAID_CHARACTERS)}"
    warned = [f"`{warning['code']}`" for warning in one.verdict.get("warnings", ())]
    if warned:
        said += f"; warns {', '.join(warned)}"
    if standing["standing"] == "broken":
        said += f"; later `broken`: {named(standing['ranks'])} departed"
    return said


def _plain(text: str, characters: int) -> str:
    text = " ".join(text.split())
    if len(text) > characters:
        text = f"{text[:characters].rsplit(' ', 1)[0]} …"
    # A rank's own words may hold what would be markup.
    return re.sub(r"([|<>*\[\]])", r"\\\1", text)


if __name__ == "__main__":
    print(table())
