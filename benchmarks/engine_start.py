"""What kvaccord costs a start of the reference engine: time inside our calls, on each rank.

    .venv/bin/python benchmarks/engine_start.py --starts 20 --ranks 2 --device cpu
    ENGINE_PYTHON=python3 …     # another Python, one with torch, for the engine's processes

Counted is each call of join, measure, phase, report and applied, once kvaccord is imported. The
wait for other ranks is taken off: a call that ends for all when the last rank has made its own took
each only what it took from then on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
ENGINE = ROOT / "examples/engine/engine.py"
WAITING = ("report", "applied")  # calls that end when every rank has made them

from worker_client.testing import Coordinator  # noqa: E402

Calls = list[tuple[str, float, float]]


def started(url: str, number: int, args: argparse.Namespace) -> list[Calls]:
    """The calls of each rank of one start: name, and when it began and ended, in seconds."""
    python = os.environ.get("ENGINE_PYTHON", sys.executable)
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)]
    options = ["--device", args.device, "--share", str(0.8 / args.ranks), "--prompts", "1"]
    done = subprocess.run(
        [*torchrun, "--standalone", str(ENGINE), *options, "--new-tokens", "2"],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        | {"KVACCORD_URL": url, "KVACCORD_ENGINE": "reference", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    calls = [each["calls"] for each in said if "calls" in each]
    if len(calls) != args.ranks:
        raise RuntimeError(f"start {number} ended with {done.returncode}: {done.stderr[-3000:]}")
    return calls


def own_s(calls: Calls, of_all: list[Calls]) -> dict[str, float]:
    """Seconds of each call that were not a wait for another rank."""
    spent: dict[str, float] = defaultdict(float)
    for name, began, ended in calls:
        last = began
        if name in WAITING:
            last = max(b for each in of_all for n, b, _ in each if n == name)
        spent[name] += ended - max(began, last)
    return spent


def percentile(values: list[float], share: float) -> float:
    """The least value that so many per cent of all are not above."""
    return sorted(values)[max(0, -(-len(values) * int(100 * share) // 100) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    by_call: dict[str, list[float]] = defaultdict(list)
    with Coordinator() as coordinator:
        for number in range(args.starts):
            of_all = started(coordinator.direct_url, number, args)
            for calls in of_all:
                spent = own_s(calls, of_all)
                for name, seconds in (spent | {"all": sum(spent.values())}).items():
                    by_call[name].append(seconds)
    print(f"{args.starts} starts of {args.ranks} ranks on {args.device}, milliseconds")
    for name, values in by_call.items():
        print(
            f"  {name:<15} median {1000 * percentile(values, 0.5):7.1f}"
            f"  p95 {1000 * percentile(values, 0.95):7.1f}  most {1000 * max(values):7.1f}"
        )


if __name__ == "__main__":
    main()
