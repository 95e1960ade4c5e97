"""TensorRT-LLM, C++ runtime and PyTorch backend.

The PyTorch backend builds pools twice: small ones to profile with, then the real ones.
Source: NVIDIA/TensorRT-LLM cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp,
tensorrt_llm/_torch/pyexecutor/_util.py, tensorrt_llm/logger.py,
cpp/include/tensorrt_llm/common/logger.h.
"""

from __future__ import annotations

import re

from reader.sights import Begin, Count, Fact, Forget, Mark, Ready, Step, Trouble, World

_F = r"(-?\d{1,9}(?:\.\d{1,6})?)"

MARKS = (
    Mark(
        ("TensorRT-LLM version: ",),
        re.compile(r"\[TensorRT-LLM\] TensorRT-LLM version: ([\w.+-]{1,60})"),
        lambda m: [Begin("trtllm"), World(version=m[1])],
        serving=True,
    ),
    Mark(
        ("blocks in KV cache primary pool",),
        re.compile(
            r"Number of blocks in KV cache primary pool(?: for windowSize (\d{1,9}))?: (-?\d{1,12})"
        ),
        lambda m: [
            Count(int(m[2]), "blocks", "own", pool=f"window {m[1]}" if m[1] else ""),
            Step("KV pools built", 50),
        ],
        serving=True,
    ),
    Mark(
        ("primary blocks=",),
        re.compile(
            r"\[window size=(\d{1,9})\].{0,20}tokens per block=(\d{1,6}),"
            r" primary blocks=(-?\d{1,12})"
        ),
        lambda m: [
            Count(int(m[3]), "blocks", "own", pool=f"window {m[1]}"),
            Fact("block_tokens", float(m[2])),
            Step("KV pools built", 50),
        ],
        serving=True,
    ),
    Mark(
        ("for max tokens in paged KV",),
        re.compile(
            rf"Allocated {_F} (GiB|MiB|GB|MB) for max tokens in paged KV cache \((\d{{1,15}})\)"
        ),
        lambda m: [
            Fact("kv_gib", float(m[1]) / (1 if m[2][0] == "G" else 1024)),
            Count(int(m[3]), "tokens", "own", pool="paged tokens"),
            Step("KV pools built", 50),
        ],
    ),
    Mark(
        ("calculating max tokens",),
        re.compile(
            rf"calculating max tokens in paged kv cache: total: {_F} GiB, available: {_F} GiB"
        ),
        lambda m: [
            Fact("total_gib", float(m[1])),
            Fact("free_gib", float(m[2])),
            Step("memory profiled", 30),
        ],
    ),
    Mark(
        ("during memory usage profiling ",),
        re.compile(
            rf"Peak memory during memory usage profiling .{{0,80}}?: {_F} GiB, available KV cache"
            rf" memory when calculating max tokens: {_F} GiB"
        ),
        lambda m: [Forget(), Fact("available_gib", float(m[2])), Step("memory profiled", 30)],
        raw=("calculating max tokens",),
    ),
    Mark(
        ("max memory in KV cache",),
        re.compile(rf"Estimated max memory in KV cache : {_F} GiB"),
        lambda m: [Forget(), Fact("available_gib", float(m[1])), Step("memory profiled", 30)],
    ),
    Mark(
        ("Executor instance created",),
        re.compile(r"Executor instance created by worker"),
        lambda m: [Ready()],
    ),
    Mark(
        ("insufficient GPU memory",),
        re.compile(r"Executor creation failed due to insufficient GPU memory.{0,200}"),
        lambda m: [Trouble("limit", "no_free_memory", m[0])],
    ),
    Mark(
        ("Failed to initialize executor",),
        re.compile(r"Failed to initialize executor on rank (\d{1,5}): (.{1,300})"),
        lambda m: [Trouble("raised", "rank_vetoed", m[2], facts=(("writer", float(m[1])),))],
    ),
    Mark(
        ("was invoked on rank",),
        re.compile(r"MPI_ABORT was invoked on rank (\d{1,5})"),
        lambda m: [Trouble("victim", "rank_lost", m[0], facts=(("writer", float(m[1])),))],
        serving=True,
    ),
)
