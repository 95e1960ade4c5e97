"""What the network does to a rank: resets, silence, half-open connections, a cut cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.builders import lacking
from tests.crash.proxy import proxy
from tests.crash.ranks import RankProcess, a_start, seal, status
from tests.crash.server import Server, serving

# Until the kernel gives up on a silent peer: 8 s by keep-alive. A comment that is sent meanwhile
# (after 5 s at the latest) stops the keep-alive, and is itself given up after another 8 s.
VANISHED_S = 5 + 8
REATTACH_S = 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("network"), "--lost-after-s", "4") as running:
        yield running


def test_a_connection_that_is_reset_is_opened_again_and_nobody_is_lost(server: Server) -> None:
    with proxy(server.port) as between, a_start(server.url, urls={1: between.url}) as ranks:
        for _ in range(3):
            between.cut()
            time.sleep(0.3)
        seal(ranks)


def test_a_rank_that_is_partitioned_is_lost_by_name_and_hears_the_same_decision_afterwards(
    server: Server,
) -> None:
    with proxy(server.port) as between, a_start(server.url, urls={1: between.url}) as ranks:
        first, second = ranks
        between.turn("refuse", cut=True)
        first.go()
        second.go()  # it reports into the void
        told = first.says("ended", 10)
        assert (told["code"], told["ranks"]) == ("rank_lost", [1])
        between.turn("pass")
        assert second.says("ended", 30)["digest"] == told["digest"]


def test_a_call_whose_answer_never_comes_is_repeated_and_counts_once(server: Server) -> None:
    with proxy(server.port) as between, a_start(server.url, urls={1: between.url}) as ranks:
        first, second = ranks
        between.turn("swallow answers")
        second.go()
        until_s = time.monotonic() + 15
        while reported(server, ranks) != [False, True]:
            assert time.monotonic() < until_s, status(server.url, ranks)
            time.sleep(0.1)
        between.turn("pass", cut=True)
        first.go()
        assert len({each.says("reported")["digest"] for each in ranks}) == 1
        for each in ranks:
            each.go()
        for each in ranks:
            each.says("sealed")


def reported(server: Server, ranks: Sequence[RankProcess]) -> list[bool]:
    """Of each rank, in their order."""
    members = status(server.url, ranks)["members"]
    return [m["reported"] for m in sorted(members, key=lambda m: m["ranks"])]


# --- a network of its own -----------------------------------------------------------------------


@dataclass(frozen=True)
class Cable:
    """A host of its own, with one cable to this one."""

    under: tuple[str, ...]
    here: str
    link: str

    def pull(self) -> None:
        ip("-n", self.under[3], "link", "set", self.link, "down")

    def plug(self) -> None:
        ip("-n", self.under[3], "link", "set", self.link, "up")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        lacking("root and `ip`, which make a network namespace")
    there, near, far = (f"kv{kind}{os.getpid() % 100_000}" for kind in ("ns", "a", "b"))
    ip("netns", "add", there)
    try:
        ip("link", "add", near, "type", "veth", "peer", "name", far)
        ip("link", "set", far, "netns", there)
        ip("addr", "add", "10.231.77.1/30", "dev", near)
        ip("link", "set", near, "up")
        ip("-n", there, "addr", "add", "10.231.77.2/30", "dev", far)
        ip("-n", there, "link", "set", far, "up")
        ip("-n", there, "link", "set", "lo", "up")
        yield Cable(("ip", "netns", "exec", there), "10.231.77.1", far)
    finally:
        # First the cable: a namespace that is deleted frees it later, and a new one would collide.
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", near)
        ip("netns", "del", there)


@contextlib.contextmanager
def over_the_cable(cable: Cable, folder: Path) -> Iterator[tuple[RankProcess, RankProcess]]:
    """Rank 0 on this host, rank 1 on the other; both have claimed."""
    with serving(folder, host=cable.here) as server:
        ranks = [
            RankProcess(server.url, "far", rank, 2, under=under)
            for rank, under in enumerate([(), cable.under])
        ]
        try:
            for each in ranks:
                each.says("claimed")
            yield ranks[0], ranks[1]
        finally:
            for each in ranks:
                each.close()


def test_a_host_that_vanishes_ends_its_stream_and_its_rank_is_named(
    cable: Cable, tmp_path: Path
) -> None:
    with over_the_cable(cable, tmp_path) as (here, there):
        here.go()
        time.sleep(0.5)
        cable.pull()
        began_s = time.monotonic()
        told = here.says("ended", VANISHED_S + 20)
        took_s = time.monotonic() - began_s
        assert (told["code"], told["ranks"]) == ("rank_lost", [1])
        assert 7 < took_s < VANISHED_S + REATTACH_S + 3
        cable.plug()
        there.go()
        assert there.says("ended", 30)["digest"] == told["digest"]


def test_a_cable_that_is_back_in_time_costs_nobody_anything(cable: Cable, tmp_path: Path) -> None:
    with over_the_cable(cable, tmp_path) as ranks:
        cable.pull()
        time.sleep(3)
        cable.plug()
        seal(ranks)
