"""A start as its log shows it: sights are folded in, line by line. Pure, and bounded in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from reader.lines import Stamp
from reader.sights import (
    Begin,
    Count,
    During,
    Fact,
    Forget,
    Opened,
    Place,
    Ready,
    Seat,
    Sight,
    Step,
    Trouble,
    Waiting,
    World,
)

RANKS_MAX = 4096
OPENED_MAX = 64
TROUBLES_MAX = 200  # of different texts
OFFERS_MAX = 4096
POOLS_MAX = 16  # of one rank
# Ranks without a name write their budgets within seconds of each other, after a collective.
ANOTHER_START_S = 30.0
# Engines whose lines without a rank are the only rank's, or the driver's, which is rank 0.
DRIVER_IS_RANK_0 = ("vllm", "sglang")
# Of the start, not of a rank, whoever writes them.
OF_THE_START = frozenset({"max_model_len", "concurrency", "override_blocks", "block_tokens"})
# Printed for every pool of a rank: a draft model has one of its own.
OF_ALL_POOLS = frozenset({"kv_gib"})

Key = tuple[str, object]


@dataclass(slots=True)
class RankSeen:
    """What one rank wrote. `counts` by (unit, pool); facts named with their unit."""

    key: Key
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    step: Step | None = None
    place: Place | None = None  # of its first count, or of its first line

    @property
    def sized(self) -> bool:
        return bool(self.counts)


@dataclass(slots=True)
class Seen:
    """A trouble, where and by whom it was written first, and how often."""

    trouble: Trouble
    key: Key | None
    place: Place
    order: int
    stamp: Stamp | None
    times: int = 1
    during: str = ""


@dataclass(slots=True)
class Start:
    """One start of one source. What `--replay` and the judge work on."""

    engine: str = ""
    version: str = ""
    source: str = ""
    ranks: dict[Key, RankSeen] = field(default_factory=dict)
    offers: list[tuple[Key | None, int, str, Place]] = field(default_factory=list)
    plans: list[tuple[Key | None, int, str, Place]] = field(default_factory=list)
    axes: dict[str, int] = field(default_factory=dict)
    world: int | None = None
    facts: dict[str, float] = field(default_factory=dict)
    troubles: list[Seen] = field(default_factory=list)
    dropped: int = 0  # troubles beyond TROUBLES_MAX
    waiting: dict[str, tuple[int, Stamp | None, Stamp | None, Place]] = field(default_factory=dict)
    waits_last: bool = False  # the last thing that was understood is a wait
    step: Step | None = None  # the latest that anybody reached
    ready: bool = False
    hidden: int = 0  # lines with counts that Ray folded away
    first: Stamp | None = None
    last: Stamp | None = None
    until: Stamp | None = None  # of the last line of its file, whatever that says
    begun: set[tuple[str, Key | None]] = field(default_factory=set)
    lines: int = 0
    _anonymous: dict[str, int] = field(default_factory=dict)
    _during: str = ""
    _opened: list[Key | None] = field(default_factory=list)
    _counted: Stamp | None = None

    @property
    def empty(self) -> bool:
        return not (self.ranks or self.offers or self.plans or self.troubles or self.waiting)

    @property
    def failed(self) -> bool:
        return not self.ready and any(s.trouble.kind != "victim" for s in self.troubles)

    @property
    def over(self) -> bool:
        return self.ready or bool(self.troubles)


def key_of(seat: Seat) -> Key | None:
    """What a rank is known by within a start; None for lines that name nobody."""
    if seat.rank is not None:
        return ("rank", seat.rank)
    if seat.axes:
        return ("axes", seat.axes)
    return ("process", seat.process) if seat.process else None


def of_the_start(name: str, engine: str, seat: Seat) -> bool:
    """Whether a fact is the start's own, not a rank's. SGLang prints its fraction once."""
    return name in OF_THE_START or (name == "utilization" and (seat.engine or engine == "sglang"))


def starts_again(
    start: Start, engine: str, seat: Seat, sights: Iterable[Sight], at: Stamp | None
) -> bool:
    """Whether this line belongs to a later start than what was folded so far."""
    key = key_of(seat)
    for sight in sights:
        match sight:
            case Begin(mark):
                if (mark, key) in start.begun or start.failed:
                    return True
                # After "ready" the same start may still greet, from another process.
                if start.ready and any(mark == begun for begun, _ in start.begun):
                    return True
            case Count(kind="own", unit=unit, pool=pool):
                if key is None and engine not in DRIVER_IS_RANK_0:
                    gap = at.after(start._counted) if at else None
                    if gap is not None and abs(gap) >= ANOTHER_START_S:
                        return True
                elif start.over and key in start.ranks and (unit, pool) in start.ranks[key].counts:
                    return True
            case Count(kind="plan") if start.plans and start.over:
                return True
    return False


def fold(
    start: Start,
    engine: str,
    seat: Seat,
    sights: Iterable[Sight],
    place: Place,
    at: Stamp | None,
    repeats: int = 0,
) -> None:
    """Take what one line shows into the start."""
    start.lines += 1
    start.first, start.last = start.first or at, at or start.last
    if engine and (not start.engine or start.lines == 1):
        start.engine = engine
    key = key_of(seat)
    written: dict[str, Key] = {}  # what this line says of a rank that it does not name
    named = engine == "sglang" or (seat.known and not seat.engine)
    start.waits_last = False
    for sight in sights:
        match sight:
            case Begin(mark):
                start.begun.add((mark, key))
            case World(axes, ranks, version):
                start.axes |= dict(axes)
                start.world = ranks or start.world
                start.version = version or start.version
            case Count(value, unit, "own", pool):
                rank = _rank(start, engine, seat, f"{unit} {pool}", written, place)
                _count(rank, value, unit, pool, place)
                start.hidden += max(0, repeats - 1)
                start._counted = at or start._counted
            case Count(value, unit, kind, _):
                kept = start.offers if kind == "offer" else start.plans
                if len(kept) < OFFERS_MAX:
                    kept.append((key, value, unit, place))
            case Fact(name, value) if of_the_start(name, engine, seat):
                start.facts[name] = value
            case Fact(name, value):
                facts = _rank(start, engine, seat, name, written, place).facts
                facts[name] = value + (facts.get(name, 0.0) if name in OF_ALL_POOLS else 0.0)
            case Step():
                if start.step is None or sight.order >= start.step.order:
                    start.step = sight
                if named or any(key in start.ranks for key in written.values()):
                    rank = _rank(start, engine, seat, "step", written, place)
                    if rank.step is None or sight.order >= rank.step.order:
                        rank.step = sight
            case Forget():
                _forget(start)
            case Ready():
                start.ready = True
            case During(what):
                start._during = what
            case Opened():
                start._opened = [*start._opened[-OPENED_MAX:], key]
            case Waiting(text):
                times, since, _, where = start.waiting.get(text, (0, at, at, place))
                if text in start.waiting or len(start.waiting) < TROUBLES_MAX:
                    start.waiting[text] = (times + max(1, repeats), since, at, where)
                start.waits_last = True
            case Trouble():
                _trouble(start, sight, key, seat, place, at, repeats)


def _rank(
    start: Start, engine: str, seat: Seat, what: str, written: dict[str, Key], place: Place
) -> RankSeen:
    """The rank a number belongs to. Nameless ranks are told apart by how often they said it."""
    key = key_of(seat)
    if key is None and engine in DRIVER_IS_RANK_0:
        key = written.setdefault(what, ("rank", 0))
    if key is None and what == "step":
        key = next(iter(written.values()))  # of the rank whose numbers stand on this line
    if key is None:
        if what not in written:
            written[what] = ("line", start._anonymous.get(what, 0))
            start._anonymous[what] = start._anonymous.get(what, 0) + 1
        key = written[what]
    if key not in start.ranks and len(start.ranks) >= RANKS_MAX:
        return RankSeen(key)  # more than any layout has: not kept
    return start.ranks.setdefault(key, RankSeen(key, place=place))


def _count(rank: RankSeen, value: int, unit: str, pool: str, place: Place) -> None:
    """A second count of the same pool is another pool: a draft model's, or a window's."""
    if not rank.counts:
        rank.place = place
    name, n = pool, 1
    while (unit, name) in rank.counts and n < POOLS_MAX:
        n += 1
        name = f"{pool} #{n}".strip()
    rank.counts[unit, name] = value


def _forget(start: Start) -> None:
    """Named ranks keep what they measured; of nameless ones nothing could be told apart again."""
    for key in [key for key in start.ranks if key[0] == "line"]:
        del start.ranks[key]
    for rank in start.ranks.values():
        rank.counts.clear()
        rank.facts.pop("kv_gib", None)
    start._anonymous.clear()


def _trouble(
    start: Start,
    trouble: Trouble,
    key: Key | None,
    seat: Seat,
    place: Place,
    at: Stamp | None,
    repeats: int,
) -> None:
    if start.ready and trouble.kind not in ("died", "victim"):
        return  # what requests raise is none of the start's business
    writer = dict(trouble.facts).get("writer")
    if isinstance(writer, float):
        key = ("rank", int(writer))
    if trouble.kind in ("raised", "limit"):
        key = _closed(start, key)
    if seat.engine and key == key_of(seat):
        key = None
    for seen in start.troubles:
        if seen.trouble.text == trouble.text and (seen.key == key or key is None or seat.process):
            seen.times += max(1, repeats)
            return
    if len(start.troubles) >= TROUBLES_MAX:
        start.dropped += 1
        return
    order = len(start.troubles)
    start.troubles.append(
        Seen(trouble, key, place, order, at, times=max(1, repeats), during=start._during)
    )
    start._during = ""


def _closed(start: Start, key: Key | None) -> Key | None:
    """Who raised: an exception may come without the prefix that its traceback began with."""
    opened = start._opened
    if key is None and len({*opened}) == 1:
        key = opened[0]
    if key in opened:
        opened.remove(key)
    elif opened and key is None:
        opened.pop(0)  # tracebacks of several ranks are open: whose this is cannot be known
    return key


def merged(starts: Iterable[Start]) -> Start:
    """The starts of several sources as one: nodes, pods or ranks that log apart.

    Nameless ranks of different sources are different ranks; ranks with a name are one.
    """
    whole = Start()
    for start in starts:
        whole.engine = whole.engine or start.engine
        whole.version = whole.version or start.version
        whole.world = start.world or whole.world
        whole.axes |= start.axes
        whole.facts |= start.facts
        whole.ready = whole.ready or start.ready
        whole.hidden += start.hidden
        whole.dropped += start.dropped
        whole.waits_last = whole.waits_last or start.waits_last
        whole.waiting |= start.waiting
        whole.begun |= start.begun
        whole.lines += start.lines
        whole.until = start.until or whole.until
        whole.first, whole.last = whole.first or start.first, start.last or whole.last
        if start.step and (whole.step is None or start.step.order > whole.step.order):
            whole.step = start.step
        moved: dict[Key, Key] = {}
        for key, rank in start.ranks.items():
            moved[key] = new = _free(whole, key)
            if new in whole.ranks:
                whole.ranks[new].counts |= rank.counts
                whole.ranks[new].facts |= rank.facts
            else:
                whole.ranks[new] = replace(rank, key=new)
        whole.offers += start.offers
        whole.plans += start.plans
        for seen in start.troubles:
            whose = moved.get(seen.key, seen.key) if seen.key else None
            whole.troubles.append(replace(seen, key=whose, order=len(whole.troubles)))
    return whole


def told_apart(start: Start) -> Start:
    """The start without ranks that stand in it twice: by name in some lines, nameless in others.

    Where as many nameless ranks counted alike as there are named ones, the counts are theirs. Else
    it cannot be known whose a count is, and the nameless ranks stay.
    """
    lines = [rank for key, rank in start.ranks.items() if key[0] == "line"]
    named = [rank for key, rank in start.ranks.items() if key[0] != "line"]
    if not lines or not named or any(rank.counts for rank in named):
        return start
    alike = all(rank.counts == lines[0].counts and rank.facts == lines[0].facts for rank in lines)
    if alike and len(lines) == len(named):
        ranks = {
            rank.key: replace(
                rank,
                counts=line.counts,
                facts=rank.facts | line.facts,
                step=line.step or rank.step,
                place=line.place,
            )
            for rank, line in zip(named, lines, strict=True)
        }
    else:
        ranks = {rank.key: rank for rank in lines}
    world = start.world or (None if start.axes else max(len(named), len(lines)))
    return replace(start, ranks=ranks, world=world)


def _free(whole: Start, key: Key) -> Key:
    if key[0] != "line":
        return key
    n = sum(1 for kind, _ in whole.ranks if kind == "line")
    return ("line", n)
