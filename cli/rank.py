"""One rank of a rehearsal: a process that imports of kvaccord only what an engine would.

Writes lines of JSON to standard output: {"at_s", "did"} when it acts, and its result last.
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

from kvaccord import Layout, Report
from kvaccord.decision import Frozen
from kvaccord.errors import KvaccordError, NoVerdict, RoundEnded
from worker_client import Rendezvous

PASSED, FAILED, OTHER, NO_VERDICT = 0, 2, 1, 3


def main() -> int:
    args = _arguments()
    start = json.loads(args.start.read_text())
    try:
        with Rendezvous.join(
            url=args.url,
            namespace=args.namespace,
            engine=args.engine,
            launch=args.launch,
            ranks=[args.rank],
            layout=Layout(**start["layout"]),
        ) as rdzv:
            time.sleep(args.report_after_s)
            _meet_its_fate(args.fate)
            agreed = rdzv.report(report_of(start, args.rank))
            rdzv.applied(built=agreed.entries)
            return _result("SEALED", PASSED, agreed.decision, agreed.decision.sentence)
    except RoundEnded as ended:
        heard = ended.outcome or ended.decision
        return _result(heard.result, FAILED, ended.decision, str(ended))
    except NoVerdict as silence:
        return _result("NO VERDICT", NO_VERDICT, None, str(silence))
    except (KvaccordError, Simulated) as fault:
        return _result("raised", OTHER, None, f"{type(fault).__name__}: {fault}")


def report_of(start: dict[str, Any], rank: int) -> Report:
    """What this rank reported in a recorded start."""
    shared = {key: start[key] for key in ("total_bytes", "max_num_seqs", "classes") if key in start}
    return Report.model_validate(shared | start["ranks"][rank])


class Simulated(RuntimeError):
    """Stands for what an engine raises while it loads or profiles."""


def _meet_its_fate(fate: str) -> None:
    if fate == "raise":
        _say(did="raise")
        raise Simulated("out of memory while profiling (this rank was told to raise)")
    if fate == "kill":
        _say(did="kill")
        os.kill(os.getpid(), signal.SIGKILL)


def _result(heard: str, code: int, decision: Frozen | None, text: str) -> int:
    _say(heard=heard, text=text, digest=decision.digest if decision else None)
    return code


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
    parser.add_argument("--fate", choices=("start", "raise", "kill"), default="start")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
