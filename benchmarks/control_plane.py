# SPDX-License-Identifier: Apache-2.0
"""Measures hashing, the block pool, decode steps, lookups, and a replay of the conversation trace."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time

import numpy as np

from benchmarks import peers
from benchmarks.measure import Result, median_times
from kvcache import BlockPool, KVCacheManager, Request, hash_blocks

TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl"


def hashing() -> Iterator[Result]:
    """Hash a prompt of 131,072 tokens in blocks of 16."""
    tokens = np.random.default_rng(0).integers(0, 152_000, 131_072).astype(np.int32)
    as_list, num_blocks = tokens.tolist(), len(tokens) // 16
    raw = tokens.tobytes()

    def slices() -> None:
        parent = bytes(32)
        for i in range(0, len(raw), 64):
            parent = hashlib.sha256(parent + raw[i : i + 64]).digest()

    assert bytes(hash_blocks(tokens, 16)[-1]) == peers.hash_blocks(as_list, 16)[-1]
    ours, cbor, plain = median_times(
        lambda: hash_blocks(tokens, 16), lambda: peers.hash_blocks(as_list, 16), slices
    )
    to_ns = 1e9 / num_blocks
    name = "block hash, 16 tokens, SHA-256 over canonical CBOR"
    yield Result(name, "ns/block", ours * to_ns, cbor * to_ns, "cbor2 + hashlib", 300)
    peer = "hashlib alone, raw bytes"
    yield Result(f"{name}, beside hashlib", "ns/block", ours * to_ns, plain * to_ns, peer)


def pool() -> Iterator[Result]:
    """Measure pools of one million and ten million blocks."""
    ours, peer = median_times(
        lambda: BlockPool(1_000_001), lambda: peers.PrefixCache(1_000_001), rounds=3
    )
    yield Result("pool of 1 million blocks, construct", "s", ours, peer, "Python lists", 0.2)
    (ten,) = median_times(lambda: BlockPool(10_000_001), rounds=3)
    yield Result("pool of 10 million blocks, construct", "s", ten, bar=2.0)
    size = BlockPool(1_000_001).num_bytes / 1_000_001
    yield Result("native pool", "bytes/block", size, bar=100)


def _lives(pool: BlockPool, size: int, num_requests: int) -> Callable[[], None]:
    """Return a function that serves `num_requests` new requests of `size` blocks per call."""
    random = np.random.default_rng(0)
    hashes = random.integers(0, 256, (num_requests, size, 32), np.uint8)
    prefixes = 16 * np.arange(size, 0, -1)

    def serve() -> None:
        hashes.view(np.uint64)[..., 0] += np.uint64(0x9E3779B97F4A7C15)
        for each in hashes:
            ids = pool.allocate(size)
            assert ids is not None
            pool.publish(ids, each)
            pool.notify_release(ids[::-1], prefixes, tokens_per_block=16)
            pool.release(ids[::-1])

    while pool.num_evicted == 0:
        serve()
    return serve


def eviction() -> Iterator[Result]:
    """Compare the learned policy with LRU on requests of 64 blocks in a full pool.

    Each request allocates blocks (which evicts the same number), publishes them and releases them.
    No request finds cached blocks. The learned policy uses a fixed amount of memory for records of
    released blocks and for simulated pools, 12 bytes per block, and 32 bytes per segment. The pool
    uses 8 more bytes per block to find the candidates of any policy.
    """

    def extra_bytes(num_blocks: int) -> int:
        learned, lru = (
            BlockPool(num_blocks, eviction).num_bytes for eviction in ("learned", "lru")
        )
        return learned - lru

    fixed = extra_bytes(2)
    yield Result("learned: memory beyond that of lru, fixed", "MB", fixed / 1e6, bar=0.7)
    size = 64
    for num_blocks, num_requests in ((20_000, 1_000), (200_000, 4_000)):
        pools = [BlockPool(num_blocks + 1, eviction) for eviction in ("learned", "lru")]
        serves = [_lives(pool, size, num_requests) for pool in pools]
        learned, lru = (1e9 / size / num_requests * t for t in median_times(*serves, rounds=15))
        name = "a block's life: allocated, evicting; published; released"
        name = f"{name}, of {num_blocks:,}: learned"
        yield Result(name, "ns", learned, lru, "lru", lru + 60)
        more = (pools[0].num_bytes - pools[1].num_bytes - fixed) / num_blocks
        name = f"learned: memory beyond that of lru, without the fixed, of {num_blocks:,}"
        yield Result(name, "bytes/block", more, bar=18)
    wide = (extra_bytes(1_000_002) - fixed) / 1_000_000
    name = "learned: memory beyond that of lru, without the fixed, of 1 million unused"
    yield Result(name, "bytes/block", wide, bar=16)

    def decode_step(eviction: str) -> Callable[[], object]:
        manager = KVCacheManager(16, 65_537, 2**20, num_preallocate_tokens=0, eviction=eviction)
        new = [Request(str(i), np.arange(64 + i % 16, dtype=np.int32) + i) for i in range(256)]
        rows, ones = manager.step(new=new).rows, np.ones(256, np.int32)
        return lambda: manager.step(rows, ones, token_ids=ones)

    learned, lru = median_times(decode_step("learned"), decode_step("lru"), rounds=400)
    name = "decode step of 256 rows, tokens and hashes: learned"
    yield Result(name, "us", learned * 1e6, lru * 1e6, "lru", 1.03 * lru * 1e6)


def misses() -> Iterator[Result]:
    """Measure the overhead of `explain_misses` by comparing managers with and without it.

    Requests of 4,000 tokens are created, hashed, admitted and freed in a full pool of 50,000
    blocks. All requests share the first 200 tokens.
    """
    random, shared = np.random.default_rng(0), np.arange(200, dtype=np.int32)

    def serve(explain_misses: int | None) -> Callable[[], None]:
        manager = KVCacheManager(
            16, 50_001, 2**20, num_preallocate_tokens=0, explain_misses=explain_misses
        )
        prompts = random.integers(0, 2**31 - 1, (280, 3_800)).astype(np.int32)
        numbers = itertools.count()

        def run() -> None:
            for _ in range(280):
                number = next(numbers)
                tokens = np.concatenate([shared, prompts[number % 280]])
                request = Request(str(number), tokens)
                manager.step(new=[request])
                manager.free(request)

        run()  # fills the pool
        return run

    options, to_us = (None, 4_096, 64, 8, 1), 1e6 / 280
    off, *others = median_times(*map(serve, options), rounds=11)
    for one_of, taken in zip(options[1:], others):
        name = f"admission of 4,000 tokens, explain_misses={one_of:,}"
        yield Result(name, "us", taken * to_us, off * to_us, "off", 1.01 * off * to_us)


def decode(num_rows: int, with_tokens: bool) -> Iterator[Result]:
    """Measure decode steps with one token per request, blocks of 16 tokens, and caching enabled."""
    num_steps, random = 65, np.random.default_rng(0)
    prompts = [random.integers(0, 152_000, 64 + i % 16).astype(np.int32) for i in range(num_rows)]
    sampled = random.integers(0, 152_000, num_rows).astype(np.int32)
    num_blocks = num_rows * (128 + num_steps) // 16 + 1
    manager = KVCacheManager(16, num_blocks, 2**20, num_preallocate_tokens=0)
    rows = manager.step(new=[Request(str(i), each) for i, each in enumerate(prompts)]).rows
    ones = np.ones(num_rows, np.int32)
    cache = peers.PrefixCache(num_blocks)
    running = [peers.Sequence(cache, each.tolist(), 16) for each in prompts]
    as_list = sampled.tolist()
    ours, peer = median_times(
        lambda: manager.step(rows, ones, token_ids=sampled if with_tokens else None),
        lambda: peers.decode_step(cache, running, 16, as_list if with_tokens else None),
        rounds=num_steps - 1,
    )
    # Both must have allocated the same number of blocks.
    assert manager.pool.num_free == len(cache.free_blocks)
    what = "tokens and hashes too" if with_tokens else "allocation only"
    name, bar = f"decode step, {num_rows:,} rows, {what}", 0.6 if with_tokens else 0.5
    to_us = 1e6 / num_rows
    yield Result(name, "us/row", ours * to_us, peer * to_us, "Python, row by row", bar)


def cold_lookup() -> Iterator[Result]:
    """Measure the lookup of an uncached prompt of 131,072 tokens: hashing and a single miss."""
    tokens = np.random.default_rng(1).integers(0, 152_000, 131_072).astype(np.int32)
    manager = KVCacheManager(16, 100_001, 2**20)
    hashed = Request("hashed", tokens)
    manager.cache.hashes(hashed)
    number = itertools.count()
    cold, miss, hashing_alone = median_times(
        lambda: manager.cache.find_prefix(Request(str(next(number)), tokens)),
        lambda: manager.cache.find_prefix(hashed),
        lambda: manager.cache.hashes(Request(str(next(number)), tokens)),
    )
    name = "look-up of a cold prompt of 131,072 tokens"
    yield Result(name, "us", cold * 1e6, hashing_alone * 1e6, "its hashing alone")
    yield Result(f"{name}, with its hashes given: one miss", "us", miss * 1e6)


def replay(block_size: int, num_requests: int, rounds: int) -> Iterator[Result]:
    """Measure lookup, allocation and release per request of the trace, with a pool of 5.12 M tokens."""
    from kvcache_lab import read_mooncake

    num_blocks = 10_000 * (512 // block_size) + 1
    items = list(itertools.islice(read_mooncake(TRACE), num_requests))
    lengths = [item.num_tokens for item in items]
    times: dict[str, list[float]] = {}

    def manager() -> KVCacheManager:
        return KVCacheManager(block_size, num_blocks, 2**31 - 1, num_preallocate_tokens=0)

    def timed(name: str, call: Callable, cache: object, *arguments: object) -> object:
        start = process_time()
        answer = call(cache, *arguments)
        times.setdefault(name, []).append(process_time() - start)
        return answer

    for _ in range(rounds):
        requests = [Request(str(item.index), item.token_ids) for item in items]
        hashes = timed("hash", _hashes_of, manager(), requests)
        as_bytes = [[row.tobytes() for row in each] for each in hashes]
        cache = peers.PrefixCache(num_blocks)
        hits = {
            "ours": timed("ours", _replay_ours, manager(), requests, 1),
            "16 at a time": timed("16 at a time", _replay_ours, manager(), requests, 16),
            "peer": timed("peer", _replay_peer, cache, as_bytes, lengths, block_size),
        }
        # The comparison is meaningful only if all caches have the same hits. A batch can evict blocks
        # that its own requests would have hit.
        assert hits["peer"] == hits["ours"], hits
        assert abs(hits["16 at a time"] - hits["ours"]) <= 0.1 * hits["ours"], hits
    us = {name: min(taken) / len(items) * 1e6 for name, taken in times.items()}
    blocks = round(sum(lengths) / len(items) / block_size)
    name = f"trace replay, {block_size}-token blocks ({blocks} per request)"
    unit, peer, bar = "us/request", "Python dictionaries", {512: 6, 16: 60}[block_size]
    yield Result(name, unit, us["ours"], us["peer"], peer, bar)
    yield Result(f"{name}, 16 requests a call", unit, us["16 at a time"], us["peer"], peer, bar)
    if block_size == 16:
        yield Result(f"{name}, hashing its prompts", unit, us["hash"], bar=200)


def _hashes_of(manager: KVCacheManager, requests: list[Request]) -> list[np.ndarray]:
    return [manager.cache.hashes(request) for request in requests]


def _replay_ours(manager: KVCacheManager, requests: list[Request], num_at_a_time: int) -> int:
    if num_at_a_time == 1:
        for request in requests:
            manager.step(new=[request])
            manager.free(request)
    else:
        for i in range(0, len(requests), num_at_a_time):
            batch = requests[i : i + num_at_a_time]
            manager.step(new=batch)
            manager.free(*batch)
    return manager.cache.stats.hit_tokens // manager.block_sizes[0]


def _replay_peer(
    cache: peers.PrefixCache, hashes: list[list[bytes]], lengths: list[int], block_size: int
) -> int:
    num_hits = 0
    for each, length in zip(hashes, lengths, strict=True):
        hits = cache.lookup(each[: (length - 1) // block_size])
        table = cache.allocate(hits, each, -(-length // block_size))
        cache.free(table)
        num_hits += len(hits)
    return num_hits


def all_results() -> Iterator[Result]:
    yield from hashing()
    yield from pool()
    yield from eviction()
    yield from misses()
    for num_rows in (64, 1024, 8192):
        yield from decode(num_rows, with_tokens=False)
        yield from decode(num_rows, with_tokens=True)
    yield from cold_lookup()
    if not TRACE.exists():
        print("trace replay: SKIPPED, no ../shared/traces beside the project")
        return
    yield from replay(512, 12_031, rounds=5)
    yield from replay(16, 1_500, rounds=3)
