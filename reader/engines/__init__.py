"""What each engine writes while it starts: one table each, and one for what is under them all."""

from __future__ import annotations

from dataclasses import replace

from reader.engines import anyone, atom, lmdeploy, sglang, trtllm, vllm
from reader.sights import Mark

MARKS: tuple[Mark, ...] = tuple(
    replace(mark, engine=name)
    for name, table in (
        ("atom", atom.MARKS),
        ("vllm", vllm.MARKS),
        ("sglang", sglang.MARKS),
        ("tensorrt_llm", trtllm.MARKS),
        ("lmdeploy", lmdeploy.MARKS),
        ("", anyone.MARKS),
    )
    for mark in table
)
