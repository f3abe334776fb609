# SPDX-License-Identifier: Apache-2.0
"""Transfer plans executed on real storages: addresses, bytes, and the permutation by the op."""

import ctypes
import itertools

import numpy as np
import pytest
import torch

from kvcache import KVStorage, Pages
from kvcache.layouts import backend
from kvcache.transfer import (
    CacheDescription,
    StateDescription,
    StateTensor,
    permute_pages,
    plan_states,
    plan_transfer,
    region_addresses,
)

LAYERS, HEADS = 2, 4
OPTIONS = {
    "apart": {"backend": "FLASH_ATTN"},
    "blocks_first": {"backend": "FLASHINFER"},
    "block_major": {"backend": "BLOCK_MAJOR", "cross_layers": True},
    "side by side": {"backend": "FLASH_ATTN_DIFFKV"},
    "heads first": {"backend": "TRITON_ATTN", "cross_layers": True},
}


def side(block_size=4, layout="HND", packing="apart", tp_size=1, v_head_size=8, **more):
    options = dict(OPTIONS[packing])
    described = backend(options.pop("backend", "FLASH_ATTN"))
    return CacheDescription(
        engine_id="e", num_layers=LAYERS, total_num_kv_heads=HEADS, head_size=8, dtype="float16",
        v_head_size=v_head_size, block_size=block_size, tp_size=tp_size,
        memory_order=described.memory_order(layout, **options), **more,
    )  # fmt: skip


def storage_of(description, packing, num_blocks=40, **more):
    storage = KVStorage(
        num_blocks, description.block_size, description.heads_per_rank, 8, num_layers=LAYERS,
        dtype=torch.float16, v_head_size=description.v_head_size, layout=description.layout,
        **OPTIONS[packing], **more,
    )  # fmt: skip
    assert storage.memory_order == description.memory_order
    return storage


def move(runs, here, there):
    """Copy the bytes of a plan, for the addresses of regions here and on each remote rank."""
    for rank, region, offset, to_region, to_offset, length in zip(*(c.tolist() for c in runs)):
        ctypes.memmove(int(here[to_region]) + to_offset, int(there[rank][region]) + offset, length)


def move_runs(plan, mine, theirs, to, from_):
    """Copy pages `theirs` of remote storages to pages `mine` of a local storage, and permute them.

    `to`, `from_`: a description, and the storage or storages.
    """
    here = region_addresses(to[0], to[1].pages)
    there = [region_addresses(from_[0], each.pages) for each in from_[1]]
    move(plan.apply(mine, theirs).expand(), here, there)
    permute_pages(to[1], mine, plan.permutation)


def test_ranks_of_uneven_stages_have_own_addresses():
    described = CacheDescription(
        engine_id="e", num_layers=4, total_num_kv_heads=HEADS, head_size=8, dtype="float16",
        block_size=4, stages=[(3, 1), (1, 2)], memory_order=backend("FLASH_ATTN").memory_order("NHD"),
    )  # fmt: skip
    for rank, (layers, heads) in enumerate(((3, 4), (1, 2), (1, 2))):
        options = {"num_layers": layers, "dtype": torch.float16, "backend": "FLASH_ATTN"}
        storage = KVStorage(9, 4, heads, 8, **options)
        found = region_addresses(described, storage.pages, rank) - storage.pages.base
        assert found.tolist() == storage.pages.offsets.tolist()
    with pytest.raises(ValueError, match="placement of engine 'e' differs by stage: use stage_of"):
        region_addresses(described, storage.pages)
    with pytest.raises(ValueError, match="pages have 1 layers, but the description has 3 per"):
        region_addresses(described, storage.pages, 0)


def test_states_arrive_in_pages_that_groups_share():
    """Two ranks send to one rank the states of a convolution with 4 heads and 2 groups and of an
    SSM with 4 heads.
    """
    tensors = [
        StateTensor(sections=[(4, 3), (2, 2), (2, 2)], row_size=3),
        StateTensor(sections=[(4, 1)], row_size=5, dtype="float32"),
    ]
    whole = StateDescription(engine_id="d", num_layers=LAYERS, tensors=tensors, page_stride=512)
    half = StateDescription(engine_id="p", num_layers=LAYERS, tensors=tensors, tp_size=2)
    own = Pages.allocate(9, [[512]] * LAYERS)
    theirs = [Pages.allocate(9, [[half.state_bytes(rank)]] * LAYERS) for rank in range(2)]
    for pages in (own, *theirs):
        pages.memory.random_(0, 256)
    plan = plan_states(whole, half, 0)
    here = region_addresses(whole, own)
    there = [region_addresses(half, pages, rank) for rank, pages in enumerate(theirs)]
    runs = plan.apply(np.array([5, 2]), np.array([8, 3])).expand()
    move(runs, here, there)
    for layer, (page, source) in itertools.product(range(LAYERS), ((5, 8), (2, 3))):
        state = own.layer(layer)[page, : whole.state_bytes(0)]
        conv, ssm = state[: 20 * 3 * 2].view(20, 6), state[20 * 3 * 2 :].view(4, 20)
        parts = [pages.layer(layer)[source] for pages in theirs]
        convs = [part[: 10 * 3 * 2].view(10, 6) for part in parts]
        channels = [each[rows] for rows in (slice(6), slice(6, 8), slice(8, 10)) for each in convs]
        # The channels consist of slices from both ranks, first for x, and then for B and C.
        assert torch.equal(conv, torch.cat(channels))
        assert torch.equal(ssm, torch.cat([part[10 * 3 * 2 :].view(2, 20) for part in parts]))


@pytest.mark.parametrize(("changes", "sizes"), [
    ({}, [[24]] * 2),
    ({}, [[32]] * 3),
    ({}, [[32]]),
    ({"page_stride": 64}, [[32]] * 2),
    ({}, [[16, 16]] * 2),
])  # fmt: skip
def test_pages_of_other_states_are_rejected(changes, sizes):
    tensors = [StateTensor(sections=[(4, 4)])]
    described = StateDescription(engine_id="e", num_layers=2, tensors=tensors, **changes)
    with pytest.raises(
        ValueError, match=r"expected 2 layers of one fragment, 32 bytes or more, (32|64) ap"
    ):
        region_addresses(described, Pages.allocate(9, sizes))
    unlike = StateDescription(engine_id="e", num_layers=2, tensors=tensors, stages=[(1, 1), (1, 2)])
    with pytest.raises(ValueError, match="stages of engine 'e' differ: pass a rank"):
        region_addresses(unlike, Pages.allocate(9, [[32]]))


def test_shared_pages_are_described_by_their_stride():
    pages = Pages.allocate(40, [[2048]] * LAYERS)
    local = side(packing="blocks_first", page_stride=2048)
    storage = KVStorage.over(pages, 4, HEADS, 8, dtype=torch.float16, layout="HND")
    found = region_addresses(local, pages) - pages.base
    assert found.tolist() == pages.offsets.tolist()
    remote = side(packing="blocks_first")
    source = storage_of(remote, "blocks_first")
    source.pages.memory.random_(0, 120)
    there = region_addresses(remote, source.pages)
    plan = plan_transfer(local, remote, 0)
    runs = plan.apply(np.array([[5], [6]]), np.array([[8], [9]])).expand()
    assert len(runs.length) == 4  # the reference does not merge adjacent runs
    move(runs, found + pages.base, [there])
    for layer in range(LAYERS):
        assert torch.equal(storage.key_cache(layer)[5:7], source.key_cache(layer)[8:10])
        assert torch.equal(storage.value_cache(layer)[5:7], source.value_cache(layer)[8:10])


@pytest.mark.parametrize(("description", "storage", "message"), [
    (side(packing="apart"), OPTIONS["blocks_first"],
     "layer 0 has a fragment at byte 0, in pages 512 bytes"),
    (side(packing="blocks_first"), {},
     "layer 0 has a fragment at byte 0, in pages 256 bytes apart: exp"),
    (side(packing="blocks_first"), OPTIONS["block_major"],
     "pages 1024 bytes apart: expected pages 512"),
    (side(block_size=8), {}, r"has fragments of \[256, 256\] bytes: expected \[512"),
    (side(), {"num_layers": 3},
     "pages have 3 layers, but the description has 2 per rank: expected equal"),
    (side(), {"scale_bytes_per_token": 4}, r"has fragments of \[256, 256, 16\] bytes"),
])  # fmt: skip
def test_pages_must_match_their_description(description, storage, message):
    options = {"num_layers": LAYERS, "dtype": torch.float16, "backend": "FLASH_ATTN", **storage}
    pages = KVStorage(9, 4, HEADS, 8, **options).pages
    with pytest.raises(ValueError, match=message):
        region_addresses(description, pages)


def test_stride_applies_to_k_and_v_regions():
    with pytest.raises(ValueError, match="page_stride is 4096: expected None, because K and V"):
        side(page_stride=4096)
    with pytest.raises(ValueError, match="page_stride is 511: expected 512 to"):
        side(packing="blocks_first", page_stride=511)
    with pytest.raises(TypeError, match="is_mla is 1: expected True or False"):
        side(is_mla=1)
    with pytest.raises(TypeError, match="values is a list: expected a mapping"):
        CacheDescription.from_dict([])
