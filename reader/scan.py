"""Finds the lines that matter in chunks of bytes, and folds them into starts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from reader.engines import MARKS
from reader.engines.anyone import EXCEPTION
from reader.lines import LINE_BYTES_MAX, Line, clean, is_quiet, seat_in
from reader.sights import EXCEPTIONS, Mark, Place, Seat, Sight, Trouble
from reader.start import Start, fold, merged, starts_again

EARLIER_MAX = 100
TURNS_MAX = 16  # new starts within a chunk, from which on the whole rest is searched
SOURCES_MAX = 4096
# From so many lines of trouble on a start only numbers, beginnings and ends are looked for.
STORM = 5000


def needles_of(marks: Iterable[Mark]) -> tuple[bytes, ...]:
    return tuple(
        sorted(
            {
                raw.encode()
                for mark in marks
                for raw in (mark.needles if mark.raw is None else mark.raw)
            }
        )
    )


ALL = needles_of(MARKS)
CALM = needles_of(mark for mark in MARKS if mark.serving)
STORMY = tuple(needle for needle in ALL if needle.decode() not in EXCEPTIONS)


def lines_with(
    chunk: bytes, needles: Sequence[bytes], after: int, stop: int
) -> list[tuple[int, int]]:
    """Where lines stand that hold a needle, in order. A carriage return ends a line too."""
    found: dict[int, int] = {}
    for needle in needles:
        at = chunk.find(needle, after, stop)
        while at >= 0:
            begin = max(after, chunk.rfind(b"\n", after, at) + 1)
            begin = max(begin, chunk.rfind(b"\r", begin, at) + 1)
            end = chunk.find(b"\n", at)
            end = len(chunk) if end < 0 else end
            turned = chunk.find(b"\r", at, end)
            found[begin] = end = turned if turned >= 0 else end
            at = chunk.find(needle, end, stop)
    return sorted(found.items())


@dataclass(slots=True)
class Source:
    """What one writer wrote: its current start, and how the earlier ones ended."""

    start: Start = field(default_factory=Start)
    earlier: list[Start] = field(default_factory=list)
    restarts: int = 0


class Scan:
    """Folds the chunks of any number of files. Memory does not grow with them."""

    def __init__(self) -> None:
        self.sources: dict[str, Source] = {}
        self._file, self._line = "", 1
        self._here: set[str] = set()  # the sources of this file
        self._trouble_lines = 0
        self._held = b""

    def begin(self, file: str) -> None:
        """A file begins; what it says of nobody is of this file."""
        self._flush()
        self._file, self._line, self._here = file, 1, set()
        self._trouble_lines = 0

    def feed(self, chunk: bytes) -> None:
        """A chunk of whole lines. The last one waits for the next chunk: a text may go on there."""
        chunk = self._held + chunk
        end = len(chunk.rstrip(b"\r\n"))
        cut = max(chunk.rfind(b"\n", 0, end), chunk.rfind(b"\r", 0, end)) + 1
        self._held = chunk[cut:]
        self._take(chunk, cut)

    def _flush(self) -> None:
        held, self._held = self._held, b""
        self._take(held, len(held))
        until = clean(held[:LINE_BYTES_MAX]).stamp
        for name in self._here:
            start = self.sources[name].start
            start.until = until or start.until

    def _take(self, chunk: bytes, stop: int) -> None:
        """Fold a chunk up to `stop`. Behind a new start all is searched for that a start says."""
        after = counted = 0
        for turn in range(TURNS_MAX):
            needles = self._needles() if turn < TURNS_MAX - 1 else ALL
            for begin, end in lines_with(chunk, needles, after, stop):
                self._line += chunk.count(b"\n", counted, begin)
                counted = begin
                self._see(clean(chunk[begin : min(end, begin + LINE_BYTES_MAX)]), chunk, end)
                if needles is not ALL and self._needles() is ALL:
                    after = end
                    break
            else:
                break
        self._line += chunk.count(b"\n", counted, stop)

    def last(self) -> Start:
        """The last start: of every source its last one, together."""
        self._flush()
        return merged(source.start for source in self.sources.values())

    def earlier(self) -> list[Start]:
        return [start for source in self.sources.values() for start in source.earlier]

    def restarts(self) -> int:
        """How many starts there were before, of the source that has most."""
        return max((source.restarts for source in self.sources.values()), default=0)

    def _needles(self) -> Sequence[bytes]:
        if self._here and all(self.sources[name].start.ready for name in self._here):
            return CALM
        return STORMY if self._trouble_lines > STORM else ALL

    def _see(self, line: Line, chunk: bytes, end: int) -> None:
        name = f"{self._file}\0{line.source}"
        if name not in self.sources and len(self.sources) >= SOURCES_MAX:
            name = f"{self._file}\0"  # more than any deployment has: words that look like names
        source = self.sources.get(name) or Source()
        engine, sights, position = sights_in(line, serving=source.start.ready)
        if not sights:
            return
        self.sources[name] = source
        self._here.add(name)
        sights = [_whole(sight, chunk, end) for sight in sights]
        seat = seat_in(line.text, position)
        if not seat.known and line.rank is not None:
            seat = Seat(rank=line.rank)
        start = source.start
        if not start.empty and starts_again(start, engine, seat, sights, line.stamp):
            source.restarts += 1
            if len(source.earlier) < EARLIER_MAX:
                source.earlier.append(start)
            source.start = start = Start(source=line.source)
            self._trouble_lines = 0
        if any(isinstance(sight, Trouble) for sight in sights):
            self._trouble_lines += 1
        fold(start, engine, seat, sights, Place(self._file, self._line), line.stamp, line.repeats)


def sights_in(line: Line, serving: bool = False) -> tuple[str, list[Sight], int]:
    """The engine whose line this is, what it shows, and where that begins in the line.

    What a warning says of an exception was dealt with. An exception that is recognised by its text
    is not also any exception.
    """
    text, engine, sights, position = line.text, "", list[Sight](), len(line.text)
    for mark in MARKS:
        if serving and not mark.serving:
            continue
        if mark.pattern is EXCEPTION and any(isinstance(s, Trouble) for s in sights):
            continue
        if not any(needle in text for needle in mark.needles):
            continue
        if found := mark.pattern.search(text):
            engine = engine or mark.engine
            position = min(position, found.start())
            sights += mark.sights(found)
    if sights and is_quiet(text, position):
        sights = [s for s in sights if not isinstance(s, Trouble) or s.kind == "victim"]
    return engine, sights, position


def _whole(sight: Sight, chunk: bytes, end: int) -> Sight:
    """An exception whose text goes on in the next line: `No such file or directory: `."""
    if not isinstance(sight, Trouble) or sight.kind != "raised" or not sight.text.endswith(":"):
        return sight
    begin = end + 1
    stop = chunk.find(b"\n", begin, begin + LINE_BYTES_MAX)
    more = clean(chunk[begin : stop if stop >= 0 else begin + 400]).text
    more = more.partition("[stderr] ")[2] or more
    return Trouble(sight.kind, sight.code, f"{sight.text} {more.strip()[:400]}", facts=sight.facts)
