"""Measure one rank's device with torch, and turn it into a report. CUDA and ROCm alike.

    before = cuda_reading()      # before the weights: what others hold then is not ours
    load_weights(), profile()
    report = cuda_report(classes=[page("kv", 1_399_040)], initial=before)

The runtime's numbers are the ones that are reported; nvml.py is a second opinion beside them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvaccord.errors import Invalid
from kvaccord.messages import CacheClass, Device, Report
from worker_client.nvml import NoOpinion, Opinion, opinion

log = logging.getLogger(__name__)
PPM = 1_000_000
MEMINFO = Path("/proc/meminfo")

# Two looks at the free memory that agree, or the least of LOOKS; the pause doubles each time.
LOOKS, PAUSE_S = 5, 0.01
SETTLED_WITHIN = Fraction(1, 1000)  # of total
DIFFERS_OVER = Fraction(1, 100)  # of total: from here on two sources contradict each other
# A variable that hides devices, by the platform that reads it.
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def kv_budget(
    *,
    total_bytes: int,
    free_bytes: int,
    reserved_bytes: int,
    peak_torch_bytes: int,
    utilization_ppm: int,
    graph_bytes: int = 0,
    safety_bytes: int = 0,
) -> tuple[int, int]:
    """(KV budget, non-torch memory) in bytes. The budget is signed: nothing hides a shortage.

    The share of the device this process may use, less what it has been seen to need beside KV:
    torch's own peak, what lies outside torch's allocator (communicators, contexts, neighbours),
    the graphs still to be captured, and a margin.
    On an H200 (139.8 GiB) at 900000 ppm with a peak of 70 GiB, 6 GiB outside torch and 2 GiB of
    graphs: 125.8 - 70 - 6 - 2 = 47.8 GiB.
    Source: ATOM model_runner.py get_num_blocks.
    """
    non_torch_bytes = max(0, total_bytes - free_bytes - reserved_bytes)
    share_bytes = total_bytes * utilization_ppm // PPM
    budget_bytes = share_bytes - peak_torch_bytes - non_torch_bytes - graph_bytes - safety_bytes
    return budget_bytes, non_torch_bytes


@dataclass(frozen=True)
class Reading:
    """One look at a device, in bytes.

    free_bytes: what this process could still take. free_source: who said so, `cuda` or, where the
    device's memory is the machine's, `MemAvailable`.
    reserved_bytes: held by torch's allocator. peak_bytes: the most that was allocated in it.
    second: NVML's opinion; None where there is none, and then no_second says why.
    """

    free_bytes: int
    total_bytes: int
    free_source: str = "cuda"
    reserved_bytes: int = 0
    peak_bytes: int = 0
    second: Opinion | None = None
    no_second: str = ""

    @property
    def own_bytes(self) -> int | None:
        """What this process holds on the device, torch's or not; None where nobody tells."""
        return None if self.second is None else self.second.held_by(os.getpid())

    @property
    def parts(self) -> dict[str, int | bool | str]:
        """What the total is made of, and who says so: shown beside a report, used by nobody.

        free + torch + context + others + driver + unexplained = total, where NVML tells them.
        """
        said: dict[str, int | bool | str] = {
            "free_source": self.free_source,
            "torch_bytes": self.reserved_bytes,
        }
        second, own = self.second, self.own_bytes
        if second is None:
            return said | {"nvml": self.no_second}
        others = second.others(os.getpid())
        if others:
            said["others"] = ", ".join(map(str, others))[:1024]
            said["others_bytes"] = sum(h.bytes or 0 for h in others)
        if second.mig:
            said["mig"] = True
        if second.page_cache_bytes:
            said["page_cache_bytes"] = second.page_cache_bytes
        free = second.free_bytes
        if free is not None and abs(free - self.free_bytes) > self.total_bytes * DIFFERS_OVER:
            said["nvml_free_bytes"] = free
        if own is not None and second.total_bytes is not None:
            # What CUDA's total leaves out of NVML's is the driver's own already.
            driver = max(0, second.driver_bytes - max(0, second.total_bytes - self.total_bytes))
            held = self.free_bytes + own + driver + sum(h.bytes or 0 for h in others)
            said["context_bytes"] = own - self.reserved_bytes
            said["driver_bytes"] = driver
            said["unexplained_bytes"] = self.total_bytes - held
        return said


def settled(
    look: Callable[[], Reading], pause: Callable[[float], None] = time.sleep
) -> tuple[Reading, int]:
    """A reading that another one agrees with, and how far free memory moved until then, bytes.

    A co-tenant that loads or ends meanwhile is no reason to fail: where LOOKS readings do not
    settle, the one with the least free memory counts. Positive: memory was released.
    """
    readings = [look()]
    for pause_s in (PAUSE_S * 2**n for n in range(LOOKS - 1)):
        pause(pause_s)
        readings.append(look())
        before, last = readings[-2:]
        if abs(last.free_bytes - before.free_bytes) <= last.total_bytes * SETTLED_WITHIN:
            break
    else:
        last = min(readings, key=lambda reading: reading.free_bytes)
    # What this process itself took or gave back between the looks moved nothing of others'.
    return last, _moved(readings[0], readings[-1])


def _moved(before: Reading, after: Reading) -> int:
    """Change of free memory that was not this process's doing."""
    own = [r.reserved_bytes if r.own_bytes is None else r.own_bytes for r in (before, after)]
    return after.free_bytes - before.free_bytes + own[1] - own[0]


# --- the device ---------------------------------------------------------------------------------


def cuda_reading(device: Any = None) -> Reading:
    """Look at the device once. device: as torch takes it, the current one by default.

    Taken before the weights are loaded it tells what others held when this process began.
    Raises Invalid where torch has no device, or reads the parent of the MIG slice that it runs on.
    """
    torch = _torch()
    return _with_second(torch, device, _look(torch, device))


def cuda_device(device: Any = None) -> Device:
    """Who the device is, for join(device=…): uuid, name, total bytes."""
    torch = _torch()
    found = _with_second(torch, device, _look(torch, device))
    properties = torch.cuda.get_device_properties(device)
    uuid = found.second.uuid if found.second else str(getattr(properties, "uuid", "")) or None
    return Device(uuid=uuid, name=properties.name, total_bytes=found.total_bytes)


def _torch() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise Invalid(
            f"torch {torch.__version__} sees no CUDA or ROCm device, so there is nothing to"
            f" measure{_hidden(os.environ)}; install a torch build for the device and check"
            " CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES), or build the Report yourself",
            field="free_bytes",
        )
    return torch


def _hidden(environ: Mapping[str, str]) -> str:
    hiding = [name for name in HIDING if visible(environ.get(name)) == ()]
    return "".join(f"; {name} is {environ[name]!r}, which hides every device" for name in hiding)


def visible(text: str | None) -> tuple[str, ...] | None:
    """The entries of a CUDA_VISIBLE_DEVICES; None where it is not set and hides nothing.

    What stands behind an empty entry or -1 is hidden, as CUDA does it: () is no device at all.
    Source: CUDA C++ Programming Guide, CUDA Environment Variables.
    """
    if text is None:
        return None
    entries = [entry.strip() for entry in text.split(",")]
    ends = [at for at, entry in enumerate(entries) if entry in ("", "-1")]
    return tuple(entries[: min(ends, default=len(entries))])


def _look(torch: Any, device: Any) -> Reading:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    reading = Reading(
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        reserved_bytes=torch.cuda.memory_reserved(device),
        peak_bytes=max(
            stats.get("allocated_bytes.all.peak", 0), stats.get("allocated_bytes.all.current", 0)
        ),
    )
    # On GB10 and Jetson the memory is the machine's, and the runtime takes cached files for used:
    # the kernel gives them back when the device asks. Source: vLLM utils/mem_utils.py,
    # MemorySnapshot.measure; llama.cpp ggml-cuda.cu, ggml_backend_cuda_get_available_uma_memory.
    if getattr(torch.cuda.get_device_properties(device), "is_integrated", False):
        available = mem_available_bytes()
        if available > free_bytes:
            return replace(
                reading,
                free_bytes=min(available, total_bytes),
                free_source="MemAvailable",
            )
    return reading


def mem_available_bytes(meminfo: Path = MEMINFO) -> int:
    """What the kernel could give without swapping, cached files included; 0 where it is unknown."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return 0
    return next((int(s.split()[1]) * 1024 for s in lines if s.startswith("MemAvailable:")), 0)


def _with_second(torch: Any, device: Any, reading: Reading) -> Reading:
    if getattr(torch.version, "hip", None):
        return replace(reading, no_second="none on ROCm")
    at = torch.cuda.current_device() if device is None else torch.device(device).index or 0
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    entries = visible(os.environ.get("CUDA_VISIBLE_DEVICES")) or ()
    try:
        second = opinion(uuid, reading.total_bytes, entries[at] if at < len(entries) else "")
    except NoOpinion as fault:
        return replace(reading, no_second=str(fault))
    slice_bytes = second.total_bytes
    if second.mig and slice_bytes and reading.total_bytes > slice_bytes * (1 + DIFFERS_OVER * 10):
        raise Invalid(
            f"this process runs on the MIG slice {second.uuid} of {slice_bytes} bytes, and torch"
            f" says {reading.total_bytes}: that is the slice's parent; name the slice by its uuid"
            " in CUDA_VISIBLE_DEVICES, and see that nothing stands between torch and the driver",
            field="total_bytes",
            value=str(reading.total_bytes),
        )
    return replace(reading, second=second)


# --- the report ---------------------------------------------------------------------------------


def cuda_report(
    *,
    classes: Sequence[CacheClass],
    max_num_seqs: int = 0,
    utilization: float = 0.9,
    graph_bytes: int = 0,
    safety_bytes: int = 0,
    reserve_bytes: int = 0,
    device: Any = None,
    initial: Reading | None = None,
    local_count: int | None = None,
    **more: Any,
) -> Report:
    """What this rank has for KV: call it with the weights loaded and after a profiling pass.

    utilization: the share of the device that this process may use, KV and all else together.
    device: as torch takes it, the current one by default. initial: cuda_reading() from before the
    weights. local_count: processes of this engine that share the device, each with a share of its
    own; then only what this process holds is charged to it, which NVML must tell.
    more: other fields of a Report.
    Raises Invalid where there is no device, a share is none, or NVML is needed and says nothing.
    Source: torch.cuda.mem_get_info() -> (free, total), bytes; memory_stats() peak, bytes.
    """
    torch = _torch()
    if not 0 < utilization <= 1:
        raise Invalid(
            f"utilization {utilization} must be above 0 and at most 1",
            field="utilization",
            value=str(utilization),
        )
    torch.cuda.synchronize(device)
    # What the allocator only caches goes back, so that free and reserved tell the same story.
    torch.cuda.empty_cache()
    found, moved_bytes = settled(lambda: _look(torch, device))
    found = _with_second(torch, device, found)
    alone = (local_count or 1) == 1  # beside siblings that load, much moves that is expected
    if alone and initial and initial.own_bytes is not None and found.own_bytes is not None:
        moved_bytes = _moved(initial, found)
    utilization_ppm = round(utilization * PPM)
    budget_bytes, non_torch_bytes = kv_budget(
        total_bytes=found.total_bytes,
        free_bytes=_uncharged_bytes(found, local_count),
        reserved_bytes=found.reserved_bytes,
        peak_torch_bytes=found.peak_bytes,
        utilization_ppm=utilization_ppm,
        graph_bytes=graph_bytes,
        safety_bytes=safety_bytes,
    )
    parts = {
        "utilization_ppm": utilization_ppm,
        "utilization_of": "total",
        "peak_torch_bytes": found.peak_bytes,
        "non_torch_bytes": non_torch_bytes,
        "graph_bytes": graph_bytes,
        "safety_bytes": safety_bytes,
        "free_moved_bytes": moved_bytes,
    }
    _warn(found, moved_bytes)
    return Report(
        free_bytes=found.free_bytes,
        total_bytes=found.total_bytes,
        initial_free_bytes=None if initial is None else initial.free_bytes,
        kv_budget_bytes=budget_bytes,
        reserve_bytes=reserve_bytes,
        max_num_seqs=max_num_seqs,
        local_count=local_count,
        classes=tuple(classes),
        parts=parts | found.parts,
        **more,
    )


def _uncharged_bytes(found: Reading, local_count: int | None) -> int:
    """What is free, or at least nothing that this process must answer for."""
    if (local_count or 1) > 1:
        if found.own_bytes is None:
            raise Invalid(
                f"{local_count} processes of this engine share a device, and nobody says what this"
                f" one holds ({found.no_second or 'NVML does not list its pid'}); install"
                " kvaccord[nvml] where processes see their own pids, or build the Report yourself",
                field="local_count",
                value=str(local_count),
            )
        return found.total_bytes - max(found.own_bytes, found.reserved_bytes)
    page_cache = found.second.page_cache_bytes if found.second else 0
    return found.free_bytes + page_cache


def _warn(found: Reading, moved_bytes: int) -> None:
    if abs(moved_bytes) > found.total_bytes * DIFFERS_OVER:
        log.warning(
            "free memory moved by %d bytes while it was measured, by others: %s",
            moved_bytes,
            found.parts.get("others", "nobody says who"),
        )
    if (free := found.parts.get("nvml_free_bytes")) is not None:
        log.warning("CUDA says %d bytes free and NVML %s", found.free_bytes, free)
