"""Prefill in one vLLM engine, decode in another: the same answers as one engine's, whatever fails.

`make test-vllm` runs this with vLLM; elsewhere it is skipped.
"""

import random

import pytest

pytest.importorskip("vllm")

from tests.vllm_layouts import Side, check_blocks, random_case, read_all, some_blocks

SIZES = [(32, 32), (32, 64), (64, 32), (96, 64)]


@pytest.mark.parametrize("heads,local_tp,remote_tp", [(2, 1, 1), (2, 1, 2), (4, 2, 1), (2, 4, 2)])
@pytest.mark.parametrize("local_size,remote_size", SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_every_element_of_a_cpu_cache_arrives(
    seed, local_size, remote_size, heads, local_tp, remote_tp
):
    local, remote, *blocks = random_case(seed, local_size, remote_size, local_tp, remote_tp, heads)
    read_all(local, remote, *blocks)
    check_blocks(local, *blocks, remote_size)


@pytest.mark.parametrize("orders", [("HND", "NHD"), ("NHD", "HND"), ("NHD", "NHD")])
@pytest.mark.parametrize("tp_sizes", [(1, 2), (2, 1)])
@pytest.mark.parametrize("pages_per_block", [1, 2])
def test_every_element_of_a_cache_by_tokens_arrives(pages_per_block, tp_sizes, orders):
    rng = random.Random(7)
    options = {"interior": "by token", "pages_per_block": pages_per_block}
    local = Side((2, 4, 4), 32, tp_sizes[0], order=orders[0], **options)
    remote = Side((2, 4, 4), 64, tp_sizes[1], order=orders[1], interior="by token")
    blocks = some_blocks(rng, 200, 32), some_blocks(rng, 200, 64)
    remote.fill(blocks[1])
    read_all(local, remote, *blocks)
    check_blocks(local, *blocks, 64)


def test_neighbouring_blocks_of_equal_engines_are_one_read_per_layer():
    local, remote = Side((3, 2, 4), 32, 1), Side((3, 2, 4), 32, 1)
    blocks = [4, 5, 6, 7], [1, 2, 3, 4]
    remote.fill(blocks[1])
    assert read_all(local, remote, *blocks) == 3
    check_blocks(local, *blocks, 32)
