"""The pool through its Python binding; `csrc/tests/test_block_pool.cpp` drives it against a model."""

import subprocess
import sys

import numpy as np
import pytest

from kvcache import BlockPool


def hashes(*numbers):
    out = np.zeros((len(numbers), 32), np.uint8)
    out[:, 0] = numbers
    return out


def test_allocate_publish_release_lookup_hit():
    pool = BlockPool(5)
    ids = pool.allocate(3)
    assert ids.dtype == np.int32 and ids.tolist() == [1, 2, 3]
    pool.publish(ids[:2], hashes(1, 2))
    pool.release(ids[::-1])
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.lookup(hashes(1, 2, 3)).tolist() == [1, 2, -1]
    pool.retain([1])
    assert pool.num_free == 3 and pool.ref_counts([1, 2]).tolist() == [1, 0]
    pool.check_invariants()


def test_hashes_that_differ_only_at_the_end_are_two():
    """The index keeps tags of the first bytes; the whole hash decides."""
    pool = BlockPool(5)
    ids = pool.allocate(2)
    both = hashes(7, 7)
    both[1, -1] = 1
    pool.publish(ids[:1], both[:1])
    assert pool.lookup(both, prefix=False).tolist() == [1, -1]
    pool.publish(ids[1:], both[1:])
    assert pool.lookup(both).tolist() == [1, 2]


def test_uncached_blocks_go_before_cached_ones_and_tails_before_heads():
    pool = BlockPool(5)
    ids = pool.allocate(4)
    pool.publish(ids[:3], hashes(1, 2, 3))
    pool.release(ids[::-1])
    assert pool.allocate(4).tolist() == [4, 3, 2, 1]
    assert pool.num_evicted == 3


def test_what_does_not_fit_changes_nothing():
    pool = BlockPool(5)
    held = pool.allocate(2)
    pool.publish(held, hashes(1, 2))
    pool.release(held)
    assert pool.allocate(5) is None
    assert pool.lookup(hashes(1, 2)).tolist() == [1, 2]
    assert pool.num_free == 4 and pool.num_evicted == 0


def test_duplicates_of_one_hash_are_both_kept_and_the_oldest_is_found():
    pool = BlockPool(5)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.publish(second, hashes(9))
    pool.publish(first, hashes(9))
    assert pool.num_cached == 2
    assert pool.lookup(hashes(9)).tolist() == second.tolist()
    pool.evict(second)
    assert pool.lookup(hashes(9)).tolist() == first.tolist()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: p.release([5]), ValueError, "ids holds block 5: expected 1 to 4"),
        (lambda p: p.release([-1]), ValueError, "ids holds block -1: expected 1 to 4"),
        (lambda p: p.release([0]), ValueError, "ids holds block 0: expected 1 to 4"),
        (lambda p: p.release([3]), ValueError, "block 3 more often than it is held"),
        (lambda p: p.release([1, 1]), ValueError, "block 1 more often than it is held"),
        (lambda p: p.release([1, 99]), ValueError, "ids holds block 99"),
        (lambda p: p.retain([3]), ValueError, "block 3, which is free and not cached"),
        (lambda p: p.retain([1, 7]), ValueError, "block 7: expected 1 to 4"),
        (lambda p: p.allocate(-1), ValueError, "n is -1: expected 0 or more"),
        (lambda p: p.publish([3], hashes(1)), ValueError, "block 3, which is free"),
        (
            lambda p: p.publish([2, 1], hashes(1, 2)),
            ValueError,
            "block 1, which is already published",
        ),
        (
            lambda p: p.publish([2, 2], hashes(1, 2)),
            ValueError,
            "block 2, which is already published",
        ),
        (lambda p: p.publish([2], hashes(1, 2)), ValueError, "ids has 1 entries, hashes has 2"),
        (lambda p: p.publish([2], hashes(1), -1), ValueError, "group is -1: expected 0 to 255"),
        (lambda p: p.publish([2], hashes(1).T), TypeError, "hashes: expected a C-contiguous uint8"),
        (lambda p: p.lookup(np.zeros((1, 32))), TypeError, "hashes: expected a C-contiguous uint8"),
        (lambda p: p.lookup(np.zeros(32, np.uint8)), TypeError, "of shape"),
        (lambda p: p.release([1.5]), TypeError, "ids has dtype float64: expected integers"),
        (lambda p: p.release([[1]]), ValueError, "ids has 2 dimensions: expected 1"),
        (lambda p: p.release([2**40]), ValueError, r"ids\[0\] is 1099511627776: expected a 32-bit"),
        (lambda p: p.release(np.array([2**64 - 1], np.uint64)), ValueError, r"ids\[0\] is 18446"),
        (lambda p: p.release("ab"), TypeError, "ids"),
        (lambda p: p.allocate(2**64), ValueError, "n is 18446744073709551616: expected at most"),
        (lambda p: p.allocate(1.5), TypeError, "n is 1.5: expected an integer"),
        (lambda p: p.publish([2], hashes(1), 2**64), ValueError, "group is 18446744073709551616"),
        (lambda p: p.lookup(hashes(1), 0.5), TypeError, "group is 0.5: expected an integer"),
    ],
)
def test_a_wrong_call_is_named_and_changes_nothing(call, error, message):
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
def test_a_size_that_makes_no_pool_is_named(size):
    with pytest.raises(ValueError, match=f"num_blocks is {size}: expected 2 to 2147483647"):
        BlockPool(size)
    with pytest.raises(ValueError, match=f"num_blocks is {2**64}: expected at most 2147483647"):
        BlockPool(2**64)
    with pytest.raises(TypeError, match=r"num_blocks is 5\.0: expected an integer"):
        BlockPool(5.0)


def test_made_up_hashes_that_fill_every_bucket_do_not_hang_a_search():
    """Every bucket of the index ends up with an entry displaced over it: only a count ends a walk."""
    program = """
import numpy as np
from kvcache import BlockPool
NUM_BUCKETS, INVERSE = 3, pow(0x9E3779B97F4A7C15, -1, 1 << 64)  # csrc/core/pool/hash_index.cpp
count = 0
def crafted(bucket):
    global count
    count += 1
    tag = (bucket << 32) // NUM_BUCKETS + (1 << 20) + 2 * count | 1
    word = (tag << 32) * INVERSE % (1 << 64)
    return np.frombuffer(word.to_bytes(8, "little") + bytes([count] * 24), np.uint8)
pool = BlockPool(12)
def fill(bucket, n):
    ids = pool.allocate(n)
    pool.publish(ids, np.stack([crafted(bucket) for _ in range(n)]))
    return ids
def drop(ids):
    pool.evict(ids)
    pool.release(ids)
full = fill(0, 7); fill(0, 1); drop(full)
full = fill(1, 6); fill(1, 1); drop(full)
held = fill(2, 6); fill(2, 1)
miss = crafted(0)[None]
assert pool.lookup(miss).tolist() == [-1]
pool.publish(pool.allocate(1), miss)
second = pool.allocate(1)
pool.publish(second, miss)
pool.evict(second)  # the younger of two has no entry: the search for it finds none
pool.check_invariants()
print(pool.num_cached)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("10\n", "")


def test_at_most_100_bytes_per_block_and_a_large_pool_costs_nothing_to_construct():
    """Resident memory of a pool whose every block was used, and of one that was not."""
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
