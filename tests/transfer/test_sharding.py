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

SIZES = [1, 2, 3, 4, 6, 8, 12]


clashing = [(a, b) for a in SIZES for b in SIZES if a % b and b % a]


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
