"""SGLang. Its GB are 2^30 bytes, with two decimals. Without a TP prefix there is one rank.

Source: sgl-project/sglang python/sglang/srt/: model_executor/model_runner.py,
mem_cache/{memory_pool,kv_cache_configurator}.py, managers/scheduler.py, utils/common.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from reader.sights import (
    EXCEPTIONS,
    Begin,
    Count,
    Fact,
    Mark,
    Ready,
    Sight,
    Step,
    Trouble,
    World,
    number,
)

_F = r"(-?\d{1,9}(?:\.\d{1,9})?)"
_SIZES = {"tp_size": "tp", "pp_size": "pp", "dp_size": "dp"}


def _args(found: re.Match[str]) -> Iterator[Sight]:
    line = found.string
    yield Begin("sglang server")
    sizes = {
        axis: int(size[1])
        for name, axis in _SIZES.items()
        if (size := re.search(rf"\b{name}=(\d{{1,5}})\b", line))
    }
    if "enable_dp_attention=True" in line:  # attention DP lies inside TP
        sizes.pop("dp", None)
    if sizes:
        yield World(axes=tuple(sizes.items()))
    if fraction := re.search(rf"\bmem_fraction_static={_F}", line):
        yield Fact("utilization", float(fraction[1]))


def _pool(found: re.Match[str]) -> Iterator[Sight]:
    line = found.string[found.start() :][:400]
    if tokens := re.search(r"#tokens: (-?\d[\d,]{0,19})", line):
        yield Count(number(tokens[1]), "tokens", "own")
    sizes = [float(size) for size in re.findall(rf"\b(?:KV|K|V) size: {_F} GB", line)]
    if sizes:
        yield Fact("kv_gib", sum(sizes))
    yield Step("KV pools built", 50)


def _unbalanced(found: re.Match[str]) -> list[Sight]:
    """Newer versions print the numbers of the rank that complains, which is a roomy one."""
    text = found.string[found.start() :][:400]
    sizes = {name: float(value) for name, value in re.findall(rf"(\w{{1,40}}_memory)={_F}", text)}
    least = sizes.get("min_per_gpu_memory", sizes.get("pre_model_load_memory"))
    own = sizes.get("local_gpu_memory")
    facts: tuple[tuple[str, float | str], ...] = ()
    if least is not None and own is not None:
        facts = (("least_gib", least), ("own_gib", own))
    return [Trouble("limit", "spread_too_wide", text, facts=facts)]


MARKS = (
    Mark(
        ("server_args=ServerArgs(",), re.compile(r"server_args=ServerArgs\("), _args, serving=True
    ),
    Mark(
        ("Init torch distributed ",),
        re.compile(r"Init torch distributed (begin|ends)\.?"),
        lambda m: [Step("torch.distributed", 8 if m[1] == "begin" else 9, ended=m[1] == "ends")],
    ),
    Mark(
        ("Load weight ",),
        re.compile(
            rf"Load weight (begin|end)\.(?:.{{0,200}}?avail mem={_F} GB)?(?:, mem usage={_F} GB)?"
        ),
        lambda m: [
            Step("loading weights", 10 if m[1] == "begin" else 20, ended=m[1] == "end"),
            *([Fact("free_gib", float(m[2]))] if m[2] else []),
            *([Fact("weights_gib", float(m[3]))] if m[3] else []),
        ],
    ),
    Mark(("Cache is allocated. ",), re.compile(r"KV Cache is allocated\."), _pool, serving=True),
    Mark(
        ("max_total_num_tokens=",),
        re.compile(r"\bmax_total_num_tokens=(-?\d{1,15})\b(?:.{0,300}?context_len=(\d{1,9}))?"),
        lambda m: [
            Count(int(m[1]), "tokens", "own", pool="scheduler"),
            *([Fact("max_model_len", float(m[2]))] if m[2] else []),
            Step("scheduler sized", 65),
        ],
        serving=True,
    ),
    Mark(
        ("larger than the profiled value",),
        re.compile(r"max_total_tokens=(\d{1,15}) is larger than the profiled value (-?\d{1,15})"),
        lambda m: [Count(int(m[2]), "tokens", "own", pool="profiled"), Step("memory profiled", 30)],
    ),
    Mark(
        ("Capture ",),
        re.compile(r"Capture (?:\w{1,20} ){0,4}(?:cuda|CUDA) graph (begin|end)\."),
        lambda m: [Step("capturing graphs", 55 if m[1] == "begin" else 60, ended=m[1] == "end")],
    ),
    Mark(
        ("fired up and ready to roll",),
        re.compile(r"The server is fired up and ready to roll"),
        lambda m: [Ready()],
    ),
    # --- refusals -------------------------------------------------------------------------------
    Mark(
        ("Please try to increase --mem-f",),
        re.compile(r"Not enough memory\. Please try to increase --mem-fraction-static.{0,80}"),
        lambda m: [Trouble("limit", "does_not_fit", m[0])],
        raw=EXCEPTIONS,
    ),
    Mark(
        ("GPU memory for hybrid state",),
        re.compile(r"Not enough GPU memory for hybrid state cache.{0,200}"),
        lambda m: [Trouble("limit", "state_floor_exceeds_budget", m[0])],
        raw=EXCEPTIONS,
    ),
    Mark(
        ("memory capacity is unbalanced",),
        re.compile(r"(?<=Error: )The memory capacity is unbalanced"),
        _unbalanced,
        raw=EXCEPTIONS,
    ),
    # --- consequences ---------------------------------------------------------------------------
    Mark(
        ("sigquit from a child",),
        re.compile(r"Received sigquit from a child process"),
        lambda m: [Trouble("victim", "rank_lost", m[0])],
        serving=True,
    ),
    Mark(
        ("other ranks that didn't finish",),
        re.compile(r"TP rank (\d{1,5}) could finish the model loading, but there are other ranks"),
        lambda m: [Trouble("victim", "ranks_missing", m[0], facts=(("writer", float(m[1])),))],
        raw=EXCEPTIONS,
    ),
)
