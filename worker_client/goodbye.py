"""What a process says as it goes, made of whatever it was given. Pure.

A no must never be refused for its form: what is wrong is mended, and nothing here raises.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence

from kvaccord.messages import Leave, Veto
from worker_client.causes import cause_text, first_cause, masked

LONG = 16384  # characters of a text or trace, before it is masked and cut to its size
REASON_CHARS = 1024
CODE_CHARS = 64


def veto(
    ranks: Sequence[int],
    text: object,
    *,
    rank: object = None,
    code: object = None,
    retryable: object = True,
    trace: object = None,
) -> Veto:
    """A veto of one of these ranks: the first of them, unless `rank` is another."""
    said = words(text)
    spoken = ranks[0] if rank is None else _number(rank)
    if spoken not in ranks:  # a process says no for its own ranks alone
        said = f"{said[:LONG]} (said of rank {words(rank)[:40]})"
        spoken = ranks[0]
    return Veto(
        rank=spoken,
        code=_code(code),
        # Cut first: searching megabytes for secrets would hold the others up.
        text=masked(said[:LONG]),
        trace=masked(words(trace)[-LONG:]) or None,
        retryable=truth(retryable),
    )


def leave(reason: object) -> Leave:
    return Leave(reason=masked(words(reason)[:LONG])[:REASON_CHARS] or None)


def least(said: Veto | Leave) -> Veto | Leave:
    """The same in its smallest form, for a coordinator that refused the whole of it."""
    if isinstance(said, Leave):
        return Leave()
    text = said.text.encode("ascii", "replace").decode()
    plain = "".join(c if c.isprintable() else " " for c in text)
    return Veto(rank=said.rank, text=plain[:REASON_CHARS], retryable=said.retryable)


def words(said: object) -> str:
    """Anything as text that UTF-8 can carry: an exception by its cause, a list line by line."""
    try:
        if said is None:
            return ""
        if isinstance(said, BaseException):
            said = cause_text(first_cause(said))
        elif isinstance(said, bytes | bytearray):
            said = bytes(said[: LONG * 4]).decode(errors="replace")
        elif isinstance(said, list | tuple):  # as traceback.format_exception() gives it
            said = "".join(map(str, said))
        return str(said).encode(errors="replace").decode()
    except Exception:  # a __str__ of theirs may raise anything
        return f"a {type(said).__name__} that cannot be shown"


def _number(rank: object) -> int:
    try:
        return operator.index(rank)  # type: ignore[arg-type]
    except Exception:
        return -1


def _code(code: object) -> str | None:
    return re.sub(r"[^A-Za-z0-9._:-]+", "_", words(code)[:LONG])[:CODE_CHARS].strip("_") or None


def truth(said: object) -> bool:
    try:
        return bool(said)
    except Exception:
        return True
