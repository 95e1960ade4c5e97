"""vLLM, V0 and V1. GiB are 2^30 bytes; V0's `GB` of loaded weights too.

Source: vllm-project/vllm vllm/: v1/core/kv_cache_utils.py, v1/worker/gpu_worker.py,
v1/engine/core.py, v1/engine/utils.py, worker/worker.py and executor/executor_base.py (V0),
distributed/kv_transfer/kv_connector/v1/nixl_connector.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from reader.sights import (
    EXCEPTIONS,
    Begin,
    Count,
    During,
    Fact,
    Mark,
    Sight,
    Step,
    Trouble,
    Waiting,
    World,
    number,
)

_N = r"(-?\d[\d,]{0,19})"
_F = r"(-?\d{1,9}(?:\.\d{1,6})?)"
_SIZES = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "dp",
    "prefill_context_parallel_size": "pcp",
}


def _config(found: re.Match[str]) -> Iterator[Sight]:
    yield Begin("vllm engine")
    line = found.string
    axes = tuple(
        (axis, int(size[1]))
        for name, axis in _SIZES.items()
        if (size := re.search(rf"\b{name}=(\d{{1,5}})\b", line))
    )
    yield World(axes=axes, version=found[1])
    if length := re.search(r"\bmax_seq_len=(\d{1,9})\b", line):
        yield Fact("max_model_len", float(length[1]))
    yield Step("engine configured", 5)


def _too_long(found: re.Match[str]) -> list[Sight]:
    text = found.string[found.start() :][:500]
    facts: list[tuple[str, float | str]] = [("max_model_len", float(found[1]))]
    sizes = re.search(rf"\({_F} GiB KV cache is needed.{{0,120}}?\({_F} GiB\)", text)
    if sizes:
        facts += [("needed_gib", float(sizes[1])), ("available_gib", float(sizes[2]))]
    if estimate := re.search(r"maximum model length is (\d{1,9})", text):
        facts.append(("fits_model_len", float(estimate[1])))
    return [Trouble("limit", "does_not_fit", text, facts=tuple(facts))]


def _short(found: re.Match[str]) -> list[Sight]:
    device, free, total, asked, wanted = found.groups()
    facts: tuple[tuple[str, float | str], ...] = (
        ("free_gib", float(free)),
        ("total_gib", float(total)),
        ("utilization", float(asked)),
        ("wanted_gib", float(wanted)),
    )
    ranks = (int(device),) if device else ()
    return [Trouble("limit", "request_exceeds_free", found[0], ranks=ranks, facts=facts)]


def _core_failed(found: re.Match[str]) -> list[Sight]:
    """`{}` and codes above 0 are consequences; one below is the signal that ended a process."""
    ended = re.search(r"'(\w{1,60})': -(\d{1,3})\b", found[0])
    if ended is None or ended[2] == "15":
        return [Trouble("victim", "rank_lost", found[0])]
    return [Trouble("died", "rank_lost", f"{ended[1]} was ended by signal {ended[2]}")]


MARKS = (
    Mark(
        (" LLM engine (v",),
        re.compile(r"Initializing an? (?:V1 )?LLM engine \(v([\w.+-]{1,80})\) with config"),
        _config,
        serving=True,
    ),
    Mark(
        ("vLLM API server version",),
        re.compile(r"vLLM API server version ([\w.+-]{1,80})"),
        lambda m: [Begin("vllm api"), World(version=m[1])],
        serving=True,
    ),
    # --- what ranks have ------------------------------------------------------------------------
    Mark(
        ("GPU KV cache size: ",),
        re.compile(rf"GPU KV cache size: {_N} tokens"),
        lambda m: [Count(number(m[1]), "tokens", "offer"), Step("KV sizes planned", 40)],
        serving=True,
    ),
    Mark(
        (" blocks: ",),
        re.compile(
            rf"# (?:GPU|CUDA|HPU|NPU|XPU|TPU|ROCM|MUSA|\w{{2,8}}) blocks: {_N}(?:, # CPU|\s|$)"
        ),
        lambda m: [Count(number(m[1]), "blocks", "plan"), Step("KV sizes planned", 40)],
        serving=True,
    ),
    Mark(
        ("Registering KV_Caches",),
        re.compile(r"Registering KV_Caches.{0,80}?num_blocks: (\d{1,12})"),
        lambda m: [Count(int(m[1]), "blocks", "own"), Step("KV pools built", 50)],
        serving=True,
    ),
    Mark(
        ("Available KV cache memory: ",),
        re.compile(rf"Available KV cache memory: {_F} GiB"),
        lambda m: [Fact("available_gib", float(m[1])), Step("memory profiled", 30)],
    ),
    Mark(
        ("memory reserved for KV Cache is ",),
        re.compile(
            rf"model weights take {_F}GiB; non_torch_memory takes {_F}GiB; PyTorch activation peak"
            rf" memory takes {_F}GiB; the rest of the memory reserved for KV Cache is {_F}GiB"
        ),
        lambda m: [
            Fact("weights_gib", float(m[1])),
            Fact("non_torch_gib", float(m[2])),
            Fact("peak_torch_gib", float(m[3])),
            Fact("available_gib", float(m[4])),
            Step("memory profiled", 30),
        ],
    ),
    Mark(
        ("x gpu_memory_utilization (",),
        re.compile(rf"total_gpu_memory \({_F}GiB\) x gpu_memory_utilization \({_F}\) = {_F}GiB"),
        lambda m: [
            Fact("total_gib", float(m[1])),
            Fact("utilization", float(m[2])),
            Fact("budget_gib", float(m[3])),
        ],
    ),
    Mark(
        ("oading model weights took", "Model loading took"),
        re.compile(rf"(?:Loading model weights|Model loading) took {_F} ?(?:GiB|GB)"),
        lambda m: [Fact("weights_gib", float(m[1])), Step("weights loaded", 20)],
    ),
    Mark(
        ("Starting to load model",),
        re.compile(r"Starting to load model "),
        lambda m: [Step("loading weights", 10, ended=False)],
    ),
    Mark(
        ("Maximum concurrency for ",),
        re.compile(rf"Maximum concurrency for {_N} tokens per request: {_F}x"),
        lambda m: [Fact("max_model_len", float(number(m[1]))), Fact("concurrency", float(m[2]))],
    ),
    Mark(
        ("Graph capturing finished",),
        re.compile(r"Graph capturing finished in"),
        lambda m: [Step("graphs captured", 60)],
    ),
    Mark(
        ("init engine (profile",),
        re.compile(r"init engine \(profile, create kv cache"),
        lambda m: [Step("engine initialised", 70)],
    ),
    # --- waiting --------------------------------------------------------------------------------
    Mark(
        ("core engine proc(s) to ",),
        re.compile(
            r"Waiting for \d{1,5} local, \d{1,5} remote core engine proc\(s\) to \w{1,10}\."
        ),
        lambda m: [Waiting(m[0])],
        raw=("Waiting for ",),
    ),
    Mark(
        ("memory broadcast block found",),
        re.compile(r"No available (?:shared memory broadcast )?block found in \d{1,5} seconds?"),
        lambda m: [Waiting(m[0])],
    ),
    Mark(
        ("creating a placement group",),
        re.compile(r"Waiting for creating a placement group of specs.{0,40}"),
        lambda m: [Waiting("Waiting for creating a placement group")],
        raw=("Waiting for ",),
    ),
    # --- refusals -------------------------------------------------------------------------------
    Mark(
        ("max seq len (",),
        re.compile(r"To serve at least one request with the models?'s max seq len \((\d{1,9})\)"),
        _too_long,
        raw=EXCEPTIONS,
    ),
    Mark(
        ("that can be stored in KV cache",),
        re.compile(
            rf"max seq len \((\d{{1,9}})\) is larger than the maximum number of tokens that can be"
            rf" stored in KV cache \({_N}\)"
        ),
        lambda m: [
            Trouble(
                "limit",
                "does_not_fit",
                m[0],
                facts=(("max_model_len", float(m[1])), ("fits_model_len", float(number(m[2])))),
            )
        ],
        raw=EXCEPTIONS,
    ),
    Mark(
        ("No available memory for the",),
        re.compile(r"No available memory for the cache blocks"),
        lambda m: [Trouble("limit", "does_not_fit", m[0])],
        raw=EXCEPTIONS,
    ),
    Mark(
        ("desired GPU memory utilization",),
        re.compile(
            rf"Free memory on device(?: \w{{1,12}}:?(\d{{1,4}})?)? \({_F}/{_F} GiB\) on startup is"
            rf" less than desired GPU memory utilization \({_F}, {_F} GiB\)"
        ),
        _short,
        raw=EXCEPTIONS,
    ),
    Mark(
        ("available Mamba cache blocks",),
        re.compile(
            r"max_num_seqs \((\d{1,9})\) exceeds (?:the )?"
            r"available Mamba cache blocks \((\d{1,9})\)"
        ),
        lambda m: [
            Trouble(
                "limit",
                "state_floor_exceeds_budget",
                m[0],
                facts=(("max_num_seqs", float(m[1])), ("fits_num_seqs", float(m[2]))),
            )
        ],
        raw=EXCEPTIONS,
    ),
    Mark(
        ("Error in memory profiling",),
        re.compile(r"Error in memory profiling\. .{0,200}"),
        lambda m: [Trouble("limit", "implausible_report", m[0])],
        raw=EXCEPTIONS,
    ),
    # --- consequences ---------------------------------------------------------------------------
    Mark(
        ("Error executing method ",),
        re.compile(r"Error executing method '?(\w{1,80})'?"),
        lambda m: [During(m[1])],
        raw=EXCEPTIONS,
    ),
    Mark(
        ("Engine core initialization failed",),
        re.compile(r"Engine core initialization failed\..{0,80}?Failed core proc\(s\): .{0,400}"),
        _core_failed,
        raw=EXCEPTIONS,
    ),
    Mark(
        ("please check the stack trace",),
        re.compile(r"Worker failed with error '(.{1,400}?)', please check the stack trace"),
        lambda m: [Trouble("victim", "rank_vetoed", m[0], facts=(("quotes", m[1]),))],
        raw=EXCEPTIONS,
    ),
)
