"""All sessions of many engines are cut at once, and nobody gets through for some seconds.

    python benchmarks/cut.py --engines 200 --cut-s 5 --kill-one

With --kill-one, one rank of one more engine is a real process that is killed inside the cut. Prints
how the rounds ended: the network is in doubt, so nobody is lost but that rank.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time

from calls import Calls
from fleet import Engine, enter_all, finish_all
from server import Coordinator, raise_descriptor_limit, rows, serving

AT_ONCE = 50
VICTIM = """
import sys, time
from kvaccord import Layout
from worker_client import Rendezvous
with Rendezvous.join(
    url=sys.argv[1], engine="victim-0", ranks=[1], layout=Layout(tp=2), launch="load"
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


async def play(args: argparse.Namespace, coordinator: Coordinator) -> None:
    relay = Relay(coordinator.port)
    await relay.start()
    calls = Calls(relay.port, AT_ONCE)
    engines = [Engine(n, args.ranks, calls) for n in range(args.engines)]
    ranks = await enter_all(engines, AT_ONCE)
    values: dict[str, str] = {}
    victim: subprocess.Popen[str] | None = None
    if args.kill_one:
        peer = Engine(0, 2, calls, "victim").ranks[0]
        await peer.enter()
        victim = await asyncio.to_thread(a_process, f"http://127.0.0.1:{relay.port}")
    cut_s = time.monotonic()
    values["connections cut"] = str(relay.cut())
    if victim is not None:
        await asyncio.sleep(args.cut_s / 2)
        victim.kill()
        await asyncio.sleep(args.cut_s / 2)
    else:
        await asyncio.sleep(args.cut_s)
    relay.mend()
    await asyncio.gather(*(rank.attached.wait() for rank in ranks))
    values["all attached again"] = f"{time.monotonic() - cut_s - args.cut_s:.1f} s after the cut"
    if victim is not None:
        verdict = json.loads(await peer.hears("decision"))["verdict"]
        after_s = time.monotonic() - cut_s
        values["the killed rank's engine"] = (
            f"{verdict['outcome']} {verdict['code']} {verdict['ranks']}, {after_s:.1f} s after the"
            " cut began"
        )
        peer.close()
        victim.communicate()
    else:
        await asyncio.sleep(args.wait_s)  # whoever was to be lost is lost by now
    values["rounds of the others"] = await finish_all(engines)
    values |= {name: str(n) for name, n in sorted(calls.sessions.items())}
    values["refusals"] = str(calls.refusals.total())
    relay.cut()
    await asyncio.sleep(0.2)  # its connections end before the loop does
    title = f"{args.engines} engines x {args.ranks} ranks, all cut for {args.cut_s:g} s"
    for row in rows(title + (", one process killed inside" if victim else ""), values):
        print(row)


async def measure(args: argparse.Namespace) -> None:
    raise_descriptor_limit()
    with tempfile.TemporaryDirectory() as folder:
        async with serving(folder) as coordinator:
            await play(args, coordinator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cut-s", type=float, default=5.0)
    parser.add_argument("--wait-s", type=float, default=35.0, help="then, without --kill-one")
    parser.add_argument("--kill-one", action="store_true")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
