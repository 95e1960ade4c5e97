"""What kvaccord costs a start of the real vLLM: time inside our calls in each of two workers.

The wait for the slower worker is taken off: a call that ends for all when the last one has made its
own took each rank only what it took that one, at most.

    VLLM_PYTHON=.venv-vllm/bin/python .venv/bin/python benchmarks/vllm_start.py [STARTS]
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
HERE = ROOT / "tests/engines/vllm"
WAITING = ("report", "applied")  # calls that end when every rank has made them

from tests.engines.vllm.real import CONFIG  # noqa: E402
from worker_client.testing import Coordinator  # noqa: E402

Calls = dict[str, tuple[float, float]]


def started(url: str, model: str) -> list[Calls]:
    """Of each worker, the calls of one start: when each began and ended, in seconds."""
    done = subprocess.run(
        [os.environ["VLLM_PYTHON"], str(HERE / "start.py"), model],
        env=os.environ
        | {"PYTHONPATH": str(HERE), "KVACCORD_ENGINE": "tiny", "KVACCORD_URL": url}
        | {"VLLM_LOGGING_LEVEL": "DEBUG"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=1800,
    )
    said = [json.loads(line) for line in re.findall(r"kvaccord: (\{.*\})", done.stdout)]
    return [{name: (began, ended) for name, began, ended in each["calls"]} for each in said]


def own_s(calls: Calls, of_all: list[Calls]) -> dict[str, float]:
    """Seconds of each call that were not a wait for another rank."""
    spent = {}
    for name, (began, ended) in calls.items():
        last = max(each[name][0] for each in of_all) if name in WAITING else began
        spent[name] = ended - max(began, last)
    return spent


def main() -> None:
    starts = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    totals = []
    with tempfile.TemporaryDirectory() as model, Coordinator() as coordinator:
        Path(model, "config.json").write_text(json.dumps(CONFIG))
        for _ in range(starts):
            of_all = started(coordinator.direct_url, model)
            for rank, calls in enumerate(of_all):
                spent = own_s(calls, of_all)
                totals.append(sum(spent.values()))
                each = ", ".join(f"{name} {1000 * s:.1f}" for name, s in spent.items())
                print(f"worker {rank}: {1000 * totals[-1]:.1f} ms ({each})", flush=True)
    totals.sort()
    at = max(0, -(-len(totals) * 95 // 100) - 1)
    print(
        f"{len(totals)} workers: median {1000 * totals[len(totals) // 2]:.1f} ms,"
        f" p95 {1000 * totals[at]:.1f} ms, most {1000 * totals[-1]:.1f} ms"
    )


if __name__ == "__main__":
    main()
