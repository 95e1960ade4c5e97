"""Feeds the reader with what nobody would write: `python -m tests.reader.fuzz --minutes 10`.

Real logs, mutated. Whatever comes in, an answer comes out, in bounded time and without control
characters; and it does not depend on where the chunks end. A seed is the whole bug report.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable

from reader.document import document_of, github_of
from reader.judge import judge
from reader.show import exit_code_of, markdown_of, text_of
from tests.reader.reading import CASES, LOGS, SHAPES, log_of, scanned

SECONDS_PER_INPUT = 5.0  # of this process; usual are milliseconds
NUMBERS = (b"0", b"-1", b"1", b"9" * 20, b"", b"1,,2", b"nan", b"1e9", b"-0.00", b"0.001", b"4096")
JUNK = (
    b"\x1b[36m", b"\x1b[", b"\x00", b"\r", b"\xff\xfe", b"\n", b"{", b'{"log":"', b"(Worker_TP",
    b"[rank", b" | ", b"2026-13-99T99:99:99Z stdout F ", b"[repeated 9999999x across cluster]",
    b"Error: ", b"A." * 40 + b"Error: ", b"(" * 300, "█".encode() * 500, b"x" * 300_000,
    b"[pod/a/b] ", b"name-1  | ", b"[1,99999]<stdout>:", b"Killed", b"SIGKILL",
)  # fmt: skip


def corpus() -> list[bytes]:
    logs = [path.read_bytes() for path in (*LOGS, SHAPES)]
    return logs + [log_of(json.loads(path.read_text())).encode() for path in CASES]


def flipped(rng: random.Random, log: bytes) -> bytes:
    data = bytearray(log)
    for _ in range(rng.randint(1, 20)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def cut(rng: random.Random, log: bytes) -> bytes:
    begin, end = sorted(rng.randrange(len(log) + 1) for _ in range(2))
    return log[begin:end] if rng.random() < 0.5 else log[:begin] + log[end:]


def stuffed(rng: random.Random, log: bytes) -> bytes:
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(log) + 1)
        log = log[:at] + rng.choice(JUNK) + log[at:]
    return log


def renumbered(rng: random.Random, log: bytes) -> bytes:
    parts, digits = bytearray(), False
    for byte in log:
        if 48 <= byte <= 57:
            if not digits and rng.random() < 0.1:
                parts += rng.choice(NUMBERS)
                continue
            digits = True
        else:
            digits = False
        parts.append(byte)
    return bytes(parts)


def shuffled(rng: random.Random, log: bytes) -> bytes:
    lines = log.splitlines(keepends=True)
    rng.shuffle(lines)
    return b"".join(lines)


def repeated(rng: random.Random, log: bytes) -> bytes:
    return log * rng.randint(2, 5)


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    flipped, cut, stuffed, renumbered, shuffled, repeated,
)  # fmt: skip


def mutated(rng: random.Random, logs: list[bytes]) -> list[bytes]:
    """One to three files, each a log that was mutated up to four times."""
    files = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        log = rng.choice(logs)
        if rng.random() < 0.3:  # two engines write into one stream
            lines = [*log.splitlines(keepends=True), *rng.choice(logs).splitlines(keepends=True)]
            log = b"".join(sorted(lines, key=lambda line: rng.random()))
        for _ in range(rng.randint(0, 4)):
            log = rng.choice(MUTATIONS)(rng, log) or b"\n"
        files.append(log)
    return files


def check(files: list[bytes], rng: random.Random) -> None:
    """Raises whatever is wrong."""
    ranks = rng.choice((None, None, 1, 8, 1024))
    layout = rng.choice((None, None, {"tp": 4, "pp": 2}, {"dp": 2, "tp": 2}))
    began = time.process_time()
    scan = scanned(*files)
    judged = judge(scan.last(), scan.earlier(), scan.restarts(), ranks, layout)
    document = json.dumps(document_of(judged), allow_nan=False)
    shown = [*text_of(judged), *markdown_of(judged), *github_of(judged)]
    took = time.process_time() - began
    assert took < SECONDS_PER_INPUT, f"{took:.1f} s"
    assert exit_code_of(judged) in (0, 2, 3)
    assert all(line.isprintable() for line in shown), [s for s in shown if not s.isprintable()]
    again = scanned(*files, chunk=rng.choice((1000, 4096, 70_001)))
    parted = judge(again.last(), again.earlier(), again.restarts(), ranks, layout)
    if max(map(longest_line, files)) < 2**12:  # a cut line ends where its chunk does
        assert json.dumps(document_of(parted)) == document, "depends on where chunks end"


def longest_line(log: bytes) -> int:
    return max(map(len, log.split(b"\n")))


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--minutes", type=float, default=1.0)
    asked.add_argument("--seed", type=int, help="Only this one.")
    options = asked.parse_args()
    logs, until, seed, done = corpus(), time.monotonic() + options.minutes * 60, 0, 0
    seed = options.seed if options.seed is not None else random.randrange(2**32)
    while True:
        rng = random.Random(seed)
        try:
            check(mutated(rng, logs), rng)
        except Exception as fault:
            print(f"seed {seed}: {type(fault).__name__}: {fault}", file=sys.stderr)
            raise
        done, seed = done + 1, seed + 1
        if options.seed is not None or time.monotonic() > until:
            print(f"{done} inputs without a crash")
            return 0


if __name__ == "__main__":
    sys.exit(main())
