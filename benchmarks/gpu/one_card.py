"""Ranks that share one GPU, each capped to a share of it: what goes wrong without an agreed count.

    python benchmarks/gpu/one_card.py                # one NVIDIA GPU; torch, kvaccord[server,nvml]
    python benchmarks/gpu/one_card.py --cpu --runs 1      # shares are counted, nothing is taken

Every rank is a process with weights, a peak and a KV pool that it really allocates, capped with
torch.cuda.set_per_process_memory_fraction. One holds memory beside that. Played are: rank 0's count
for all; a rank that raises, or ends, before the collective; the same with kvaccord; then runs of
rounds with memory held on ranks that chance names, in processes that stay up and in fresh ones.

--gloo-timeout-s stands for the 30 minutes that are gloo's default. Exits with 1 when a claim about
kvaccord does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
GIB = 2**30
BLOCK_BYTES, LAYERS = 2**21, 32
WEIGHTS_BYTES, PEAK_BYTES = 2 * GIB, GIB
MIN_BLOCKS = 1024  # one sequence of full length
SOON_S, HUNG_S = 5.0, 120.0
FATED = 2


# --- a device -----------------------------------------------------------------------------------


class Gpu:
    """One process's part of the card."""

    def __init__(self, share: float, ranks: int) -> None:
        import torch

        self.torch, self.share, self.ranks = torch, share, ranks
        torch.cuda.set_per_process_memory_fraction(share)
        self.limit_bytes = int(torch.cuda.get_device_properties(0).total_memory * share)

    def take(self, size: int) -> list[Any]:
        """As an engine does it: a tensor for each layer, written to. Raises OutOfMemoryError."""
        each = size // LAYERS
        return [
            self.torch.zeros(each, dtype=self.torch.uint8, device="cuda") for _ in range(LAYERS)
        ]

    def give_back(self) -> None:
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()
        self.torch.cuda.reset_peak_memory_stats()

    def report(self, min_blocks: int) -> Any:
        from kvaccord import page
        from worker_client import cuda_report

        return cuda_report(
            classes=[page("kv", BLOCK_BYTES, min_entries=min_blocks)],
            utilization=self.share,
            local_count=self.ranks,
        )


class Counted:
    """A card of 139.8 GiB on which nothing is taken: tries this script out where there is none."""

    total_bytes = 150_112_043_008

    def __init__(self, share: float, ranks: int) -> None:
        import torch

        self.torch, self.ranks = torch, ranks
        self.limit_bytes = int(self.total_bytes * share)
        self.taken: list[Any] = []

    def take(self, size: int) -> list[Any]:
        held = sum(each[0] for each in self.taken if sys.getrefcount(each) > 3)
        if held + size > self.limit_bytes:
            raise self.torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / GIB:.2f} GiB (counted)"
            )
        self.taken = [each for each in self.taken if sys.getrefcount(each) > 3] + [[size]]
        return self.taken[-1]

    def give_back(self) -> None:
        self.taken = [each for each in self.taken if sys.getrefcount(each) > 3]

    def report(self, min_blocks: int) -> Any:
        from kvaccord import Report, page

        self.give_back()
        left = self.limit_bytes - sum(each[0] for each in self.taken) - PEAK_BYTES
        return Report(
            free_bytes=self.total_bytes,
            total_bytes=self.total_bytes,
            kv_budget_bytes=left,
            local_count=self.ranks,
            classes=[page("kv", BLOCK_BYTES, min_entries=min_blocks)],
        )


# --- one rank, in a process of its own ----------------------------------------------------------


class OneRank:
    """Carries out what it reads from stdin, and says on stdout what came of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch.distributed  # noqa: F401  seconds, which are no part of what is measured

        import worker_client.driver  # noqa: F401  likewise the HTTP client

        self.args, self.rank = args, args.rank
        self.device: Any = None
        self.weights: Any = None
        self.report: Any = None  # of the latest start

    def serve(self) -> None:
        tell(ready=True)
        for line in sys.stdin:
            asked = json.loads(line)
            self.device = self.device or (Counted if self.args.cpu else Gpu)(
                self.args.share, self.args.ranks
            )
            self.weights = self.weights or self.device.take(WEIGHTS_BYTES)
            began_s = time.monotonic()
            try:
                said = getattr(self, asked.pop("do"))(**asked)
            except Exception as fault:
                said = {"heard": in_a_line(fault), "raised": type(fault).__name__}
            tell(done=True, took_s=time.monotonic() - began_s, at_s=time.monotonic(), **said)
            if said.get("ends"):
                os._exit(1)

    def by_collective(
        self, way: str, place: str, hold_bytes: int, fault: str, ends: bool
    ) -> dict[str, Any]:
        """way: `rank 0` imposes its count, `min` takes the least. fault: before the collective."""
        import torch
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{place}",
            rank=self.rank,
            world_size=self.args.ranks,
            timeout=timedelta(seconds=self.args.gloo_timeout_s),
        )
        dist.barrier()
        held = self.device.take(hold_bytes)
        own = blocks_in(self.device.report(MIN_BLOCKS))
        if fault:  # where peers are not told, the process that raised lives on, or ends
            return {"heard": f"raised: {fault}", "own": own, "ends": ends, "fate": True}
        count = torch.tensor(own)
        if way == "rank 0":
            dist.broadcast(count, src=0)
        else:
            dist.all_reduce(count, op=dist.ReduceOp.MIN)
        try:
            pool = self.device.take(int(count) * BLOCK_BYTES)
        except torch.OutOfMemoryError as out:
            return {"heard": in_a_line(out), "own": own, "ends": ends, "fate": True, "oom": True}
        waits_s = time.monotonic()
        try:
            dist.barrier()  # every engine meets its peers again before it serves
        except RuntimeError as fault_of_gloo:
            waited_s = time.monotonic() - waits_s
            return {"heard": in_a_line(fault_of_gloo), "own": own, "waited_s": waited_s}
        del pool, held
        return {"heard": f"{int(count)} blocks", "own": own}

    def by_kvaccord(
        self, url: str, engine: str, launch: str, hold_bytes: int, starve: bool, fault: str
    ) -> dict[str, Any]:
        """One start; gives back what it took. starve: hold all but a part of a sequence."""
        import torch

        from kvaccord.errors import RoundEnded

        self.device.give_back()
        if starve:
            hold_bytes = self.device.limit_bytes - WEIGHTS_BYTES - PEAK_BYTES - GIB
        self.report = None
        try:
            count, digest = self._start(url, engine, launch, hold_bytes, fault)
            said = {"heard": f"{count} blocks", "digest": digest}
        except RoundEnded as end:
            said = {"heard": str(end)}
        except torch.OutOfMemoryError as out:
            said = {"heard": f"raised: {in_a_line(out)}", "fate": True, "oom": not fault}
        self.device.give_back()
        return said | ({} if self.report is None else measures(self.report))

    def _start(
        self, url: str, engine: str, launch: str, hold_bytes: int, fault: str
    ) -> tuple[int, str]:
        """What a rank of an engine does: load, profile, report, build, hear that all have built."""
        import torch

        from kvaccord import Layout
        from worker_client import Rendezvous

        with Rendezvous.join(
            url=url,
            engine=engine,
            launch=launch,
            ranks=[self.rank],
            layout=Layout(tp=self.args.ranks),
        ) as rdzv:
            held = self.device.take(hold_bytes)
            peak = self.device.take(PEAK_BYTES)
            del peak
            if fault:
                raise torch.OutOfMemoryError(fault)
            self.report = self.device.report(MIN_BLOCKS)
            agreed = rdzv.report(self.report)
            pool = self.device.take(agreed.entries["kv"] * BLOCK_BYTES)
            rdzv.applied(built=agreed.entries)
            del pool, held
        return agreed.entries["kv"], agreed.decision.digest


def measures(report: Any) -> dict[str, Any]:
    return {
        "own": blocks_in(report),
        "free_bytes": report.free_bytes,
        "budget_bytes": report.kv_budget_bytes,
        "parts": report.parts or {},
    }


def blocks_in(report: Any) -> int:
    return max(0, min(report.kv_budget_bytes, report.free_bytes)) // BLOCK_BYTES


def in_a_line(fault: BaseException) -> str:
    return " ".join(f"{type(fault).__name__}: {fault}".split())[:300]


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# --- all ranks ----------------------------------------------------------------------------------


class Process:
    """A rank process, and what it says."""

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        self.rank = rank
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  close() closes it
        options = ["--ranks", args.ranks, "--share", args.share]
        options += ["--gloo-timeout-s", args.gloo_timeout_s]
        command = [sys.executable, __file__, "--rank", rank, *options]
        self._lines: queue.Queue[str] = queue.Queue()
        self.process = subprocess.Popen(
            [*map(str, command), *(["--cpu"] if args.cpu else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def said(self, word: str) -> dict[str, Any]:
        """The next that has this word; where it takes HUNG_S, that it hung."""
        until_s = time.monotonic() + HUNG_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                return {"heard": "hung", "hung": True, "took_s": HUNG_S, "at_s": time.monotonic()}
            if not line:
                self._stderr.seek(0)
                raise RuntimeError(f"rank {self.rank} ended: {self._stderr.read()[-2000:]}")
            if line.startswith("{") and word in (said := json.loads(line)):
                return dict(said)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._stderr.close()


class Ranks:
    """All rank processes of a start; they begin to load torch at once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.processes = [Process(rank, args) for rank in range(args.ranks)]
        self._ready = False

    def play(self, do: str, each: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Ask each rank the same with its own arguments; what each of them said, by rank."""
        if not self._ready:
            for process in self.processes:
                process.said("ready")
            self._ready = True
        for process, what in zip(self.processes, each, strict=True):
            process.ask(do=do, **what)
        return [process.said("done") for process in self.processes]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.close()


@contextmanager
def coordinator(python: str) -> Iterator[str]:
    command = [python, "-m", "cli", "serve", "--store", "memory", "--port", "0"]
    with (
        tempfile.TemporaryFile("w+") as stderr,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        assert process.stdout is not None
        found = re.search(r":(\d+)/ on ", process.stdout.readline())
        if found is None:
            process.kill()
            stderr.seek(0)
            raise RuntimeError(
                f"no coordinator, pip install -e '.[server]': {stderr.read()[-3000:]}"
            )
        try:
            yield f"http://127.0.0.1:{found[1]}"
        finally:
            process.kill()


def free_place() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


# --- what is played -----------------------------------------------------------------------------


class Table:
    """Prints as it goes; `faults` are the claims that do not hold; `figures` are for a file."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.figures: dict[str, Any] = {}

    def show(self, title: str, said: list[dict[str, Any]]) -> None:
        print(title)
        self.figures[title] = said
        fate_s = min((s["at_s"] for s in said if s.get("fate")), default=None)
        rows: dict[str, list[int]] = {}
        for rank, what in enumerate(said):
            rows.setdefault(re.sub(r":\d{4,5}\b", ":PORT", what["heard"]), []).append(rank)
        for text, ranks in rows.items():
            began = fate_s or min(s["at_s"] - s["took_s"] for s in said)
            after_s = max(said[r]["at_s"] for r in ranks) - began
            since = "after the fault" if fate_s else "in all"
            print(f"  ranks {', '.join(map(str, ranks)):<8} {after_s:>7.2f} s {since}: {text}")
        sys.stdout.flush()

    def claim(self, holds: bool, text: str) -> None:
        if not holds:
            self.faults.append(text)


def by_collectives(args: argparse.Namespace, table: Table) -> None:
    hold = [args.hold_gib * GIB if rank == FATED else 0 for rank in range(args.ranks)]
    cause = "CUDA out of memory. Tried to allocate 2.00 GiB while loading"
    for title, way, fault, ends in (
        ("all_reduce(MIN), nothing raises", "min", "", False),
        ("rank 0's count for all; the short rank's process lives on", "rank 0", "", False),
        ("rank 0's count for all; the short rank's process ends", "rank 0", "", True),
        (f"rank {FATED} raises before all_reduce(MIN), its process lives on", "min", cause, False),
        (f"rank {FATED} raises before all_reduce(MIN), its process ends", "min", cause, True),
    ):
        place = free_place()
        each = [
            {"way": way, "place": place, "hold_bytes": hold[rank], "ends": ends}
            | {"fault": fault if rank == FATED else ""}
            for rank in range(args.ranks)
        ]
        with Ranks(args) as ranks:
            table.show(f"gloo: {title}", ranks.play("by_collective", each))


def by_kvaccord(args: argparse.Namespace, table: Table, url: str) -> None:
    cause = "CUDA out of memory. Tried to allocate 2.00 GiB while loading"
    for title, hold_gib, fault, word in (
        ("one rank holds memory", args.hold_gib, "", " blocks"),
        (f"rank {FATED} raises, its process lives on", 0, cause, f"rank {FATED}"),
        (f"rank {FATED} has no room for one sequence", 0, "", f"rank {FATED}"),
    ):
        each = [
            {"url": url, "engine": title.replace(" ", "-").replace(",", ""), "launch": "one"}
            | {"hold_bytes": hold_gib * GIB if rank == FATED else 0}
            | {"starve": "no room" in title and rank == FATED}
            | {"fault": fault if rank == FATED else ""}
            for rank in range(args.ranks)
        ]
        with Ranks(args) as ranks:
            said = ranks.play("by_kvaccord", each)
        table.show(f"kvaccord: {title}", said)
        heard = {what["heard"] for what in said if not what.get("fate")}
        table.claim(len(heard) == 1 and word in min(heard), f"{title}: {heard}")
        fate_s = next((what["at_s"] for what in said if what.get("fate")), None)
        if fate_s is not None:
            late_s = max(what["at_s"] for what in said) - fate_s
            table.claim(late_s < SOON_S, f"{title}: heard {late_s:.1f} s after the fault")


def endurance(args: argparse.Namespace, table: Table, url: str, fresh: bool) -> None:
    """Runs of rounds. In two of ten a rank has no room; in the first and the last nobody holds."""
    name = "fresh" if fresh else "warm"
    chance, rounds = random.Random(1), []
    began_s = time.monotonic()
    for run in range(args.runs):
        with ExitStack() as stack:
            ranks = stack.enter_context(Ranks(args))
            for number in range(args.rounds):
                # The next ones load torch meanwhile.
                later = stack.enter_context(Ranks(args)) if fresh else ranks
                calm = number in (0, args.rounds - 1)
                short = chance.randrange(args.ranks)
                starved = not calm and number % 4 == 2
                hold = [
                    0 if calm else chance.randrange(0, args.hold_gib * GIB, 2**21)
                    for _ in range(args.ranks)
                ]
                launch = f"run-{run}#{number}"
                each = [
                    {"url": url, "engine": name, "launch": launch, "hold_bytes": hold[rank]}
                    | {"starve": starved and rank == short, "fault": ""}
                    for rank in range(args.ranks)
                ]
                said = ranks.play("by_kvaccord", each)
                rounds.append({"run": run, "round": number, "calm": calm, "said": said})
                _judge(table, f"{name} {launch}", said, f"rank {short} " if starved else "")
                if fresh:
                    ranks.__exit__()
                    ranks = later
    table.figures[f"endurance, {name}"] = rounds
    took = [max(s["took_s"] for s in each["said"]) for each in rounds]
    oom = sum(bool(s.get("oom")) for each in rounds for s in each["said"])
    hung = sum(bool(s.get("hung")) for each in rounds for s in each["said"])
    heard = [{s["heard"] for s in each["said"]} for each in rounds]
    ends = [texts.pop() if len(texts) == 1 else "several" for texts in heard]
    agreed, failed = (sum(word in end for end in ends) for word in (" blocks", " FAILED "))
    kind = "fresh processes each round" if fresh else "processes that stay up"
    print(
        f"kvaccord: {args.runs} runs of {args.rounds} rounds, {kind}: {agreed} agreed and built,"
        f" {failed} failed alike on all ranks, {oom} out of memory, {hung} hung; a round"
        f" {statistics.median(took):.2f} s (median), {max(took):.2f} s (longest);"
        f" {time.monotonic() - began_s:.0f} s in all"
    )
    sys.stdout.flush()
    spreads(rounds, fresh)


def _judge(table: Table, name: str, said: list[dict[str, Any]], blamed: str) -> None:
    heard = {what["heard"] for what in said}
    table.claim(len(heard) == 1, f"{name}: ranks heard different things: {heard}")
    table.claim(not any(what.get("oom") for what in said), f"{name}: out of memory: {heard}")
    table.claim(not any(what.get("hung") for what in said), f"{name}: hung")
    if blamed:
        table.claim(all(blamed in text for text in heard), f"{name}: {blamed} not named: {heard}")
        return
    least = min(what.get("own", -1) for what in said)
    table.claim(heard == {f"{least} blocks"}, f"{name}: not the least of all, {least}: {heard}")
    table.claim(len({what.get("digest") for what in said}) == 1, f"{name}: several decisions")


def spreads(rounds: list[dict[str, Any]], fresh: bool) -> None:
    """How far ranks are apart that hold the same, in rounds where nobody holds more."""
    for cold in (True,) if fresh else (True, False):
        calm = [r["said"] for r in rounds if r["calm"] and (fresh or (r["round"] == 0) == cold)]
        if not calm:
            continue
        for what, name in (("free_bytes", "free"), ("budget_bytes", "budget")):
            apart = [max(s[what] for s in each) - min(s[what] for s in each) for each in calm]
            print(
                f"  spread of {name} over ranks, {'cold' if cold else 'warm'}:"
                f" {statistics.median(apart) / 2**20:.1f} MiB (median),"
                f" {max(apart) / 2**20:.1f} MiB (widest), of"
                f" {statistics.median(s[what] for each in calm for s in each) / GIB:.2f} GiB"
            )
    sys.stdout.flush()


def about(args: argparse.Namespace) -> str:
    import torch

    card = "no GPU, shares are counted" if args.cpu else torch.cuda.get_device_name()
    return (
        f"{card}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}: {args.ranks} ranks, each"
        f" capped to {args.share:.0%}, blocks of {BLOCK_BYTES // 2**20} MiB; rank {FATED} holds"
        f" {args.hold_gib} GiB; gloo's timeout {args.gloo_timeout_s:g} s"
    )


def main(args: argparse.Namespace) -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    table = Table()
    print(about(args), flush=True)
    if args.runs_only == "no":
        by_collectives(args, table)
    with coordinator(args.server_python) as url:
        if args.runs_only == "no":
            by_kvaccord(args, table, url)
        for fresh in (False, True):
            endurance(args, table, url, fresh)
    if args.out:
        Path(args.out).write_text(json.dumps(table.figures, indent=1))
    for fault in table.faults:
        print(f"does not hold: {fault}", file=sys.stderr)
    print(f"{len(table.faults)} claims do not hold")
    return 1 if table.faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="count shares, take no memory")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.23)
    parser.add_argument("--hold-gib", type=int, default=6)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--gloo-timeout-s", type=float, default=30.0)
    parser.add_argument("--server-python", default=sys.executable)
    parser.add_argument("--runs-only", choices=("yes", "no"), default="no")
    parser.add_argument("--out", help="a JSON file for all that was said")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is None:
        sys.exit(main(asked))
    OneRank(asked).serve()
