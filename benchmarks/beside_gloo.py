"""What each rank hears of a start that goes wrong, and how soon: gloo's all_reduce, and kvaccord.

Plays each start of four rank processes twice: once they agree by the collective that engines use,
all_reduce(MIN) of their block counts; once they agree at a coordinator. Then the worst case with
both: three ranks stand in a collective with gloo's default timeout of 30 minutes while the fourth
has raised, and `on_stop=Exit(2)` ends them.

    pip install -e '.[server,torch]'
    python benchmarks/beside_gloo.py [--timeout-s 60]

--timeout-s is that of gloo and of gathering, whose defaults are 30 minutes both: this run must end.
Exits with 1 when a claim about kvaccord does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from kvaccord import Layout, Report, page
from kvaccord.errors import KvaccordError
from worker_client import Exit, Rendezvous

ROOT = Path(__file__).parents[1]
WORLD, FATED = 4, 2
CAUSE = "OutOfMemoryError: 2.00 GiB do not fit"
# raises: its process lives on, as when an executor keeps the exception of a worker.
STARTS = {
    "healthy": "all is well",
    "raises": f"rank {FATED} raises, its process lives on",
    "exits": f"rank {FATED} raises, its process ends",
    "killed": f"rank {FATED} is killed with -9",
    "absent": f"rank {FATED} is never started",
}
SOON_S = 5.0  # from the fault until every other rank has heard


class OutOfMemoryError(RuntimeError):
    """What the rank that is fated to fail raises."""


# --- one rank, in a process of its own ----------------------------------------------------------


def report(rank: int) -> Report:
    return Report(
        free_bytes=80_000, kv_budget_bytes=70_000 - 1000 * rank, classes=[page("kv", 100)]
    )


def meet_fate(start: str, rank: int) -> None:
    """What happens to this rank before it can agree with the others."""
    if rank != FATED or start in ("healthy", "absent"):
        return
    say(fate_s=time.monotonic())  # one clock for all processes of a machine
    if start == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OutOfMemoryError(CAUSE.partition(": ")[2])


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def by_gloo(start: str, rank: int, place: str, timeout_s: float) -> str:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{place}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=timeout_s),
    )
    meet_fate(start, rank)
    blocks = torch.tensor(report(rank).kv_budget_bytes // 100)
    dist.all_reduce(blocks, op=dist.ReduceOp.MIN)
    return f"{int(blocks)} blocks"


def by_kvaccord(start: str, rank: int, place: str, timeout_s: float) -> str:
    with joined(start, rank, place) as rdzv:
        meet_fate(start, rank)
        agreed = rdzv.report(report(rank))
        rdzv.applied(built=agreed.entries)
        return f"{agreed.decision.entries(rank)['kv']} blocks"


def by_both(start: str, rank: int, place: str) -> None:
    """What an engine does: whatever raises leaves the block; on_stop does the rest."""
    import torch
    import torch.distributed as dist

    url, _, gloo = place.partition("|")
    try:
        with joined(start, rank, url, on_stop=Exit(grace_s=2)):
            dist.init_process_group(  # its timeout is the default one
                "gloo", init_method=f"tcp://{gloo}", rank=rank, world_size=WORLD
            )
            if rank == FATED:
                time.sleep(1.0)  # until the others stand in the collective
            meet_fate(start, rank)
            dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.MIN)
    except OutOfMemoryError:
        if start == "exits":
            raise
        time.sleep(3600)  # its executor keeps it


def joined(start: str, rank: int, url: str, **fields: Any) -> Rendezvous:
    return Rendezvous.join(
        url=url,
        engine=f"beside-gloo-{start}",
        launch=f"run-{os.environ['RUN']}",
        ranks=[rank],
        layout=Layout(tp=WORLD),
        **fields,
    )


WAYS = {"gloo": by_gloo, "kvaccord": by_kvaccord}


def be_rank(way: str, start: str, rank: int, place: str, timeout_s: float) -> None:
    """Say what this rank hears, and when; then end, or live on as the start has it."""
    if way != "kvaccord":
        import torch.distributed  # noqa: F401  seconds, which are no part of what is measured
    say(ready=True)
    sys.stdin.readline()
    if rank == 0:
        say(began_s=time.monotonic())
    if way == "both":
        by_both(start, rank, place)
        return
    try:
        heard = WAYS[way](start, rank, place, timeout_s)
    except KvaccordError as fault:
        heard = f"{type(fault).__name__}: {fault}"
    except Exception as fault:
        heard = f"{type(fault).__name__}: {str(fault).splitlines()[0]}"
    say(heard=heard, heard_s=time.monotonic())
    if rank == FATED and start == "raises":
        time.sleep(3600)
    sys.stdout.flush()
    os._exit(0)  # leaving a process group whose peers are gone may hang, and is not asked about


# --- four of them -------------------------------------------------------------------------------


class Rank:
    def __init__(self, way: str, start: str, rank: int, place: str, timeout_s: float) -> None:
        self.rank = rank
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by close()
        command = [sys.executable, __file__, "--rank", str(rank), "--timeout-s", str(timeout_s)]
        self.process = subprocess.Popen(
            [*command, "--way", way, "--start", start, "--place", place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    def await_ready(self) -> None:
        assert self.process.stdout is not None
        if "ready" not in self.process.stdout.readline():
            raise RuntimeError(f"rank {self.rank} did not begin: {self.stderr()}")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def said(self, until: str = "heard") -> dict[str, Any]:
        """All that it said from its beginning until it said this, or ended."""
        assert self.process.stdout is not None
        said: dict[str, Any] = {}
        for line in self.process.stdout:
            said |= json.loads(line)
            if until in said:
                break
        return said

    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._stderr.close()


@contextmanager
def ranks_of(way: str, start: str, place: str, timeout_s: float) -> Iterator[list[Rank]]:
    ranks = [
        Rank(way, start, rank, place, timeout_s)
        for rank in range(WORLD)
        if not (start == "absent" and rank == FATED)
    ]
    try:
        for rank in ranks:
            rank.await_ready()
        for rank in ranks:
            rank.go()
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def free_place() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def coordinator(gather_s: float) -> Iterator[str]:
    command = [sys.executable, "-m", "cli", "serve", "--store", "memory", "--port", "0"]
    with subprocess.Popen(
        [*command, "--gather-s", str(gather_s)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        found = re.search(r":(\d+)/ on ", process.stdout.readline())
        assert found is not None, "no coordinator: pip install -e '.[server,torch]'"
        try:
            yield f"http://127.0.0.1:{found[1]}"
        finally:
            process.kill()


# --- the table ----------------------------------------------------------------------------------


Heard = dict[int, tuple[str, float]]  # rank: what it heard, seconds after the fault


def play(way: str, start: str, place: str, timeout_s: float) -> Heard:
    with ranks_of(way, start, place, timeout_s) as ranks:
        said = {rank.rank: rank.said() for rank in ranks}
    zero_s = said.get(FATED, {}).get("fate_s") or said[0]["began_s"]
    return {
        rank: (what["heard"], what["heard_s"] - zero_s)
        for rank, what in said.items()
        if "heard" in what and (rank != FATED or start == "healthy")
    }


def show(way: str, heard: Heard) -> None:
    """A line for each thing heard, with the ranks that heard it; ports are of no interest."""
    rows: dict[str, list[int]] = {}
    for rank, (text, _) in heard.items():
        rows.setdefault(re.sub(r":\d{4,5}\b", ":PORT", text), []).append(rank)
    for text, ranks in rows.items():
        last_s = max(heard[rank][1] for rank in ranks)
        print(f"  {way:<9} ranks {', '.join(map(str, ranks)):<10} {last_s:>7.2f} s  {text}")


def faults_in(start: str, heard: Heard, timeout_s: float) -> list[str]:
    """Which claims about kvaccord do not hold."""
    said, within_s = {text for text, _ in heard.values()}, SOON_S
    if start == "healthy":
        least = f"{report(WORLD - 1).kv_budget_bytes // 100} blocks"
        good = said == {least} and len(heard) == WORLD
        return [] if good else [f"{start}: not {least} on all ranks: {heard}"]
    faults = []
    if len(said) != 1 or len(heard) != WORLD - 1:
        faults.append(f"{start}: not every other rank heard one text: {heard}")
    if start == "absent":
        within_s += timeout_s
    wanted = {"raises": CAUSE, "exits": CAUSE, "killed": "rank_lost", "absent": "ranks_missing"}
    for text, after_s in heard.values():
        if f"rank {FATED}" not in text or wanted[start] not in text or after_s > within_s:
            faults.append(f"{start}: after {after_s:.1f} s: {text}")
    return faults


def exit_beside_a_collective(start: str, url: str) -> list[str]:
    """Three ranks in a collective of 30 minutes, the fourth has raised; all on Exit(2)."""
    faults = []
    with ranks_of("both", start, f"{url}|{free_place()}", 0.0) as ranks:
        zero_s = ranks[FATED].said("fate_s")["fate_s"]
        left, gone = list(ranks), {}
        while left and time.monotonic() < zero_s + 60:
            for rank in [rank for rank in left if rank.process.poll() is not None]:
                gone[rank.rank] = time.monotonic() - zero_s
                left.remove(rank)
            time.sleep(0.005)
        for rank in ranks:
            code, gone_s = rank.process.poll(), gone.get(rank.rank, float("inf"))
            lines = [line for line in rank.stderr().splitlines() if CAUSE in line]
            line = (lines or ["nothing of the cause on stderr"])[0]
            print(f"  rank {rank.rank} gone after {gone_s:>5.2f} s, exit {code}: {line}")
            # Where a peer's end broke the collective, a rank has gone by itself, within its grace.
            codes = {70, 75} if start == "raises" else {1, 70, 75}
            if gone_s > SOON_S or code not in codes or not lines:
                faults.append(f"on_stop, {start}: rank {rank.rank}: {gone_s:.2f} s, exit {code}")
    return faults


def main(timeout_s: float) -> int:
    os.environ["RUN"] = str(os.getpid())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    faults: list[str] = []
    with coordinator(timeout_s) as url:
        for start, about in STARTS.items():
            print(f"{start}: {about}", flush=True)
            show("gloo", play("gloo", start, free_place(), timeout_s))
            heard = play("kvaccord", start, url, timeout_s)
            show("kvaccord", heard)
            faults += faults_in(start, heard, timeout_s)
        for start in ("raises", "exits"):
            print(f"on_stop=Exit(2), the others stand in gloo for 30 minutes: {STARTS[start]}")
            faults += exit_beside_a_collective(start, url)
    for fault in faults:
        print(f"does not hold: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timeout-s", type=float, default=60.0)
    for name in ("--way", "--start", "--place"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is None:
        sys.exit(main(asked.timeout_s))
    be_rank(asked.way, asked.start, asked.rank, asked.place, asked.timeout_s)
