"""Real rank processes that die: the others hear who, and soon."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.crash.ranks import RankProcess, a_start, seal
from tests.crash.server import Server, serving

LOST_AFTER_S = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("ranks"), "--lost-after-s", str(LOST_AFTER_S)) as running:
        yield running


def lost(rank: RankProcess, within_s: float) -> str:
    """It hears within so long that rank 1 is lost, and says by which error."""
    began_s = time.monotonic()
    said = rank.says("ended", within_s + 20)
    assert (said["code"], said["ranks"]) == ("rank_lost", [1])
    assert time.monotonic() - began_s < within_s
    return str(said["error"])


def test_a_rank_killed_while_it_loads_is_named_to_the_others_within_3_s(server: Server) -> None:
    with a_start(server.url, tp=3) as (first, second, third):
        first.go()
        third.go()
        second.kill()
        assert lost(first, 3) == "Failed"
        assert lost(third, 3) == "Failed"


def test_a_rank_killed_after_the_verdict_aborts_it(server: Server) -> None:
    with a_start(server.url) as (first, second):
        for each in (first, second):
            each.go()
        for each in (first, second):
            each.says("reported")
        second.kill()
        first.go()
        assert lost(first, LOST_AFTER_S + 3) == "Aborted"


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_a_child_that_lives_on_does_not_hide_the_death_of_its_rank(
    server: Server, how: str
) -> None:
    with a_start(server.url, "--child", how) as (first, second):
        assert second.children
        first.go()
        second.kill()
        assert lost(first, 3) == "Failed"


def test_a_start_whose_ranks_were_all_killed_is_made_anew(server: Server) -> None:
    with a_start(server.url, engine="phoenix") as ranks:
        for each in ranks:
            each.kill()
        with a_start(server.url, engine="phoenix", launch="run-2") as others:
            seal(others)
