"""All sessions of many engines are cut at once, and nobody gets through for some seconds.

    python benchmarks/cut.py --engines 200 --cut-s 5 --kill-one

With --kill-one, one rank of one more engine is a real process that is killed inside the cut. Prints
how the rounds ended: the network is in doubt, so nobody is lost but that rank.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any

from ranks import (
    Rank,
    Server,
    engines_of,
    enter_all,
    finish_all,
    raise_descriptor_limit,
    show,
)

VICTIM = """
import sys, time
from kvaccord import Layout
from worker_client import Rendezvous
with Rendezvous.join(
    url=sys.argv[1], engine="victim", ranks=[1], layout=Layout(tp=2), launch="benchmark"
):
    print("there", flush=True)
    time.sleep(600)
"""


class Relay:
    """Carries bytes to the coordinator, until it is cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._cut = False
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> int:
        """End every connection on both sides; end those that come until mended."""
        self._cut = True
        ended = len(self._writers) // 2
        for writer in list(self._writers):
            writer.transport.abort()
        return ended

    def mend(self) -> None:
        self._cut = False

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            self._writers -= ends

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


def a_process(url: str) -> subprocess.Popen[str]:
    """A rank on the real client. Returns once it has its session."""
    command = [sys.executable, "-c", VICTIM, url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


async def play(args: argparse.Namespace, server: Server) -> None:
    relay = Relay(server.port)
    await relay.start()
    told: Counter[str] = Counter()
    engines = engines_of(relay.port, args.engines, args.ranks, told)
    await enter_all(engines)
    rows: dict[str, Any] = {}
    victim: subprocess.Popen[str] | None = None
    if args.kill_one:
        peer = Rank(relay.port, "victim", 0, 2, "host-of-peer", told)
        await peer.enter()
        victim = await asyncio.to_thread(a_process, f"http://127.0.0.1:{relay.port}")
    cut_s = time.perf_counter()
    rows["connections cut"] = relay.cut()
    if victim is not None:
        await asyncio.sleep(args.cut_s / 2)
        victim.kill()
        await asyncio.sleep(args.cut_s / 2)
    else:
        await asyncio.sleep(args.cut_s)
    relay.mend()
    await asyncio.gather(*(rank.attached.wait() for ranks in engines for rank in ranks))
    rows["all attached again"] = f"{time.perf_counter() - cut_s - args.cut_s:.1f} s after the cut"
    if victim is not None:
        verdict = (await peer.decision())["verdict"]
        after_s = time.perf_counter() - cut_s
        rows["the killed rank's engine"] = (
            f"{verdict['outcome']} {verdict['code']} {verdict['ranks']}, {after_s:.1f} s after the"
            " cut began"
        )
        await peer.close()
        victim.communicate()
    else:
        await asyncio.sleep(args.wait_s)  # whoever was to be lost is lost by now
    ends = await finish_all(engines)
    rows["rounds of the others"] = ", ".join(f"{n} {end}" for end, n in ends.items())
    rows |= {name: str(n) for name, n in sorted(told.items())}
    relay.cut()
    await asyncio.sleep(0.2)  # its connections end before the loop does
    title = f"{args.engines} engines x {args.ranks} ranks, all cut for {args.cut_s:g} s"
    show(title + (", one process killed inside" if victim else ""), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cut-s", type=float, default=5.0)
    parser.add_argument("--wait-s", type=float, default=35.0, help="then, without --kill-one")
    parser.add_argument("--kill-one", action="store_true")
    args = parser.parse_args()
    raise_descriptor_limit()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(folder)
        try:
            asyncio.run(play(args, server))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
