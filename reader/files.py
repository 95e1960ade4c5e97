"""Opens logs: plain, gzip, bzip2 and xz files, and standard input, in chunks of whole lines."""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Protocol, cast

CHUNK_BYTES = 256 * 1024
# A longer line is cut: nothing that a start says is that long, and memory must stay bounded.
CARRY_BYTES_MAX = 256 * 1024
STDIN = "-"


class Stream(Protocol):
    def read1(self, size: int, /) -> bytes: ...


def _gunzip(raw: BinaryIO) -> Stream:
    return gzip.GzipFile(fileobj=raw)


def _bunzip(raw: BinaryIO) -> Stream:
    return bz2.BZ2File(raw)


def _unxz(raw: BinaryIO) -> Stream:
    return lzma.LZMAFile(raw)


_MAGIC = ((b"\x1f\x8b", _gunzip), (b"BZh", _bunzip), (b"\xfd7zXZ", _unxz))


class Unreadable(ValueError):
    """A log cannot be read; the text says which and why."""


def chunks_of(name: str, tell: Callable[[int], None] = lambda done: None) -> Iterator[bytes]:
    """Chunks that end where lines end. `tell` hears the position in the file, compressed or not.

    Raises Unreadable. A compressed file that breaks off is read as far as it goes.
    """
    with _opened(name) as raw:
        head = raw.peek(8)[:8]
        opener = next((opener for magic, opener in _MAGIC if head.startswith(magic)), None)
        try:
            for chunk in whole_lines(_pieces(opener(raw) if opener else raw)):
                yield chunk
                if name != STDIN:
                    tell(raw.tell())
        except (OSError, lzma.LZMAError, zlib.error) as fault:
            raise Unreadable(f"{name}: {fault}; give a log as text, gzip, bzip2 or xz") from None


def _pieces(stream: Stream) -> Iterator[bytes]:
    """Pieces of some CHUNK_BYTES. What was unpacked before a file breaks off is not lost."""
    piece, more = bytearray(), b"-"
    while more:
        try:
            more = stream.read1(CHUNK_BYTES)
        except EOFError:
            more = b""  # a node died while it wrote; what is there counts
        piece += more
        if piece and (len(piece) >= CHUNK_BYTES or not more):
            yield bytes(piece)
            piece.clear()


def whole_lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes, broken where lines end. Of a line beyond CARRY_BYTES_MAX only the head.

    A carriage return ends a line too: progress bars write megabytes without any other end.
    """
    carry, skipping = b"", False
    for piece in pieces:
        if skipping:
            ends = [end for end in (piece.find(b"\n"), piece.find(b"\r")) if end >= 0]
            if not ends:
                continue
            piece, skipping = piece[min(ends) :], False
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
        if end:
            yield carry + piece[:end] if carry else piece[:end]
            carry = piece[end:]
        else:
            carry += piece
        if len(carry) > CARRY_BYTES_MAX:
            yield carry[:CARRY_BYTES_MAX] + b"\r"  # its own end comes when it comes
            carry, skipping = b"", True
    if carry:
        yield carry


@contextmanager
def _opened(name: str) -> Iterator[BufferedReader]:
    if name == STDIN:
        yield cast(BufferedReader, sys.stdin.buffer)
        return
    with ExitStack() as stack:
        try:
            raw = stack.enter_context(Path(name).open("rb"))
        except OSError as fault:
            what = fault.strerror or fault
            raise Unreadable(f"{name}: {what}; name a log file, or - for standard input") from None
        yield raw


def size_bytes(names: tuple[str, ...]) -> int | None:
    """Bytes of all files together, for a progress bar; None when that is not known."""
    try:
        return None if STDIN in names else sum(Path(name).stat().st_size for name in names)
    except OSError:
        return None
