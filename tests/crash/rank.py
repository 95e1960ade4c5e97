"""One rank as an engine would run it, told on standard input when to go on.

Prints a line of JSON after each step: {"now": "claimed" | "reported" | "sealed" | "ended", …}.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

from kvaccord import Layout, Report, page
from kvaccord.errors import KvaccordError, RoundEnded
from worker_client import Rendezvous


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("url", "engine", "launch"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("rank", "tp"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--patience-s", type=float, default=60)
    parser.add_argument("--child", choices=("fork", "exec"))
    args = parser.parse_args()
    report = Report(
        free_bytes=100_000, kv_budget_bytes=(90 - args.rank) * 1000, classes=[page("kv", 1000)]
    )
    try:
        with Rendezvous.join(
            url=args.url,
            engine=args.engine,
            launch=args.launch,
            ranks=[args.rank],
            layout=Layout(tp=args.tp),
            patience_s=args.patience_s,
        ) as rdzv:
            say("claimed", child=a_child(args.child))
            sys.stdin.readline()
            agreed = rdzv.report(report)
            say("reported", digest=agreed.decision.digest, entries=dict(agreed.entries))
            sys.stdin.readline()
            rdzv.applied(built=agreed.entries)
            say("sealed")
            sys.stdin.readline()
    except RoundEnded as ended:
        last = ended.outcome or ended.decision
        digest = ended.decision.digest
        say("ended", error=type(ended).__name__, code=last.code, ranks=last.ranks, digest=digest)
    except KvaccordError as error:
        say("ended", error=type(error).__name__, text=str(error))


def a_child(how: str | None) -> int | None:
    """A process that outlives this one and may hold what this one had open."""
    if how == "exec":
        return subprocess.Popen(["sleep", "30"], close_fds=False).pid
    if how == "fork":
        if child := os.fork():
            return child
        os.close(1)
        time.sleep(30)
        os._exit(0)
    return None


def say(now: str, **more: Any) -> None:
    print(json.dumps({"now": now, **more}), flush=True)


if __name__ == "__main__":
    main()
