"""A reference engine: tensor parallel, a paged KV cache sized by kvaccord, and greedy generation.

    kvaccord serve --store memory &
    export KVACCORD_URL=http://127.0.0.1:8970 KVACCORD_ENGINE=reference
    torchrun --nproc-per-node 2 examples/engine/engine.py --device cpu

Read start(): it is all that an engine does with kvaccord. What follows shows why the counts must
be equal: every rank runs its own scheduler, all of them give out the same block numbers, and none
asks another. A rank with fewer blocks would be handed a number that it does not have.

Several ranks may share one GPU: --share says how much of it each may use.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import torch
import torch.distributed as dist
from model import Config, Model, Pool

import worker_client.driver  # noqa: F401  the HTTP client, which join() would load otherwise
from kvaccord import Layout, Report, page
from worker_client import Exit, Rendezvous, cuda_reading, cuda_report
from worker_client.measure import Reading, mem_available_bytes

httpx.Client(verify=False).close()  # and what httpx loads at its first use
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
CPU_BYTES = 64 * 2**20  # what a rank without a GPU spends on KV; there is no share to take it from


# --- the start ----------------------------------------------------------------------------------


def start(config: Config, args: argparse.Namespace) -> tuple[Model, Pool]:
    """Load, profile, agree, build. Whatever raises in here, every rank stops and hears why."""
    with timed("join"):
        # Peers may stand in a collective when a rank fails: Exit ends them, raising would not.
        rdzv = Rendezvous.join(
            ranks=[RANK],
            layout=Layout(tp=WORLD),
            inputs={"layers": config.layers, "block_tokens": config.block_tokens},
            on_stop=Exit(grace_s=5),
        )
    with rdzv:
        device = open_device(args)
        with timed("measure before"):
            before = cuda_reading() if device.type == "cuda" else None
        with timed("phase"):
            rdzv.phase("load", 1)
        model = Model(config, RANK, WORLD, device)
        held_bytes = args.hold_bytes if args.short_rank == RANK else 0
        held = torch.empty(held_bytes, dtype=torch.uint8, device=device)  # noqa: F841  it is held
        with timed("phase"):
            rdzv.phase("profile", 2)
        profile(model)
        with timed("measure"):
            report = measure(config, args, device, before, held_bytes)
        with timed("report"):
            agreed = rdzv.report(report)  # waits for all; raises Failed where there is no plan
        pool = Pool(config, agreed.entries["kv"], WORLD, device)
        with timed("applied"):
            rdzv.applied(built={"kv": pool.blocks})  # waits until every rank has built
    say(
        digest=agreed.decision.digest,
        blocks=pool.blocks,
        pool_bytes=pool.data.nbytes,
        own_blocks=max(0, min(report.kv_budget_bytes, report.free_bytes))
        // config.block_bytes(WORLD),
    )
    return model, pool


def open_device(args: argparse.Namespace) -> torch.device:
    """This rank's device, and the group over which its heads are summed."""
    if args.device == "cpu":
        device, backend = torch.device("cpu"), "gloo"
    else:
        count = torch.cuda.device_count()
        local = int(os.environ.get("LOCAL_RANK", "0")) % count
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        torch.cuda.set_per_process_memory_fraction(args.share)
        # NCCL refuses two ranks on one device.
        backend = "nccl" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= count else "gloo"
    if WORLD > 1:
        dist.init_process_group(backend)
    return device


def profile(model: Model) -> None:
    """The longest sequence that may come, once; torch remembers the peak of its memory."""
    config = model.config
    scratch = Pool(config, config.blocks_per_seq, model.world, model.device)
    tokens = [0] * config.max_model_len
    model.forward(tokens, 0, list(range(config.blocks_per_seq)), scratch)


def measure(
    config: Config,
    args: argparse.Namespace,
    device: torch.device,
    before: Reading | None,
    held_bytes: int,
) -> Report:
    """What this rank has for KV. One sequence of full length must fit, or there is no engine."""
    kv = page("kv", config.block_bytes(WORLD), min_entries=config.blocks_per_seq)
    more = {"max_num_seqs": config.max_num_seqs, "block_tokens": config.block_tokens}
    if device.type == "cuda":
        sharing = -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // torch.cuda.device_count())
        return cuda_report(
            classes=[kv],
            utilization=args.share,
            initial=before,
            local_count=sharing if sharing > 1 else None,
            **more,
        )
    free_bytes = mem_available_bytes()
    return Report(
        free_bytes=free_bytes, kv_budget_bytes=CPU_BYTES - held_bytes, classes=(kv,), **more
    )


# --- serving ------------------------------------------------------------------------------------


def generate(model: Model, pool: Pool, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy, with continuous batching: a sequence enters when it can have all its blocks."""
    config, free = model.config, list(range(pool.blocks))
    waiting, running = list(enumerate(prompts)), {}
    done: dict[int, list[int]] = {}
    while waiting or running:
        while waiting and len(running) < config.max_num_seqs:
            number, prompt = waiting[0]
            needed = -(-(len(prompt) + new) // config.block_tokens)
            if needed > len(free):
                break  # until another sequence has ended
            waiting.pop(0)
            # The same list on every rank, for the same sequence, without a word between them.
            table = [free.pop(0) for _ in range(needed)]
            running[number] = (list(prompt), 0, table)
        if not running:
            raise ValueError(f"a sequence needs {needed} blocks, and there are {pool.blocks}")
        for number, (tokens, at, table) in list(running.items()):
            logits = model.forward(tokens[at:], at, table, pool)
            at = len(tokens)
            tokens.append(int(logits.argmax()))
            running[number] = (tokens, at, table)
            if len(tokens) == len(prompts[number]) + new:
                done[number] = tokens
                free += running.pop(number)[2]
    return [done[number] for number in range(len(prompts))]


# --- what it says -------------------------------------------------------------------------------

calls: list[tuple[str, float, float]] = []  # of kvaccord: when each began and ended, in seconds


@contextmanager
def timed(name: str) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    calls.append((name, began_s, time.monotonic()))


def say(**what: object) -> None:
    # At one go: all ranks of a host write to one stream.
    sys.stdout.write(json.dumps({"rank": RANK, **what}) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--share", type=float, default=0.9, help="of the device, for this rank")
    parser.add_argument("--short-rank", type=int, default=-1, help="the rank that holds memory")
    parser.add_argument("--hold-bytes", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=24)
    args = parser.parse_args()
    config = Config()
    model, pool = start(config, args)
    say(calls=calls)
    prompts = [[(7 * n + i) % config.vocab for i in range(8 + 4 * n)] for n in range(args.prompts)]
    tokens = generate(model, pool, prompts, args.new_tokens)
    say(tokens=tokens)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
