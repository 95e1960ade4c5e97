"""One rank of a rehearsal: a process that imports of kvaccord only what an engine would.

Writes lines of JSON to standard output: {"now": "claimed"} when its slot is taken, {"at_s", "did"}
when it meets its fate, and its result last.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cli.exits import FAILED, NO_VERDICT, PASSED, USAGE
from kvaccord import Layout, Report
from kvaccord.errors import KvaccordError, NoVerdict, RoundEnded
from worker_client import Rendezvous

DID = ("raise", "kill", "stuck", "restart")


def main() -> int:
    args = _arguments()
    start = json.loads(args.start.read_text())
    if args.wait_for_go:
        sys.stdin.readline()
    time.sleep(args.join_after_s)
    try:
        with Rendezvous.join(
            url=args.url,
            namespace=args.namespace,
            engine=args.engine,
            launch=args.launch,
            ranks=[args.rank],
            layout=Layout(**start["layout"]),
        ) as rdzv:
            _say(now="claimed")
            time.sleep(args.report_after_s)
            _meet_its_fate(args, "report")
            agreed = rdzv.report(report_of(start, args.rank))
            _meet_its_fate(args, "apply")
            rdzv.applied(built=agreed.entries)
            return _result(
                "SEALED",
                PASSED,
                agreed.decision.sentence,
                digest=agreed.decision.digest,
                code="sealed",
                ranks=[],
                entries=agreed.entries,
            )
    except RoundEnded as ended:
        last = ended.outcome or ended.decision
        return _result(
            last.result,
            FAILED,
            str(ended),
            digest=ended.decision.digest,
            code=last.code,
            ranks=last.ranks,
        )
    except NoVerdict as silence:
        return _result("NO VERDICT", NO_VERDICT, str(silence))
    except (KvaccordError, ValidationError, Simulated) as fault:
        return _result("raised", USAGE, f"{type(fault).__name__}: {fault}")


def report_of(start: dict[str, Any], rank: int) -> Report:
    """What this rank reports in a start: its own fields, and those that hold for every rank."""
    shared = {key: start[key] for key in Report.model_fields if key in start}
    return Report.model_validate(shared | start["ranks"][rank])


class Simulated(RuntimeError):
    """Stands for what an engine raises while it loads, profiles or builds."""


def _meet_its_fate(args: argparse.Namespace, step: str) -> None:
    if args.fate not in DID or args.at != step:
        return
    _say(did=args.fate)
    if args.fate == "raise":
        what = "profiling" if step == "report" else "building the pools"
        raise Simulated(f"out of memory while {what} (this rank was told to raise)")
    if args.fate == "stuck":
        time.sleep(10**7)  # present, and no step further
    os.kill(os.getpid(), signal.SIGKILL)


def _result(heard: str, exit_code: int, text: str, **more: Any) -> int:
    _say(heard=heard, text=text, **{"digest": None, **more})
    return exit_code


def _say(**fields: Any) -> None:
    # CLOCK_MONOTONIC is one clock for all processes of a machine.
    print(json.dumps({"at_s": time.monotonic(), **fields}), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cli.rank")
    for name in ("url", "namespace", "engine", "launch"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--report-after-s", type=float, default=0.0)
    parser.add_argument("--join-after-s", type=float, default=0.0)
    parser.add_argument("--wait-for-go", action="store_true", help="a line of standard input")
    parser.add_argument("--fate", default="start")
    parser.add_argument("--at", choices=("report", "apply"), default="report")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
