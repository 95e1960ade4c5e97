"""One line of a log as its writer wrote it: without what containers and terminals put around it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from reader.sights import Seat

LINE_BYTES_MAX = 16 * 1024  # what is beyond is no line of a startup log

_COLOUR = re.compile(
    r"\x1b(?:\[[0-9;:?]{0,32}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[@-Z\\-_])"
)
_ISO = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
# What is put in front of a line, outermost first; `source` is who wrote, `rank` whom mpirun ran.
_WRAPPERS = tuple(
    map(
        re.compile,
        (
            rf"(?P<time>{_ISO})\s(?:stdout|stderr)\s[FP]\s",  # CRI: /var/log/containers
            r"\[(?P<source>pod/[\w./-]{1,200})\]\s",  # kubectl logs --prefix
            rf"(?P<time>{_ISO})\s(?=[(\[\w<\d])(?!\|)",  # kubectl logs --timestamps
            rf"(?P<time>{_ISO})\s\|\s",  # Loki, Dozzle
            r"(?P<source>(?!INFO|DEBUG|WARN|ERROR|TRACE)[A-Za-z][\w.-]{0,80}) *\|\s",  # compose
            r"\[\d{1,6},(?P<rank>\d{1,5})\]<std(?:out|err)>:\s?",  # mpirun --tag-output
            r"(?P<rank>\d{1,4}): (?=[\[(])",  # srun --label
            r"\[(?:default|worker)\d{1,4}\]:\s?",  # torchrun --tee: a local rank, which is no rank
            r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,80} [\w./@-]{1,80}\[\d{1,9}\]: ",  # syslog
        ),
    )
)
_JSON_KEYS = ("log", "message", "msg", "textPayload", "line")

_STAMP = re.compile(
    r"(?P<y>\d{4})-(?P<m>\d\d)-(?P<d>\d\d)[T ](?P<t>\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)"
    r"|(?P<m2>\d\d)/(?P<d2>\d\d)/\d{4}-(?P<t2>\d\d:\d\d:\d\d)"
    r"|\b(?P<m3>\d\d)-(?P<d3>\d\d) (?P<t3>\d\d:\d\d:\d\d)"
    r"|\[[EWIF](?P<m4>\d{1,2})(?P<d4>\d\d) (?P<t4>\d\d:\d\d:\d\d(?:\.\d{1,9})?)"
    r"|\b(?P<t5>\d\d:\d\d:\d\d)\b"
)
_DAYS_BEFORE = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)
STAMP_WITHIN = 120  # characters

_WHO = re.compile(
    r"\((?P<name>[A-Za-z]\w{0,60}?)(?P<axes>(?:_(?:DP|PP|PCP|DCP|TP|EP)\d{1,5})+|_\d{1,5})?"
    r"(?: (?:rank=(?P<rank>\d{1,5})|(?P<spaced>TP\d{1,5})))?"
    r" pid=(?P<pid>\d{1,9})(?:, ip=(?P<ip>[\d.:a-f]{1,45}))?\)"
    r"|\[(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d(?P<sglang>(?: (?:DP|PP|ATTN|TP|EP|MOE|CP)\d{1,5})+)\]"
    r"|\[[Rr]ank(?P<torch>\d{1,5})\]:"
    r"|\[TRT-LLM\] \[RANK (?P<trt>\d{1,5})\]"
    r"|\[TRT-LLM\] \[[A-Z]\] \[(?P<trtd>\d{1,5})\]"
    r"|\[TensorRT-LLM\]\[[A-Z]{1,8}\]\[(?P<trtc>\d{1,5})\]"
    r"|\[gpu(?:_id)?=(?P<gpu>\d{1,5})\]"
    r"|\bModel Runner(?P<atom>\d{1,5})/\d{1,5}\b"
)
_AXIS = re.compile(r"(?<![A-Z])(DP|PCP|PP|TP|CP)(\d{1,5})")
_AXES = {"CP": "pcp"}  # SGLang's attention CP
_FRONTS = ("Engine", "API", "Api", "Server")
PREFIX_WITHIN = 400  # characters
_QUIET = re.compile(r"\b(?:WARNING|WARN|INFO|DEBUG)\b|\[TRT-LLM\](?: \[RANK \d{1,5}\])? \[[WIDV]\]")
_LOUD = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b")
_REPEATED = re.compile(r"\[repeated (\d{1,7})x")


@dataclass(frozen=True, slots=True)
class Stamp:
    """A time of the log's own: seconds of the year when dated, else of the day."""

    dated: bool
    s: float

    def after(self, other: Stamp | None) -> float | None:
        """Seconds since `other`; None where the two cannot be compared."""
        return self.s - other.s if other is not None and other.dated == self.dated else None


@dataclass(frozen=True, slots=True)
class Line:
    """A line without its wrappers. `source` is the container that wrote it, or ""."""

    text: str
    source: str = ""
    stamp: Stamp | None = None
    rank: int | None = None  # whom mpirun or srun ran
    repeats: int = 0  # Ray folded so many like lines into this one


def clean(raw: bytes) -> Line:
    """Take a raw line apart. Never raises: what is not understood stays text."""
    text = raw[:LINE_BYTES_MAX].decode("utf-8", "replace").strip("\r\n\x00")
    source, outer, rank = "", None, None
    if text.startswith("{"):
        text, source, outer = _unwrapped(text)
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    for wrapper in _WRAPPERS:
        if found := wrapper.match(text):
            parts = found.groupdict()
            source = parts.get("source") or source
            outer = stamp_in(parts["time"]) if parts.get("time") else outer
            rank = int(parts["rank"]) if parts.get("rank") else rank
            text = text[found.end() :]
    folded = _REPEATED.search(text)
    return Line(
        text=text,
        source=source.strip(),
        stamp=stamp_in(text) or outer,
        rank=rank,
        repeats=int(folded[1]) if folded else 0,
    )


def is_quiet(text: str, end: int) -> bool:
    """Whether what begins at `end` was logged below ERROR. The level stands before it."""
    head = text[max(0, end - PREFIX_WITHIN) : end]
    return _QUIET.search(head) is not None and _LOUD.search(head) is None


def _unwrapped(text: str) -> tuple[str, str, Stamp | None]:
    """A line of docker's json-file driver, or of another JSON logger."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text, "", None
    if not isinstance(document, dict):
        return text, "", None
    inner = next((document[k] for k in _JSON_KEYS if isinstance(document.get(k), str)), None)
    if inner is None:
        return text, "", None
    time = document.get("time") or document.get("timestamp") or document.get("ts")
    source = document.get("container_name") or document.get("pod") or ""
    return (
        inner.rstrip("\r\n"),
        str(source)[:200],
        stamp_in(time) if isinstance(time, str) else None,
    )


def stamp_in(text: str) -> Stamp | None:
    """The first time near the beginning of a text."""
    found = _STAMP.search(text[:STAMP_WITHIN])
    if found is None:
        return None
    parts = found.groupdict()
    for n in ("", "2", "3", "4"):
        if time := parts[f"t{n}"]:
            month, day = int(parts[f"m{n}"]), int(parts[f"d{n}"])
            if not 1 <= month <= 12:
                return None
            return Stamp(True, (_DAYS_BEFORE[month - 1] + day) * 86400 + _seconds(time))
    return Stamp(False, _seconds(parts["t5"]))


def _seconds(time: str) -> float:
    hours, minutes, seconds = time.replace(",", ".").split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def seat_in(text: str, end: int) -> Seat:
    """The writer of what begins at `end`: the nearest prefix before it, which is the innermost.

    A progress bar may stand before the prefix on the same line, so it is searched for anywhere.
    """
    seat = Seat()
    for found in _WHO.finditer(text, max(0, end - PREFIX_WITHIN), end + len("Model Runner0/8:")):
        parts = found.groupdict()
        said = next(
            (parts[k] for k in ("rank", "torch", "trt", "trtc", "trtd", "atom") if parts[k]), None
        )
        name, written = parts["name"] or "", parts["axes"] or ""
        axes = tuple(
            (_AXES.get(axis, axis.lower()), int(value))
            for axis, value in _AXIS.findall(f"{written} {parts['spaced']} {parts['sglang']}")
        )
        if said is not None:
            seat = Seat(rank=int(said))
        elif parts["gpu"]:
            seat = Seat(axes=(("tp", int(parts["gpu"])),))
        elif any(front in name for front in _FRONTS):
            if written[1:].isdigit():
                axes = (("dp", int(written[1:])),)
            seat = Seat(axes=axes, engine=True)
        elif axes:
            seat = Seat(axes=axes)
        elif parts["pid"] and (seat.engine or not seat.known):
            ip = f" ip={parts['ip']}" if parts["ip"] else ""
            seat = Seat(process=f"pid={parts['pid']}{ip}")
    return seat
