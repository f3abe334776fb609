# SPDX-License-Identifier: Apache-2.0
"""The heads and layers of each rank are complete and not split, and conflicting sizes are rejected."""

import pytest

from kvcache.transfer.sharding import (
    equal_stages,
    heads_of_rank,
    layers_of_rank,
    ranks_of_head,
    reader_of_head,
    replica_for,
    size_ratio,
    sources_of_rank,
)
from tests.machinery.shared import sampled

SIZES = [1, 2, 3, 4, 6, 8, 12]
dividing = [(a, b) for a in SIZES for b in SIZES if a % b == 0 or b % a == 0]
clashing = [(a, b) for a in SIZES for b in SIZES if a % b and b % a]


@pytest.mark.parametrize(("heads", "tp_size"), dividing)
def test_ranks_hold_all_heads_equally_and_in_order(heads, tp_size):
    held = [heads_of_rank(heads, tp_size, rank) for rank in range(tp_size)]
    assert {len(h) for h in held} == {max(1, heads // tp_size)}
    times = max(1, tp_size // heads)
    assert [head for h in held for head in h] == [h for h in range(heads) for _ in range(times)]


@pytest.mark.parametrize(("heads", "tp_size"), dividing)
def test_ranks_of_a_head_hold_the_head(heads, tp_size):
    for head in range(heads):
        holders = [r for r in range(tp_size) if head in heads_of_rank(heads, tp_size, r)]
        assert list(ranks_of_head(heads, tp_size, head)) == holders


@pytest.mark.parametrize(("heads", "tp_size"), dividing)
@pytest.mark.parametrize("num_readers", sampled([3, 8, 1, 2, 4, 24], 2))
def test_readers_of_a_head_are_spread_evenly_over_its_replicas(heads, tp_size, num_readers):
    for head in range(heads):
        ranks = ranks_of_head(heads, tp_size, head)
        chosen = [replica_for(head, heads, tp_size, i, num_readers) for i in range(num_readers)]
        assert set(chosen) <= set(ranks)
        loads = [chosen.count(rank) for rank in ranks]
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("pp_size", [1, 2, 3, 4, 6, 12])
def test_pipeline_ranks_hold_equal_runs_of_layers(pp_size):
    held = [layers_of_rank(12, pp_size, rank) for rank in range(pp_size)]
    assert {len(h) for h in held} == {12 // pp_size}
    assert [layer for h in held for layer in h] == list(range(12))


@pytest.mark.parametrize(("local", "remote"), dividing)
def test_ratio_is_negative_if_remote_is_larger(local, remote):
    ratio = size_ratio(local, remote, "size")
    assert (ratio < 0) == (remote > local)
    assert local == remote * ratio if ratio > 0 else remote == local * -ratio
    assert size_ratio(remote, local, "size") == (1 if ratio == 1 else -ratio)


@pytest.mark.parametrize(("a", "b"), clashing)
def test_indivisible_sizes_are_reported(a, b):
    with pytest.raises(ValueError, match=f"total_num_kv_heads is {a}, tp_size is {b}:"):
        heads_of_rank(a, b, 0)
    with pytest.raises(ValueError, match=f"total_num_kv_heads is {a}, tp_size is {b}:"):
        ranks_of_head(a, b, 0)
    with pytest.raises(ValueError, match=f"local block_size is {a}, remote block_size is {b}:"):
        size_ratio(a, b, "block_size")


def test_uneven_layers_are_reported():
    with pytest.raises(ValueError, match="num_layers is 30, pp_size is 4:"):
        layers_of_rank(30, 4, 0)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: heads_of_rank(8, 4, 4), "tp_rank is 4: expected 0 to 3"),
    (lambda: heads_of_rank(8, 4, -1), "tp_rank is -1: expected 0 to 3"),
    (lambda: heads_of_rank(0, 4, 0), "total_num_kv_heads is 0"),
    (lambda: heads_of_rank(8, 0, 0), "tp_size is 0"),
    (lambda: ranks_of_head(8, 4, 8), "head is 8: expected 0 to 7"),
    (lambda: layers_of_rank(8, 4, 4), "pp_rank is 4: expected 0 to 3"),
    (lambda: layers_of_rank(8, 0, 0), "pp_size is 0"),
    (lambda: layers_of_rank(0, 1, 0), "num_layers is 0"),
    (lambda: replica_for(0, 1, 4, 2, 2), "reader is 2: expected 0 to 1"),
    (lambda: replica_for(0, 1, 4, 0, 0), "num_readers is 0"),
    (lambda: replica_for(2, 2, 4), "head is 2: expected 0 to 1"),
    (lambda: size_ratio(0, 4, "tp_size"), "local tp_size is 0"),
    (lambda: size_ratio(4, -4, "tp_size"), "remote tp_size is -4"),
])  # fmt: skip
def test_values_out_of_range_are_reported(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_readers_are_balanced_over_separate_replicas():
    """Which replica a reader uses is part of the interface, because both engines compute it
    independently.
    """
    assert [replica_for(1, 2, 8, reader, 2) for reader in range(2)] == [4, 6]
    assert [replica_for(0, 1, 4, reader, 3) for reader in range(3)] == [0, 1, 2]
    assert [replica_for(0, 1, 2, reader, 4) for reader in range(4)] == [0, 0, 1, 1]


def test_adjacent_stages_do_not_read_each_other():
    stages = equal_stages(4, 2, 1)
    assert [sources_of_rank(stages, stages, 1, stage, 0) for stage in (0, 1)] == [
        [(0, 0)],
        [(1, 0)],
    ]


def test_readers_of_a_head_are_numbered_over_all_stages():
    readers = [reader_of_head(0, 1, [2, 2], stage=s, tp_rank=r) for r in (0, 1) for s in (0, 1)]
    assert readers == [(0, 4), (1, 4), (2, 4), (3, 4)]
