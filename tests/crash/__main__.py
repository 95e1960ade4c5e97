"""The long ones: python -m tests.crash --engines 200 --kills 100 [--seed N]."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.crash.storm import Storm, told, weather


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.crash", description=__doc__)
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pace-s", type=float, default=2.0)
    parser.add_argument("--life-s", type=float, default=8.0, help="the longest of a coordinator")
    parser.add_argument("--pauses-s", type=float, default=5.0, help="SIGSTOP before every 5th kill")
    parser.add_argument("--keep-rounds", type=int, default=5)
    args = parser.parse_args()
    storm = Storm(
        engines=args.engines,
        kills=args.kills,
        seed=args.seed,
        ranks=args.ranks,
        pace_s=args.pace_s,
        lives_s=(0.1, args.life_s),
        pauses_s=args.pauses_s,
        keep_rounds=args.keep_rounds,
    )
    folder = Path(tempfile.mkdtemp(prefix="kvaccord-crash-"))
    print(f"store, log and, where something is wrong, history.json: {folder}", flush=True)
    print(told(storm, weather(storm, folder)))


if __name__ == "__main__":
    main()
