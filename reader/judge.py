"""Two questions about a start, apart: did the ranks agree, and is what they agreed on usable? Pure.

Each has three answers; "inconclusive" says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvaccord.layout import named
from reader.causes import Blame, blame_of
from reader.notes import notes_of
from reader.numbers import Numbers, numbers_of
from reader.seats import Seats, groups_of, seats_of
from reader.start import Key, Start, told_apart

Word = Literal["yes", "no", "inconclusive"]
Status = Literal[
    "agreed", "disagreed", "failed", "failed_no_cause_in_log", "stalled", "inconclusive"
]
STALL_TIMES, STALL_S = 3, 60.0  # so often, or so long, the same waiting line at the end of a log
SILENT_S = (
    300.0  # the log goes on for so long, and nothing of a start is in it; as the coordinator's
)
# Engines that always log the end of their initialisation: a log that ends between has a start in it
# that stands there. Of the others it is not known what follows a plan.
LOG_THEIR_END = ("vllm",)
PLANNED, INITIALISED = 40, 70  # orders of steps
COUNTS = "the counts of blocks or tokens"


@dataclass(frozen=True, slots=True)
class Answer:
    """`missing`: what would have to be in the log for a yes or a no."""

    word: Word
    why: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stall:
    """What a start stands at. `times` and `span_s`: of a waiting line that repeats."""

    at: str
    times: int = 0
    span_s: float | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """All that is said about a log. `code` is one of protocol.md section 5, or `inconclusive`."""

    start: Start
    seats: Seats
    status: Status
    code: str
    agreed: Answer
    usable: Answer
    numbers: Numbers
    blame: Blame
    stall: Stall | None
    behind: tuple[int, ...]  # ranks that stand at an earlier step than others
    restarts: int  # starts before this one in the same log
    alike: int  # of them, that ended as this one did, by the same first cause
    notes: tuple[str, ...]

    @property
    def engine(self) -> str:
        return self.start.engine or "unknown"

    @property
    def step(self) -> str | None:
        return self.start.step.name if self.start.step else None


def judge(
    start: Start,
    earlier: Iterable[Start] = (),
    restarts: int = 0,
    ranks: int | None = None,
    layout: Mapping[str, int] | None = None,
) -> Judgement:
    """Judge a start by its log alone. `ranks` and `layout` are checked, and never believed."""
    start = told_apart(start)
    seats = seats_of(start, ranks, layout)
    numbers = numbers_of(start, seats)
    blame = blame_of(start, seats)
    stall = _stall(start)
    agreed, usable = _agreed(start, seats, numbers), _usable(start, blame, numbers, stall)
    status = _status(agreed, usable, blame, stall)
    code = _code(status, blame, numbers)
    return Judgement(
        start=start,
        seats=seats,
        status=status,
        code=code,
        agreed=agreed,
        usable=usable,
        numbers=numbers,
        blame=blame,
        stall=stall,
        behind=_behind(start, seats),
        restarts=restarts,
        alike=sum(
            _ending(before) == _ending_of(status, code, blame)
            for before in (judge(each) for each in earlier)
        ),
        notes=notes_of(start, seats, blame, ranks, layout),
    )


# --- did they agree -----------------------------------------------------------------------------


def _agreed(start: Start, seats: Seats, numbers: Numbers) -> Answer:
    for keys in groups_of(start).values():
        for pool in sorted({pool for key in keys for pool in start.ranks[key].counts}):
            counts = {
                key: start.ranks[key].counts[pool]
                for key in keys
                if pool in start.ranks[key].counts
            }
            if len(set(counts.values())) > 1:
                return Answer("no", _differ(counts, pool[0], seats))
    values = numbers.values
    if not values:
        return _by_the_plan(start, seats)
    missing = _not_sized(seats, values)
    if start.hidden:
        missing.append(f"{start.hidden} lines that Ray folded away: set RAY_DEDUP_LOGS=0")
    if len(values) == 1 and next(iter(values))[0] == "line" and not seats.sure:
        missing.append("which rank wrote the one line, and how many ranks there are: --ranks")
    if missing:
        said = "the one count" if len(values) == 1 else f"the {len(values)} counts that are there"
        return Answer("inconclusive", f"{said} cannot speak for all ranks", tuple(missing))
    if len(set(values.values())) > 1:
        return Answer("yes", "DP ranks differ, each agrees within itself")
    alone = len(values) == 1
    return Answer("yes", "there is one rank" if alone else f"{len(values)} ranks, the same count")


def _not_sized(seats: Seats, values: Mapping[Key, int]) -> list[str]:
    """Ranks of the world without a count, by name where the others have one."""
    world = seats.world
    if world is None or len(values) >= world:
        return []
    if any(key[0] in ("line", "process") for key in values):
        return [f"the counts of {world - len(values)} of {world} ranks"]
    sized = {seats.numbers[key] for key in values}
    return [f"the count of {seats.name_of(n)}" for n in range(world) if n not in sized]


def _by_the_plan(start: Start, seats: Seats) -> Answer:
    """An engine that plans for all its ranks agrees by itself: it goes on with the smallest."""
    if start.offers:
        sizes = [value for _, value, _, _ in start.offers]
        if len({key for key, _, _, _ in start.offers}) == len(sizes) > 1:
            return Answer("yes", f"{len(sizes)} DP ranks, each with a plan for its own ranks")
        if len(set(sizes)) == 1:
            return Answer("yes", "the engine planned one size for all")
        return Answer("yes", f"of {len(sizes)} sizes the engine goes on with the smallest")
    if start.plans:
        return Answer("yes", "the engine planned one size for all")
    if any("available_gib" in rank.facts for rank in start.ranks.values()):
        gone = [f"the lines of {seats.name_of(n)}" for n in seats.missing()] if seats.sure else []
        why = "GiB say nothing about blocks unless the layers of every rank are known"
        return Answer("inconclusive", why, (*gone, COUNTS))
    return Answer("inconclusive", "no count of any rank is in the log", (COUNTS,))


def _differ(counts: Mapping[Key, int], unit: str, seats: Seats) -> str:
    by_value: dict[int, list[str]] = {}
    for key, value in counts.items():
        by_value.setdefault(value, []).append(seats.label(key))
    parts = [f"{_listed(by_value[value])}: {value}" for value in sorted(by_value)[:4]]
    return f"counts of {unit} differ: {'; '.join(parts)}{'; …' if len(by_value) > 4 else ''}"


def _listed(labels: list[str]) -> str:
    """`ranks 1-4`, or `PP0, PP1` as the log has it."""
    numbers = [label.removeprefix("rank ") for label in labels]
    if all(number.isdigit() for number in numbers):
        return named(sorted(map(int, numbers)))
    return f"{', '.join(labels[:4])}{' …' if len(labels) > 4 else ''}"


# --- is it usable -------------------------------------------------------------------------------

_REFUSED = {
    "limit": "the engine refused its own numbers",
    "raised": "an exception ended the start",
    "late": "not all ranks came",
    "duplicate_rank": "more ranks came than there are",
    "died": "a process is gone without a word",
}


def _usable(start: Start, blame: Blame, numbers: Numbers, stall: Stall | None) -> Answer:
    value, unit = numbers.value, numbers.unit
    if blame.first and not start.ready:
        trouble = blame.first.trouble
        return Answer("no", _REFUSED.get(trouble.code) or _REFUSED[trouble.kind])
    if blame.consequences and not start.ready:
        return Answer("no", "the start failed, and what is in the log are consequences alone")
    if value is not None and value <= 0:
        return Answer("no", f"{value} {unit}: no memory is left for the KV cache")
    if numbers.least_gib is not None and numbers.least_gib <= 0 and not start.ready:
        return Answer("no", f"{numbers.least_gib:.2f} GiB are left for the KV cache")
    if stall:
        return Answer("no", f"the start stands at: {stall.at}")
    if value is None and start.ready:
        return Answer("inconclusive", "the engine serves; its counts are not in the log", (COUNTS,))
    if value is None:
        step = f"; the last step seen: {start.step.name}" if start.step else ""
        missing = (COUNTS, "how the start ended")
        return Answer("inconclusive", f"no count is in the log{step}", missing)
    length = start.facts.get("max_model_len")
    if unit == "tokens" and length and value < length and start.engine == "vllm":
        return Answer("no", f"{value} tokens hold no request of {length:.0f}")
    return Answer("yes", f"{value} {unit}{', and the engine serves' if start.ready else ''}")


def _stall(start: Start) -> Stall | None:
    """A line that repeats until the log ends, or a plan after which an end should have come."""
    if start.ready or start.troubles:
        return None
    if start.waits_last:
        for text, (times, since, until, _) in start.waiting.items():
            span = until.after(since) if until else None
            if times >= STALL_TIMES or (span is not None and span >= STALL_S):
                return Stall(text, times, span)
    silent = start.until.after(start.last) if start.until else None
    if start.step and silent is not None and silent >= SILENT_S:
        return Stall(start.step.name, 0, silent)
    if start.offers and start.engine in LOG_THEIR_END and start.step:
        return Stall(start.step.name) if PLANNED <= start.step.order < INITIALISED else None
    return None


def _behind(start: Start, seats: Seats) -> tuple[int, ...]:
    orders = {key: r.step.order for key, r in start.ranks.items() if r.step}
    latest = max(orders.values(), default=0)
    return tuple(sorted(seats.numbers[k] for k, order in orders.items() if order < latest))


# --- both ---------------------------------------------------------------------------------------


def _status(agreed: Answer, usable: Answer, blame: Blame, stall: Stall | None) -> Status:
    if usable.word == "no" and blame.first is None and blame.consequences:
        return "failed_no_cause_in_log"
    if usable.word == "no" and blame.first and blame.first.trouble.kind == "died":
        return "failed_no_cause_in_log"
    if stall:
        return "stalled"
    if usable.word == "no":
        return "failed"
    if agreed.word == "no":
        return "disagreed"
    return "agreed" if (agreed.word, usable.word) == ("yes", "yes") else "inconclusive"


def _code(status: Status, blame: Blame, numbers: Numbers) -> str:
    match status:
        case "failed" | "failed_no_cause_in_log":
            if blame.first:
                return blame.first.trouble.code
            return "rank_lost" if blame.consequences else "does_not_fit"
        case "stalled":
            return "rank_stuck" if numbers.value is not None else "ranks_missing"
        case "disagreed":
            return "applied_differently"
    return status


def _ending(judged: Judgement) -> tuple[str, str, str]:
    return _ending_of(judged.status, judged.code, judged.blame)


def _ending_of(status: Status, code: str, blame: Blame) -> tuple[str, str, str]:
    return status, code, _shape(blame.text)


def _shape(text: str) -> str:
    """What two causes have in common that differ in numbers alone."""
    return "".join("0" if c.isdigit() else c for c in text[:80])
