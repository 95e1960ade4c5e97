"""A second opinion on a device, by NVML: who else holds memory on it, and is it the same device.

CUDA's own numbers are the ones that are reported. NVML sees every device of the machine whatever
CUDA_VISIBLE_DEVICES says, and of a MIG slice it may show the parent, so what it says counts only
when it speaks of what CUDA speaks of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# CUDA's total leaves out what the driver keeps, below 1 % of an H200 and more on small cards.
SAME_WITHIN = 0.1
NODES = Path("/sys/devices/system/node")


class NoOpinion(Exception):
    """NVML says nothing that could be used; the text says why."""


@dataclass(frozen=True)
class Holder:
    """A process with memory on the device. bytes: None where the driver does not tell."""

    pid: int
    bytes: int | None

    def __str__(self) -> str:
        return f"pid {self.pid} {'unknown' if self.bytes is None else self.bytes}"


@dataclass(frozen=True)
class Opinion:
    """What NVML says of one device or MIG slice, in bytes; None where it does not know.

    page_cache_bytes: files that the kernel caches in the device's own memory, where that is a NUMA
    node (Grace Hopper); 0 elsewhere.
    """

    uuid: str
    mig: bool
    total_bytes: int | None
    free_bytes: int | None
    driver_bytes: int
    holders: tuple[Holder, ...]
    page_cache_bytes: int = 0

    def held_by(self, pid: int) -> int | None:
        return next((h.bytes for h in self.holders if h.pid == pid), None)

    def others(self, pid: int) -> tuple[Holder, ...]:
        """All but this process, those that hold most first."""
        return tuple(
            sorted(
                (h for h in self.holders if h.pid != pid), key=lambda h: (-(h.bytes or 0), h.pid)
            )
        )


def opinion(uuid: str, total_bytes: int, entry: str = "") -> Opinion:
    """What NVML says of the device that CUDA calls `uuid` and gives `total_bytes`.

    uuid: as torch says it, without GPU- or MIG-; may be empty. entry: the device's own entry of
    CUDA_VISIBLE_DEVICES, which names a MIG slice where the uuid may be its parent's.
    Raises NoOpinion.
    """
    with _library() as nvml:
        handle = _handle(nvml, uuid, entry)
        seen = _seen(nvml, handle)
        if not seen.mig and _has_slices(nvml, handle):
            slices = [_seen(nvml, each) for each in _slices(nvml, handle)]
            alike = [each for each in slices if _same(each.total_bytes, total_bytes)]
            if len(alike) != 1:
                raise NoOpinion(
                    f"{seen.uuid} is the parent of {len(slices)} MIG slices, and {len(alike)} of"
                    f" them have the {total_bytes} bytes that CUDA says"
                )
            return alike[0]
        if not seen.mig and not _same(seen.total_bytes, total_bytes):
            raise NoOpinion(
                f"it says {seen.total_bytes} bytes of {seen.uuid} and CUDA {total_bytes}: most"
                " likely not the same device"
            )
        return seen


def _same(said: int | None, total_bytes: int) -> bool:
    return said is None or abs(said - total_bytes) <= SAME_WITHIN * max(said, total_bytes)


@contextmanager
def _library() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError:
        raise NoOpinion("nvidia-ml-py is not installed: kvaccord[nvml]") from None
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as fault:
        raise NoOpinion(f"NVML: {fault}") from None


def _handle(nvml: Any, uuid: str, entry: str) -> Any:
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    names = [entry] if entry.startswith("MIG-") else []
    names += [f"GPU-{bare}", f"MIG-{bare}"] if bare else []
    for name in names:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError:
            continue
    raise NoOpinion(f"it knows none of {', '.join(names) or 'no uuid'}")


def _seen(nvml: Any, handle: Any) -> Opinion:
    total, free, driver = None, None, 0
    try:  # a device whose memory is the machine's has none of its own to tell of (GB10, Jetson)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        total, free, driver = memory.total, memory.free, memory.reserved
    except nvml.NVMLError:
        pass
    return Opinion(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        mig=bool(_told(nvml, nvml.nvmlDeviceIsMigDeviceHandle, handle)),
        total_bytes=total,
        free_bytes=free,
        driver_bytes=driver,
        holders=_holders(nvml, handle),
        page_cache_bytes=page_cache_bytes(_told(nvml, nvml.nvmlDeviceGetNumaNodeId, handle)),
    )


def _holders(nvml: Any, handle: Any) -> tuple[Holder, ...]:
    found: dict[int, int | None] = {}
    for ask in (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        for process in _told(nvml, ask, handle) or ():
            found[process.pid] = process.usedGpuMemory or found.get(process.pid)
    return tuple(Holder(pid, found[pid]) for pid in sorted(found))


def _has_slices(nvml: Any, handle: Any) -> bool:
    current = _told(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return bool(current) and current[0] == nvml.NVML_DEVICE_MIG_ENABLE


def _slices(nvml: Any, handle: Any) -> Iterator[Any]:
    for at in range(_told(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, at)
        except nvml.NVMLError:  # slices are numbered with gaps
            continue


def _told(nvml: Any, ask: Any, handle: Any) -> Any:
    """What NVML answers, None where this device or driver has no answer to it."""
    try:
        return ask(handle)
    except nvml.NVMLError:
        return None


def _text(said: str | bytes) -> str:
    return said.decode() if isinstance(said, bytes) else said


def page_cache_bytes(node: int | None, nodes: Path = NODES) -> int:
    """Bytes of files that the kernel caches in a NUMA node and could give back."""
    try:
        lines = (nodes / f"node{node}" / "meminfo").read_text().splitlines()
    except OSError:
        return 0
    # Node 0 FilePages:       1234 kB
    kilobytes = {line.split()[2].rstrip(":"): int(line.split()[3]) for line in lines if line}
    return max(0, kilobytes.get("FilePages", 0) - kilobytes.get("Shmem", 0)) * 1024
