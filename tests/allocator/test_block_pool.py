# SPDX-License-Identifier: Apache-2.0
"""Tests the block pool through its Python binding.

`test_eviction.py` compares the pool with a reference model.
"""

import subprocess
import sys
from time import process_time

import numpy as np
import pytest

from kvcache import BlockPool


def hashes(*numbers):
    out = np.zeros((len(numbers), 32), np.uint8)
    out[:, 0] = numbers
    return out


def test_hashes_that_differ_only_at_the_end_are_distinct():
    """The index stores tags derived from the first bytes of each hash, but compares complete hashes."""
    pool = BlockPool(5)
    ids = pool.allocate(2)
    both = hashes(7, 7)
    both[1, -1] = 1
    pool.publish(ids[:1], both[:1])
    assert pool.lookup(both, prefix=False).tolist() == [1, -1]
    pool.publish(ids[1:], both[1:])
    assert pool.lookup(both).tolist() == [1, 2]


def test_uncached_blocks_are_allocated_before_cached_ones_and_tails_before_heads():
    pool = BlockPool(5)
    ids = pool.allocate(4)
    pool.publish(ids[:3], hashes(1, 2, 3))
    pool.release(ids[::-1])
    assert pool.allocate(4).tolist() == [4, 3, 2, 1]
    assert pool.num_evicted == 3


def test_allocation_that_does_not_fit_changes_nothing():
    pool = BlockPool(5)
    held = pool.allocate(2)
    pool.publish(held, hashes(1, 2))
    pool.release(held)
    assert pool.allocate(5) is None
    assert pool.lookup(hashes(1, 2)).tolist() == [1, 2]
    assert pool.num_free == 4 and pool.num_evicted == 0


def test_lookup_finds_the_oldest_duplicate_of_a_hash():
    pool = BlockPool(5)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.publish(second, hashes(9))
    pool.publish(first, hashes(9))
    assert pool.num_cached == 2
    assert pool.lookup(hashes(9)).tolist() == second.tolist()
    pool.evict(second)
    assert pool.lookup(hashes(9)).tolist() == first.tolist()


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda p: p.release([0]), ValueError, "ids holds block 0: expected 1 to 4"),
    (lambda p: p.release([3]), ValueError, "block 3 more often than it is held"),
    (lambda p: p.release([1, 1]), ValueError, "block 1 more often than it is held"),
    (lambda p: p.release([1, 99]), ValueError, "ids holds block 99"),
    (lambda p: p.retain([3]), ValueError, "block 3, which is free and not cached"),
    (lambda p: p.retain([1, 7]), ValueError, "block 7: expected 1 to 4"),
    (lambda p: p.allocate(-1), ValueError, "n is -1: expected 0 or more"),
    (lambda p: p.publish([3], hashes(1)), ValueError, "block 3, which is free"),
    (lambda p: p.publish([2, 1], hashes(1, 2)), ValueError, "block 1, which is already published"),
    (lambda p: p.publish([2, 2], hashes(1, 2)), ValueError, "block 2, which is already published"),
    (lambda p: p.publish([2], hashes(1, 2)), ValueError, "ids has 1 entries, but hashes has 2"),
    (lambda p: p.publish([2], hashes(1), -1), ValueError, "group is -1: expected 0 to 255"),
    (lambda p: p.publish([2], hashes(1).T), TypeError, "hashes: expected a C-contiguous uint8"),
    (lambda p: p.lookup(np.zeros((1, 32))), TypeError, "hashes: expected a C-contiguous uint8"),
    (lambda p: p.release([2**40]), ValueError, r"ids\[0\] is 1099511627776: expected a 32-bit"),
    (lambda p: p.release(np.array([2**64 - 1], np.uint64)), ValueError, r"ids\[0\] is 18446"),
])  # fmt: skip
def test_invalid_call_is_reported_and_changes_nothing(call, error, message):
    pool = BlockPool(5)
    held = pool.allocate(2)
    pool.publish(held[:1], hashes(77))
    with pytest.raises(error, match=message):
        call(pool)
    pool.check_invariants()
    assert pool.ref_counts([1, 2, 3, 4]).tolist() == [1, 1, 0, 0]
    assert pool.num_free == 2 and pool.num_cached == 1
    assert pool.lookup(hashes(77)).tolist() == [1]
    assert pool.allocate(2).tolist() == [3, 4]


@pytest.mark.parametrize("size", [-5, 0, 1, 2**31])
def test_invalid_pool_size_is_reported(size):
    with pytest.raises(ValueError, match=f"num_blocks is {size}: expected 2 to 2147483647"):
        BlockPool(size)
    with pytest.raises(ValueError, match=f"num_blocks is {2**64}: expected at most 2147483647"):
        BlockPool(2**64)
    with pytest.raises(TypeError, match=r"num_blocks is 5\.0: expected an integer"):
        BlockPool(5.0)


def test_crafted_hash_collisions_do_not_slow_lookups():
    """The hashes have equal first bytes, or words whose XOR is 0. Such hashes do not collide,
    because their positions in the index depend on a secret key.
    """
    n = 20_000
    others = np.random.default_rng(1).integers(0, 256, (n, 32), np.uint8)
    chosen = np.zeros((n, 4), np.uint64)
    chosen[:, 2] = chosen[:, 3] = np.arange(n, dtype=np.uint64) << np.uint64(40)

    def seconds(hashes):
        pool = BlockPool(n + 1)
        ids = pool.allocate(n)
        start = process_time()
        pool.publish(ids, hashes)
        assert pool.lookup(hashes).tolist() == ids.tolist()
        pool.evict(ids)
        return process_time() - start

    attack = chosen.view(np.uint8)
    ratios = [seconds(attack) / seconds(others) for _ in range(5)]
    assert min(ratios) < 5  # a scan over all colliding entries would make the ratio exceed 100


def test_hashes_that_are_not_cached_are_not_found_among_many():
    """The index compares whole hashes: some of these have the same 31 bits of their keys."""
    n = 300_000
    hashes = np.random.default_rng(2).integers(0, 256, (2 * n, 32), np.uint8)
    pool = BlockPool(n + 1)
    ids = pool.allocate(n)
    pool.publish(ids, hashes[:n])
    assert (pool.lookup(hashes[:n], prefix=False) == ids).all()
    assert (pool.lookup(hashes[n:], prefix=False) == -1).all()


@pytest.mark.slow
def test_pool_uses_at_most_100_bytes_per_block_and_almost_none_before_its_first_use():
    """Measures the resident memory of a pool in which all blocks are used and that of an unused
    pool.
    """
    program = """
import resource, numpy as np
from kvcache import BlockPool
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = resident()
unused = BlockPool(10_000_001)
constructed = resident() - before
pool = BlockPool(1_000_001)
before = resident()
for start in range(0, 1_000_000, 10_000):
    ids = pool.allocate(10_000)
    hashes = np.random.default_rng(start).integers(0, 256, (10_000, 32), np.uint8)
    pool.publish(ids, hashes)
print(constructed, resident() - before, pool.num_bytes)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    constructed, used, claimed = map(int, done.stdout.split())
    assert constructed < 16 << 20
    assert used <= 100 * 1_000_000
    assert claimed <= 100 * 1_000_000


def test_old_blocks_stay_uncached_when_epoch_numbers_wrap_around():
    """Epoch numbers have 16 bits, so old blocks could appear to be current after the numbers wrap
    around.
    """
    pool = BlockPool(4)
    for id in pool.allocate(2):
        pool.publish([id], hashes(id))
        pool.release([id])
    for _ in range(2**16 + 2):
        assert pool.reset()
        pool.check_invariants()
    assert pool.num_cached == 0 and pool.lookup(hashes(1)).tolist() == [-1]
