"""A small transformer with a paged KV cache, its heads split over tensor-parallel ranks.

Every rank makes the same random weights from one seed and keeps its part, so nothing is read from
disk. Two sums over the ranks per layer; all else is local. fp32, so that any number of ranks
generates the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 512
    block_tokens: int = 16
    max_model_len: int = 256
    max_num_seqs: int = 8

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def block_bytes(self, world: int) -> int:
        """Of one KV block on one rank: K and V of every layer, for its share of the KV heads."""
        return 2 * self.layers * self.block_tokens * self.kv_heads // world * self.head_dim * 4

    @property
    def blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_tokens)


class Pool:
    """The KV blocks of one rank, allocated at once: [layer, K or V, block, token, head, dim]."""

    def __init__(self, config: Config, blocks: int, world: int, device: torch.device) -> None:
        heads = config.kv_heads // world
        shape = (config.layers, 2, blocks, config.block_tokens, heads, config.head_dim)
        self.data = torch.zeros(shape, device=device)
        self.blocks = blocks

    def write(
        self, layer: int, table: list[int], at: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Keep K and V [tokens, heads, dim] of the tokens from position `at` on."""
        size = self.data.shape[3]
        where = torch.arange(at, at + len(k), device=k.device)
        block = torch.tensor(table, device=k.device)[where // size]
        self.data[layer, 0, block, where % size] = k
        self.data[layer, 1, block, where % size] = v

    def read(self, layer: int, table: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first `length` tokens of a sequence, [tokens, heads, dim] each."""
        kv = self.data[layer][:, torch.tensor(table, device=self.data.device)]
        k, v = kv.flatten(1, 2)[:, :length]
        return k, v


class Model:
    """This rank's part of the weights. `sum_over_ranks` is called twice a layer."""

    def __init__(self, config: Config, rank: int, world: int, device: torch.device) -> None:
        if config.kv_heads % world:
            raise ValueError(f"{config.kv_heads} KV heads cannot be split over {world} ranks")
        self.config, self.world, self.device = config, world, device
        self._random = torch.Generator().manual_seed(0)
        c, dim = config, config.head_dim

        def part(rows: int, columns: int, split: int | None) -> torch.Tensor:
            """A random weight; of one that is split this rank keeps its rows (0) or columns (1)."""
            scale = columns**-0.5
            whole = torch.randn(rows, columns, generator=self._random) * scale
            kept = whole if split is None else whole.chunk(world, split)[rank]
            return kept.contiguous().to(device)

        self.embedding = part(c.vocab, c.hidden, None)
        self.layers = [
            {
                "q": part(c.heads * dim, c.hidden, 0),
                "k": part(c.kv_heads * dim, c.hidden, 0),
                "v": part(c.kv_heads * dim, c.hidden, 0),
                "out": part(c.hidden, c.heads * dim, 1),
                "up": part(4 * c.hidden, c.hidden, 0),
                "down": part(c.hidden, 4 * c.hidden, 1),
            }
            for _ in range(c.layers)
        ]

    @torch.inference_mode()
    def forward(self, tokens: list[int], at: int, table: list[int], pool: Pool) -> torch.Tensor:
        """Logits [vocab] after the last of `tokens`, which stand at position `at` of a sequence.

        table: the blocks of the sequence, in order. The new tokens' K and V are kept in them.
        """
        c, length = self.config, at + len(tokens)
        x = self.embedding[torch.tensor(tokens, device=self.device)]
        for number, w in enumerate(self.layers):
            h = F.layer_norm(x, (c.hidden,))
            q, k, v = (F.linear(h, w[name]).unflatten(1, (-1, c.head_dim)) for name in "qkv")
            pool.write(number, table, at, k, v)
            k, v = pool.read(number, table, length)
            # Causal, with the new tokens at the end of what is cached.
            seen = torch.arange(length, device=self.device)
            mask = seen[None, :] <= seen[at:, None]
            share = c.heads // c.kv_heads
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1),
                k.transpose(0, 1).repeat_interleave(share, 0),
                v.transpose(0, 1).repeat_interleave(share, 0),
                attn_mask=mask,
            )
            x = x + self.sum_over_ranks(F.linear(attended.transpose(0, 1).flatten(1), w["out"]))
            h = F.layer_norm(x, (c.hidden,))
            x = x + self.sum_over_ranks(F.linear(F.silu(F.linear(h, w["up"])), w["down"]))
        return F.linear(F.layer_norm(x[-1], (c.hidden,)), self.embedding)

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        if self.world > 1:
            dist.all_reduce(x)
        return x
