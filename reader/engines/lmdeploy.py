"""LMDeploy: TurboMind and the PyTorch engine. TurboMind's MB are 2^20 bytes.

Source: InternLM/lmdeploy src/turbomind/models/llama/BlockManager.cc (to 0.14),
src/turbomind/turbomind.cc (since), lmdeploy/pytorch/engine/executor/base.py,
lmdeploy/pytorch/config.py (CacheConfig), lmdeploy/serve/core/async_engine.py.
"""

from __future__ import annotations

import re

from reader.sights import EXCEPTIONS, Begin, Count, Fact, Mark, Step, Trouble, World

MARKS = (
    Mark(
        ("input backend=",),
        re.compile(r"input backend=\w{1,20}(?:.{0,400}?\btp=(\d{1,4}))?"),
        lambda m: [Begin("lmdeploy"), *([World(axes=(("tp", int(m[1])),))] if m[1] else [])],
        serving=True,
    ),
    Mark(
        ("] max_block_count",),
        re.compile(r"\[BlockManager\] max_block_count = (-?\d{1,12})"),
        lambda m: [Count(int(m[1]), "blocks", "own"), Step("KV pools built", 50)],
        serving=True,
        raw=("[BlockManager] ",),
    ),
    Mark(
        ("[BlockManager] block_size",),
        re.compile(r"\[BlockManager\] block_size = (\d{1,9}(?:\.\d{1,6})?) MB"),
        lambda m: [Fact("block_mib", float(m[1]))],
        raw=("[BlockManager] ",),
    ),
    Mark(
        ("Object cache budget: ",),
        re.compile(r"Object cache budget: (\d{1,9}\.\d\d) MB from free (\d{1,9}\.\d\d) MB"),
        lambda m: [
            Fact("available_gib", float(m[1]) / 1024),
            Fact("free_gib", float(m[2]) / 1024),
            Step("memory profiled", 30),
        ],
    ),
    Mark(
        (", num_gpu_blocks=",),
        re.compile(
            r"CacheConfig\(.{0,300}?\bblock_size=(\d{1,6}).{0,200}?num_gpu_blocks=(\d{1,12})"
        ),
        # Printed as it is built, when the least over all ranks is taken already; 0 is "not yet".
        lambda m: (
            [
                Count(int(m[2]), "blocks", "plan"),
                Fact("block_tokens", float(m[1])),
                Step("KV sizes planned", 40),
            ]
            if int(m[2])
            else []
        ),
    ),
    Mark(
        ("gpu memory for kv cache",),
        re.compile(r"No enough gpu memory for kv cache"),
        lambda m: [Trouble("limit", "does_not_fit", m[0])],
        raw=EXCEPTIONS,
    ),
)
