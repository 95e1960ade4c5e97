"""One seed, told and judged; seed after seed: --night; or without each guard in turn: --guards."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from tests.simulation.checkers import check
from tests.simulation.guards import guards
from tests.simulation.history import History
from tests.simulation.night import night
from tests.simulation.removals import GUARDS
from tests.simulation.states import reached
from tests.simulation.timeline import judged, timeline
from tests.simulation.world import run

WITHIN_S = 9  # a seed that takes longer is a finding


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", nargs="?", help="any word: the same one gives the same world")
    parser.add_argument("--history", type=Path, metavar="FILE", help="write the history as JSON")
    parser.add_argument("--judge", type=Path, metavar="FILE", help="judge a history instead")
    parser.add_argument("--mode", choices=["calm", "safety", "liveness"])
    parser.add_argument("--quiet", action="store_true", help="the verdicts alone")
    parser.add_argument("--night", action="store_true", help="go on by seed until it is stopped")
    parser.add_argument("--minutes", type=float, metavar="N", help="or for so long")
    parser.add_argument("--cores", type=int, metavar="N", help="on so many; all if not said")
    parser.add_argument("--from", type=int, default=1_000_000, dest="first", metavar="SEED")
    parser.add_argument(
        "--guards", nargs="*", choices=GUARDS, metavar="NAME", help="remove these guards, or all"
    )
    said = parser.parse_args()
    if said.guards is not None:
        return guards(said.guards)
    if said.night:
        return night(minutes=said.minutes, first=said.first, cores=said.cores)
    if said.judge is not None:
        history = History.read(said.judge)
    elif said.seed is not None:
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(WITHIN_S)
        history = run(said.seed, said.mode)
        signal.alarm(0)
    else:
        parser.error("a seed, --judge, --night or --guards")
    verdicts = check(history)
    if not said.quiet:
        for line in timeline(history):
            print(line)
    for line in judged(verdicts):
        print(line)
    print(f"reached: {', '.join(sorted(reached(history)))}")
    if said.history is not None:
        said.history.write_bytes(history.to_bytes())
    return 1 if any(v.holds is False for v in verdicts) else 0


def _too_long(_signal: int, _frame: FrameType | None) -> None:
    print(f"the world did not end within {WITHIN_S} s", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
