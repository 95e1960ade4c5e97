"""A worker of vLLM that gets into trouble at a place that TROUBLE names, and says what it holds.

vLLM loads it by `worker_cls`. TROUBLE is RANK:METHOD:WHAT; WHAT is raise, kill, or a number of
bytes, which determine_available_memory then returns.
"""

import os
import signal
import sys
import threading

import psutil
from vllm.v1.worker.cpu_worker import CPUWorker


def meet(worker: CPUWorker, method: str) -> str:
    """WHAT, if this is the place and it is not an end of all."""
    rank, where, what = (os.environ.get("TROUBLE") or "-1::").split(":")
    if int(rank) != worker.rank or where != method:
        return ""
    if what == "raise":
        raise RuntimeError(f"trouble in {method} of rank {rank}")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return what


class Troubled(CPUWorker):
    def load_model(self, **kwargs):
        super().load_model(**kwargs)
        meet(self, "load_model")

    def determine_available_memory(self):
        own = super().determine_available_memory()
        return int(meet(self, "determine_available_memory") or own)

    def initialize_from_config(self, kv_cache_config):
        super().initialize_from_config(kv_cache_config)
        meet(self, "initialize_from_config")

    def compile_or_warm_up_model(self):
        done = super().compile_or_warm_up_model()
        meet(self, "compile_or_warm_up_model")
        return done

    def execute_model(self, scheduler_output):
        if not hasattr(self, "told"):
            self.told = True
            self.tell()
        return super().execute_model(scheduler_output)

    def tell(self):
        """What of kvaccord is in this process while it serves."""
        ours = [
            name for name in sys.modules if name.partition(".")[0] in ("kvaccord", "worker_client")
        ]
        threads = [t.name for t in threading.enumerate() if t.name.startswith("kvaccord")]
        port = int(os.environ.get("COORDINATOR_PORT") or 0)
        held = [c for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == port]
        text = f"SERVES {self.rank} modules={len(ours)} threads={threads} sockets={len(held)}"
        os.write(2, f"{text} blocks={self.cache_config.num_gpu_blocks}\n".encode())
