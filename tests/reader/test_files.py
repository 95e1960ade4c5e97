"""Logs as files: compressed, broken off, with lines of megabytes."""

import bz2
import gzip
import io
import lzma

import pytest

from reader.files import CARRY_BYTES_MAX, Unreadable, chunks_of, size_bytes, whole_lines

TEXT = b"".join(b"line %d\n" % n for n in range(50_000))


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, bz2.compress, lzma.compress], ids=["plain", "gz", "bz2", "xz"]
)
def test_a_log_is_the_same_however_it_is_packed(tmp_path, pack):
    path = tmp_path / "engine.log"  # known by its first bytes, whatever its name
    path.write_bytes(pack(TEXT))
    positions = []
    chunks = list(chunks_of(str(path), positions.append))
    assert b"".join(chunks) == TEXT
    assert all(chunk.endswith(b"\n") for chunk in chunks)
    assert positions[-1] == path.stat().st_size == size_bytes((str(path),))


def test_several_gzip_members_are_one_log(tmp_path):
    path = tmp_path / "rotated.gz"
    path.write_bytes(gzip.compress(b"a\n") + gzip.compress(b"b\n"))
    assert b"".join(chunks_of(str(path))) == b"a\nb\n"


def test_a_gzip_that_breaks_off_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "engine.log.gz"
    packed = gzip.compress(TEXT)
    path.write_bytes(packed[: len(packed) // 2])
    got = b"".join(chunks_of(str(path)))
    assert got
    assert TEXT.startswith(got.rstrip(b"\n"))


def test_a_file_that_is_not_what_its_first_bytes_say_is_named(tmp_path):
    path = tmp_path / "engine.log.gz"
    path.write_bytes(b"\x1f\x8bnothing of the kind")
    with pytest.raises(Unreadable, match=r"engine\.log\.gz: .*; give a log as text"):
        list(chunks_of(str(path)))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(Unreadable, match=r"no\.log: No such file"):
        list(chunks_of(str(tmp_path / "no.log")))


def test_standard_input_is_read_and_its_size_is_not_known(monkeypatch):
    stdin = io.BufferedReader(io.BytesIO(gzip.compress(b"a\nb")))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(stdin))
    assert b"".join(chunks_of("-")) == b"a\nb"
    assert size_bytes(("-",)) is None


def test_of_a_line_of_megabytes_the_head_is_kept_and_the_next_line_is_whole():
    pieces = [b"first\n", *[b"x" * 100_000] * 50, b"tail\nnext\n"]
    got = b"".join(whole_lines(iter(pieces)))
    first, long, following, rest = got.split(b"\n")
    assert (first, following, rest) == (b"first", b"next", b"")
    assert CARRY_BYTES_MAX <= len(long) <= CARRY_BYTES_MAX + 100_000


def test_a_progress_bar_of_megabytes_does_not_hide_what_comes_behind_it():
    bar = b"".join(b"%d%%|##  | 1/2\r" % (n % 100) for n in range(100_000))
    pieces = (bar[at : at + 4096] for at in range(0, len(bar), 4096))
    got = b"".join(whole_lines(iter([*pieces, b"(Worker_TP0 pid=1) x\n"])))
    assert got == bar + b"(Worker_TP0 pid=1) x\n"


def test_chunks_end_where_lines_end_wherever_the_pieces_did():
    for size in (1, 7, 4096):
        pieces = (TEXT[at : at + size] for at in range(0, 3000, size))
        chunks = list(whole_lines(pieces))
        assert all(chunk.endswith(b"\n") for chunk in chunks[:-1])
