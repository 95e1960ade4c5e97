"""The long search: seed after seed, until it is stopped or the time is over."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.simulation.checkers import check
from tests.simulation.states import all_states, reached
from tests.simulation.trace import paths
from tests.simulation.world import run


@dataclass
class Found:
    """What one seed came to. broken: the promises that its history breaks, with why."""

    seed: str
    broken: list[str] = field(default_factory=list)
    states: set[str] = field(default_factory=set)
    judged: Counter[str] = field(default_factory=Counter)


def search(seed: int | str) -> Found:
    """Run one world and judge it. A world that cannot be run to its end is a finding too."""
    found = Found(str(seed))
    try:
        history = run(seed)
        for verdict in check(history):
            found.judged[verdict.name] = int(verdict.judged > 0)
            if verdict.breaches:
                found.broken.append(f"{verdict.name}: {verdict.breaches[0][0]}")
        found.states = reached(history)
        found.judged["trace"] = int(any(path.entries for path in paths(history)))
    except Exception as fault:  # a night goes on: what breaks a seed is its finding
        found.broken.append(f"{type(fault).__name__}: {fault}")
    return found


def searched(seeds: Iterator[int] | range, cores: int | None = None) -> Iterator[Found]:
    """In the order of the seeds, on all cores if none are said. Workers are fresh processes."""
    cores = cores or len(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        yield from pool.imap(search, seeds, chunksize=4)


def night(*, minutes: float | None, first: int, cores: int | None = None) -> int:
    """Search on. Returns 0 when every promise held and every state was reached, else 1.

    SIGINT and SIGTERM end it with its account, also where a shell started it in the background.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    began_s, last_s = time.monotonic(), time.monotonic()
    states: Counter[str] = Counter()
    judged: Counter[str] = Counter()
    bugs: list[Found] = []
    worlds = 0
    try:
        for found in searched(_counting(first), cores):
            worlds += 1
            states.update(found.states)
            judged.update(found.judged)
            if found.broken:
                bugs.append(found)
                print(f"seed {found.seed}: {'; '.join(found.broken)}", flush=True)
            now_s = time.monotonic()
            if now_s - last_s > 60:
                last_s = now_s
                rate = worlds / (now_s - began_s)
                print(f"{worlds} schedules, {rate:.1f}/s, {len(bugs)} bugs", flush=True)
            if minutes is not None and now_s - began_s > minutes * 60:
                break
    except KeyboardInterrupt:
        pass
    seconds = time.monotonic() - began_s
    missed = [name for name in all_states() if not states[name]]
    print(f"\n{worlds} schedules in {seconds:.0f} s, {worlds / seconds:.1f}/s, from seed {first}")
    print("\npromises, and in how many schedules each was put to the test:")
    for name, count in judged.items():
        print(f"{count:8}  {name}")
    print("\nstates reached, and in how many schedules:")
    for name in all_states():
        print(f"{states[name]:8}  {name}")
    print(f"\nbugs: {len(bugs)}")
    for found in bugs:
        print(f"seed {found.seed}: {'; '.join(found.broken)}")
    if missed:
        print(f"\nnever reached: {', '.join(missed)}")
    return 1 if bugs or missed else 0


def _counting(first: int) -> Iterator[int]:
    # The pool takes all it can get: bounded, so that it takes a night's worth at most.
    yield from range(first, first + 1_000_000)
