"""Measure one rank's device with torch, and turn it into a report. CUDA and ROCm alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvaccord.errors import Invalid
from kvaccord.messages import CacheClass, Report

PPM = 1_000_000


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


def cuda_report(
    *,
    classes: Sequence[CacheClass],
    max_num_seqs: int = 0,
    utilization: float = 0.9,
    graph_bytes: int = 0,
    safety_bytes: int = 0,
    reserve_bytes: int = 0,
    device: Any = None,
    **more: Any,
) -> Report:
    """What this rank has for KV: call it with the weights loaded and after a profiling pass.

    device: as torch takes it, the current one by default. more: other fields of a Report.
    Source: torch.cuda.mem_get_info() -> (free, total), bytes; memory_stats() peak, bytes.
    """
    import torch

    if not torch.cuda.is_available():
        raise Invalid(
            f"torch {torch.__version__} sees no CUDA or ROCm device, so there is nothing to"
            " measure; install a torch build for the device and check CUDA_VISIBLE_DEVICES"
            " (HIP_VISIBLE_DEVICES), or build the Report yourself",
            field="free_bytes",
        )
    if not 0 < utilization <= 1:
        raise Invalid(
            f"utilization {utilization} must be above 0 and at most 1",
            field="utilization",
            value=str(utilization),
        )
    torch.cuda.synchronize(device)
    # What the allocator only caches goes back, so that free and reserved tell the same story.
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    peak_torch_bytes = max(
        stats.get("allocated_bytes.all.peak", 0), stats.get("allocated_bytes.all.current", 0)
    )
    utilization_ppm = round(utilization * PPM)
    budget_bytes, non_torch_bytes = kv_budget(
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        reserved_bytes=torch.cuda.memory_reserved(device),
        peak_torch_bytes=peak_torch_bytes,
        utilization_ppm=utilization_ppm,
        graph_bytes=graph_bytes,
        safety_bytes=safety_bytes,
    )
    return Report(
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        kv_budget_bytes=budget_bytes,
        reserve_bytes=reserve_bytes,
        max_num_seqs=max_num_seqs,
        classes=tuple(classes),
        parts={
            "utilization_ppm": utilization_ppm,
            "utilization_of": "total",
            "peak_torch_bytes": peak_torch_bytes,
            "non_torch_bytes": non_torch_bytes,
            "graph_bytes": graph_bytes,
            "safety_bytes": safety_bytes,
        },
        **more,
    )
