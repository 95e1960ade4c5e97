"""The shortest honest integration: every rank builds the same number of KV blocks, or none does.

    export KVACCORD_URL=http://127.0.0.1:8970 KVACCORD_ENGINE=minimal
    torchrun --nproc-per-node 2 --rdzv-id "$(uuidgen)" examples/minimal.py

The launch comes from torchrun's --rdzv-id; other launchers: set KVACCORD_LAUNCH to one value for
each start. Give one rank less memory (let another process hold some) and see all follow it.
"""

import os

import torch

from kvaccord import Layout, page
from worker_client import Rendezvous, cuda_report

# One KV block on this rank: 2 (K and V) x 32 layers x 8 heads x 128 values x 16 tokens x 2 bytes.
BLOCK_BYTES = 2 * 32 * 8 * 128 * 16 * 2

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))

# Whatever raises in this block, every rank stops and hears why, within a second or two.
with Rendezvous.join(ranks=[rank], layout=Layout(tp=world_size)) as rdzv:
    weights = torch.ones(2**28, dtype=torch.bfloat16, device="cuda")  # load_weights()
    (weights * 2).sum()  # profile(): its peak is what the budget leaves room for

    report = cuda_report(classes=[page("kv", BLOCK_BYTES)], utilization=0.9)
    agreed = rdzv.report(report)  # waits for all ranks; raises Failed when there is no plan
    blocks = agreed.entries["kv"]

    pool = torch.empty((blocks, BLOCK_BYTES), dtype=torch.uint8, device="cuda")
    rdzv.applied(built={"kv": len(pool)})  # waits until every rank has built; raises Aborted

print(f"rank {rank}: {blocks} blocks, {pool.nbytes} bytes, {agreed.decision.digest}")
