# SPDX-License-Identifier: Apache-2.0
"""Caches of two engines in which the value of every element encodes its token, layer and head."""

import ctypes
import random

import torch

from kvcache_exchange.disaggregation.layout import VEC
from kvcache_exchange.plugins.moves import GroupPlan
from kvcache_vllm.disaggregation.layout import layout_of_group


class Side:
    """An engine's caches for one group: per rank and layer, a tensor [pages, heads, tokens,
    content].
    """

    def __init__(self, shape, block_size, tp_size, *, order="HND", interior=VEC, pages_per_block=1):
        self.num_layers, self.heads, self.head_size = shape
        self.block_size, self.tp_size, self.interior = block_size, tp_size, interior
        self.pages_per_block = pages_per_block
        self.page = block_size // pages_per_block
        self.own = max(self.heads // tp_size, 1)
        self.num_blocks = 16
        sizes = (self.num_blocks * pages_per_block, self.own, self.page, 2 * self.head_size)
        if order == "NHD":
            sizes = (sizes[0], sizes[2], sizes[1], sizes[3])
        self.caches = [
            [torch.full(sizes, -1.0) for _ in range(self.num_layers)] for _ in range(tp_size)
        ]
        if order == "NHD":
            self.caches = [[cache.transpose(1, 2) for cache in each] for each in self.caches]
        self.layout = layout_of_group(
            [f"layer{i}" for i in range(self.num_layers)],
            self.caches[0],
            engine_id=f"tp{tp_size}",
            num_blocks=self.num_blocks,
            total_num_kv_heads=self.heads,
            tp_size=tp_size,
            head_size=self.head_size,
            interior=interior,
        )

    def head_of(self, rank, head):
        """Return the global index of a local head of a rank."""
        return rank * self.heads // self.tp_size + head

    def pieces(self, rank, block):
        """Yield (layer, page, head, part, view) for K and V of each head of a block. Views are
        [tokens, head size].
        """
        for layer, cache in enumerate(self.caches[rank]):
            for page in range(self.pages_per_block):
                for head in range(self.own):
                    whole = cache[block * self.pages_per_block + page, head]
                    if self.interior == VEC:
                        k, v = whole.reshape(-1).chunk(2)
                        k, v = k.view(self.head_size, -1).T, v.view(-1, self.head_size)
                    else:
                        k, v = whole.chunk(2, dim=1)
                    for part, view in enumerate((k, v)):
                        yield layer, page, self.head_of(rank, head), part, view

    def expected(self, layer, head, part, tokens):
        """Return the expected values for these tokens."""
        base = ((layer * self.heads + head) * 2 + part) * 1000.0
        return base + tokens[:, None] + torch.arange(self.head_size) / 64

    def fill(self, blocks):
        for rank in range(self.tp_size):
            for number, block in enumerate(blocks):
                for layer, page, head, part, view in self.pieces(rank, block) if block else ():
                    view[:] = self.expected(layer, head, part, self.tokens(number, page))

    def tokens(self, number, page):
        return torch.arange(self.page) + number * self.block_size + page * self.page


def read_all(local, remote, local_blocks, remote_blocks):
    """Execute the plans of all local ranks. Return the number of reads."""
    addresses = [[cache.data_ptr() for cache in each] for each in remote.caches]
    count = 0
    for rank in range(local.tp_size):
        plan = GroupPlan(local.layout, remote.layout, rank)
        own = [cache.data_ptr() for cache in local.caches[rank]]
        for moves in plan.moves(own, dict(enumerate(addresses)), local_blocks, remote_blocks):
            for to, at, length in zip(*(each.tolist() for each in moves[1:])):
                ctypes.memmove(to, at, length)
                count += 1
    return count


def check_blocks(local, local_blocks, remote_blocks, remote_size):
    """Check the values of tokens that exist on both sides, and check that all other values are
    unchanged.
    """
    has = {
        number * remote_size + token
        for number, block in enumerate(remote_blocks)
        if block
        for token in range(remote_size)
    }
    numbers = {block: number for number, block in enumerate(local_blocks) if block}
    for rank in range(local.tp_size):
        for block in range(local.num_blocks):
            for layer, page, head, part, view in local.pieces(rank, block):
                if block not in numbers:
                    assert (view == -1).all(), f"block {block} is touched"
                    continue
                tokens = local.tokens(numbers[block], page)
                there = torch.tensor([token in has for token in tokens.tolist()])
                wanted = local.expected(layer, head, part, tokens)
                assert torch.equal(view[there], wanted[there]), (rank, block, layer, head, part)
                assert (view[~there] == -1).all(), "slots without a token are written"


def some_blocks(rng, num_tokens, block_size, first_token=0):
    """Return a request's block ids in random order. Blocks before `first_token` are 0."""
    count = -(-num_tokens // block_size)
    ids = rng.sample(range(1, 16), count)
    return [0 if i < first_token // block_size else ids[i] for i in range(count)]


def random_case(seed, local_size, remote_size, local_tp, remote_tp, heads):
    """Make two sides and their blocks, with or without null blocks before a window. The remote
    blocks are filled.
    """
    rng = random.Random(seed)
    print(f"seed {seed}")
    shape = (2, heads, 4)
    local, remote = Side(shape, local_size, local_tp), Side(shape, remote_size, remote_tp)
    num_tokens = rng.randrange(1, 7 * min(local_size, remote_size))
    first = rng.choice([0, 0, rng.randrange(num_tokens)])
    local_blocks = some_blocks(rng, num_tokens, local_size, first)
    remote_blocks = some_blocks(rng, num_tokens, remote_size, rng.choice([0, first]))
    remote.fill(remote_blocks)
    return local, remote, local_blocks, remote_blocks
