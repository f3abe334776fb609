# SPDX-License-Identifier: Apache-2.0
"""Cases for constructors, requests with given hashes, ops, and transfers between engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from kvcache import (
    Admit,
    BlockPool,
    BlockTables,
    GroupSpec,
    KVCacheManager,
    KVStorage,
    LayerSpec,
    Request,
    SwapEngine,
    build,
    eviction_names,
    ops,
    plan_cache,
)
from kvcache.allocator import check_invariants
from kvcache.compat import BlockSpaceManager, copy_kv_blocks
from kvcache.transfer import CacheDescription, permute_pages, permute_received_blocks, plan_transfer
from tests.machinery.out_of_memory.trial import Case, Trial

_GROUPS = {
    "one group": [GroupSpec("full_attention", 4)],
    "three groups": [
        GroupSpec("full_attention", 4),
        GroupSpec("sliding_window", 4, {"window": 6}),
        GroupSpec("recurrent", 4, {"num_speculative_blocks": 2}),
    ],
    "other kinds": [
        GroupSpec("chunked_local", 4, {"chunk_size": 8}),
        GroupSpec("circular_window", 4, {"window": 6, "buffer": 13}, cached=False),
        GroupSpec("cross_attention", 4),
    ],
}


# --- constructors ---------------------------------------------------------------------------------


def _manager(groups: list[GroupSpec], **options: object) -> object:
    manager = KVCacheManager.for_groups(groups, num_gpu_blocks=40, max_model_len=64, **options)
    check_invariants(manager)
    return manager.pool.num_free, manager.cache.stats


def _sequence_manager() -> object:
    manager = BlockSpaceManager(4, 20, 10, sliding_window=8, enable_caching=True)
    return manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()


def _tables() -> object:
    tables = BlockTables.for_groups(
        _GROUPS["three groups"], max_num_reqs=4, max_model_len=64, max_num_tokens=32
    )
    return [table.get_numpy_array() for table in tables.block_tables]


def _cache() -> object:
    layers = [
        LayerSpec("a", "full_attention", 4, 1, 8),
        LayerSpec("b", "sliding_window", 4, 1, 8, options={"window": 6}),
    ]
    cache = build(plan_cache(layers, 2**15, max_model_len=32), max_num_reqs=4)
    return cache.manager.pool.num_free


def _host_pages() -> object:
    storage = KVStorage(num_blocks=4, block_size=4, num_kv_heads=1, head_size=4)
    host = storage.pages.on_host(3)
    SwapEngine(storage.pages, host)
    return host.num_blocks, host.memory


_MADE: dict[str, Callable[[], object]] = {
    **{
        f"KVCacheManager, {name}": lambda groups=groups: _manager(groups)
        for name, groups in _GROUPS.items()
    },
    **{
        f"KVCacheManager with {name}": lambda options=options: _manager(
            _GROUPS["one group"], **options
        )
        for name, options in {
            "a host": {"num_host_blocks": 20, "host_eviction": "learned", "eviction": "learned"},
            "events": {"enable_events": True, "fence_frees": True},
            "hashes inside blocks": {"hash_block_size": 2},
            "xxh3": {"hash_algorithm": "xxh3_128_cbor"},
            **{policy: {"eviction": policy} for policy in eviction_names()},
        }.items()
    },
    **{
        f"BlockPool with {policy}": lambda policy=policy: BlockPool(30, eviction=policy).num_free
        for policy in eviction_names()
    },
    "BlockSpaceManager": _sequence_manager,
    "Request": lambda: Request("a", range(50)).token_ids,
}
# Constructors that allocate torch tensors.
_MADE_OF_TENSORS = {"tables": _tables, "build": _cache, "host pages": _host_pages}


# --- hashes given by the engine -------------------------------------------------------------------


class Given:
    """A manager, and a request whose block hashes are given by the engine."""

    def __init__(self) -> None:
        self.manager = KVCacheManager(4, 30, 64, num_preallocate_tokens=0)
        self.hashes = [bytes([i]) * 32 for i in range(5)]
        self.request = Request("a", range(20), block_hashes=self.hashes)
        self.manager.cache.find_prefix(self.request)

    def append(self) -> object:
        while len(self.hashes) < 40:
            self.hashes.append(bytes([len(self.hashes)]) * 32)
        missing = 160 - self.request.num_tokens  # 0 if the call is repeated
        self.request.append_tokens([7] * missing)
        return self.request.num_tokens

    def state(self) -> Iterator[Callable[[], object]]:
        yield lambda: check_invariants(self.manager)
        yield lambda: self.request.num_tokens
        yield lambda: self.manager.step(new=[Admit(self.request, num_tokens=20)])
        yield lambda: self.manager.cache.hashes(self.request)
        yield lambda: check_invariants(self.manager)
        yield lambda: self.manager.free(self.request)
        again = Request("b", range(24), block_hashes=[bytes([i]) * 32 for i in range(6)])
        yield lambda: self.manager.cache.find_prefix(again)


def _new_with_hashes(given: Given) -> object:
    hashes = [bytes([i]) * 32 for i in range(30)]
    request = Request("c", range(120), block_hashes=hashes)
    return given.manager.cache.find_prefix(request).num_tokens


_GIVEN: dict[str, Callable[[Given], object]] = {
    "append_tokens": Given.append,
    "find_prefix": _new_with_hashes,
}


def _given_trial(call: Callable[[Given], object]) -> Trial:
    given = Given()
    return Trial(lambda: call(given), given.state, [])


# --- ops and transfers ----------------------------------------------------------------------------


class Moved:
    """A storage, tokens, tables, and the pages of another engine."""

    def __init__(self) -> None:
        self.storage = KVStorage(
            num_blocks=8, block_size=4, num_kv_heads=2, head_size=4, dtype=torch.float32
        )
        memory = self.storage.pages.memory
        memory.copy_(torch.arange(len(memory)) % 251)
        self.keys, self.values = (self.storage.key_cache(0), self.storage.value_cache(0))
        self.tokens = [torch.arange(48.0).view(6, 2, 4) + i for i in range(2)]
        self.slots = torch.tensor([5, 9, -1, 30, 4, 17])
        self.table = torch.arange(1, 7, dtype=torch.int32).view(2, 3)
        self.out = torch.zeros(6, dtype=torch.int64)
        self.pairs = torch.tensor([[1, 2], [3, 4]])

    def state(self) -> Iterator[Callable[[], object]]:
        yield lambda: self.storage.pages.memory
        yield lambda: self.tokens
        yield lambda: self.out

    def copy_between(self) -> object:
        other = {"a": torch.zeros_like(self.keys)}
        copy_kv_blocks({"a": self.keys}, other, [1, 3], [0, 2], "d2h")
        return other["a"]

    def permute_received(self) -> object:
        cache = torch.arange(256.0).view(8, 2, 4, 4)
        permute_received_blocks([cache], [[1, 2], [5, 6]], remote_block_size=4)
        return cache


def _description(tp_size: int, block_size: int = 4) -> CacheDescription:
    return CacheDescription(
        engine_id=f"tp{tp_size}",
        num_layers=1,
        total_num_kv_heads=2,
        head_size=4,
        block_size=block_size,
        tp_size=tp_size,
        dtype="float32",
    )


_HND = ("kv", "block", "head", "token", "element")


def _permuted(moved: Moved) -> object:
    """In a separate storage, permute received pages from blocks of two tokens in HND to blocks of
    four tokens.
    """
    local = dataclasses.replace(_description(1), memory_order=_HND)
    remote = dataclasses.replace(_description(1, 2), memory_order=_HND)
    storage = KVStorage(8, 4, 2, 4, dtype=torch.float32, layout="HND")
    storage.pages.memory.copy_(moved.storage.pages.memory)
    permute_pages(storage, [[1], [2]], plan_transfer(local, remote, 0).permutation)
    return storage.pages.memory


_MOVES: dict[str, Callable[[Moved], object]] = {
    "write_kv": lambda s: ops.write_kv(*s.tokens, s.keys, s.values, s.slots),
    "gather_kv": lambda s: ops.gather_kv(s.keys, s.values, s.slots, *s.tokens),
    "copy_kv_blocks": Moved.copy_between,
    "permute_received_blocks": Moved.permute_received,
    "permute_pages": _permuted,
}


def _moved_trial(call: Callable[[Moved], object]) -> Trial:
    moved = Moved()
    return Trial(lambda: call(moved), moved.state, [])


def other_families() -> dict[str, Callable[[], list[Case]]]:
    """Return the functions that create the cases, keyed by name."""
    return {
        "constructors": lambda: [
            Case(
                name, lambda make=make: Trial(make, lambda: iter(()), []), name in _MADE_OF_TENSORS
            )
            for name, make in (_MADE | _MADE_OF_TENSORS).items()
        ],
        "given hashes": lambda: [
            Case(f"given hashes: {name}", lambda call=call: _given_trial(call))
            for name, call in _GIVEN.items()
        ],
        "bytes that move": lambda: [
            Case(f"bytes: {name}", lambda call=call: _moved_trial(call), spares_torch=True)
            for name, call in _MOVES.items()
        ],
    }
