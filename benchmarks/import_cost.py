"""What importing worker_client costs an engine's process beside what it has already.

Starts python afresh for every sample, taking turns, so that a busy moment hits both alike.

    .venv/bin/python benchmarks/import_cost.py [SAMPLES]
"""

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
GIVEN = "import httpx, pydantic"
OURS = "from worker_client import Rendezvous"


def elapsed_s(code: str) -> float:
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    return time.perf_counter() - start_s


def main() -> None:
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    took_s: dict[str, list[float]] = {GIVEN: [], OURS: []}
    for code in took_s:
        elapsed_s(code)  # compiles and fills the page cache
    for _ in range(samples):
        for code, spent_s in took_s.items():
            spent_s.append(elapsed_s(code))
    given_ms, ours_ms = (median(spent_s) * 1000 for spent_s in took_s.values())
    print(f"medians of {samples}, a whole process each")
    print(f"{GIVEN:>24} {OURS:>24} {'difference':>12}")
    print(f"{given_ms:>21.1f} ms {ours_ms:>21.1f} ms {ours_ms - given_ms:>9.1f} ms")


if __name__ == "__main__":
    main()
