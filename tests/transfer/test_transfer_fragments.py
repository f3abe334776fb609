# SPDX-License-Identifier: Apache-2.0
"""Transfer plans: source ranks, minimal fragments, merged pages and rejected engines."""

import itertools
from collections import Counter

import numpy as np
import pytest

from kvcache.transfer.description import Coordinates
from kvcache.transfer.plan.transfer_plan import plan_transfer
from kvcache.transfer.sharding import ranks_of_head
from tests.machinery.shared import spread
from tests.machinery.transfer_plan_checker import DIFFERENT, PACKINGS, cache, of


@pytest.mark.parametrize(("field", "value"), [
    ("dtype", "float16"),
    ("head_size", 8),
    ("v_head_size", 1),
    ("num_layers", 4),
    ("total_num_kv_heads", 8),
    ("scale_bytes_per_head", 4),
])  # fmt: skip
def test_incompatible_engines_are_rejected(field, value):
    local, remote = cache(engine_id="L"), cache(engine_id="R", **{field: value})
    here = getattr(local, field)
    with pytest.raises(
        ValueError, match=rf"local {field} is {here!r}.*remote {field} is {value!r}"
    ):
        plan_transfer(local, remote, 0)


def test_mixing_mla_and_heads_is_rejected_first():
    latent = cache(is_mla=True, total_num_kv_heads=1)
    with pytest.raises(ValueError, match=r"local is_mla is True.*remote is_mla is False"):
        plan_transfer(latent, cache(), 0)
    with pytest.raises(ValueError, match="local_rank is 2: expected 0 to 1"):
        plan_transfer(cache(tp_size=2), cache(), 2)
    with pytest.raises(TypeError, match=r"remote is \{"):
        plan_transfer(cache(), cache().to_dict(), 0)


@pytest.mark.parametrize(("heads", "is_mla"), [(2, False), (1, True)])
@pytest.mark.parametrize(
    "sizes",
    spread(
        ((each,) for each in itertools.product((1, 2, 4, 8), (1, 2), (1, 2, 4), (2, 8), (1, 2))), 13
    ),
)
def test_readers_are_spread_evenly_over_replicas(heads, is_mla, sizes):
    tp, pp, cp, remote_tp, remote_pp = sizes
    common = of(total_num_kv_heads=heads, is_mla=is_mla)
    local = cache(tp_size=tp, pp_size=pp, cp_world_size=cp, **common)
    remote = cache(tp_size=remote_tp, pp_size=remote_pp, **common)
    readers = Counter()
    for rank in range(local.world_size):
        plan = plan_transfer(local, remote, rank)
        for source in plan.remote_ranks:
            readers[source] += 1
            assert set(remote.layers(source)) & set(local.layers(rank))
    for pp_rank, head in itertools.product(range(remote_pp), range(heads)):
        tp_ranks = ranks_of_head(heads, remote_tp, head)
        counts = [readers[remote.rank_of(Coordinates(0, pp_rank, tp_rank))] for tp_rank in tp_ranks]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("local", "remote", "permutation", "num_fragments"), [
    # K and V of two layers form four separate parts.
    (of(), of(), None, 4),
    (of(packing="block_major"), of(packing="block_major"), None, 1),
    (of(packing="block_major"), of(packing="blocks_first"), None, 2),
    (of(packing="blocks_first"), of(packing="apart"), None, 4),
    (of(), of(layout="HND"), (4, "HND"), 4),
    (of(layout="HND"), of(), (4, "NHD"), 4),
    (of(packing="block_major"), of(packing="block_major", layout="HND"), (4, "HND"), 1),
    (of(layout="HND", block_size=16), of(layout="HND"), (4, "HND"), 16),
    (of(layout="HND"), of(layout="HND", block_size=16), (16, "HND"), 16),
    (of(block_size=16), of(), None, 16),  # rows in NHD do not depend on the block size
    (of(block_size=16), of(layout="HND", tp_size=2), (4, "HND"), 32),
    (of(), of(tp_size=2), None, 2 * 4 * 4),  # heads are read from two ranks, token by token
    (of(layout="HND"), of(tp_size=2), (4, "NHD"), 2 * 4 * 4),
    # With one head per rank, both layouts have the same order in memory.
    (of(tp_size=4), of(layout="HND", tp_size=4), None, 4),
    (of(cp_world_size=2), of(layout="HND"), None, 64),
    (of(cp_world_size=2), of(layout="HND", cp_world_size=2), (4, "HND"), 4),
    (of(cp_world_size=2, cp_interleave=2), of(layout="HND", cp_world_size=2), None, 64),
])  # fmt: skip
def test_plan_uses_the_fewest_fragments(local, remote, permutation, num_fragments):
    plan = plan_transfer(cache(**local), cache(**remote), 0)
    assert (plan.permutation, plan.num_fragments) == (permutation, num_fragments)
    exact = plan_transfer(cache(**local), cache(**remote), 0, allow_permutation=False)
    assert exact.permutation is None
    assert exact.num_fragments > num_fragments or permutation is None
    assert len(plan.fragments.length) == num_fragments


@pytest.mark.parametrize(("packing", "num_fragments"), [
    # The transfer reads 4 of 8 heads in blocks of 4 tokens and 6 layers. In this order, the K
    # and V of these heads are contiguous over all layers.
    ("heads first", (1, 1)),
    # K and V are each contiguous over all layers.
    ("kv, heads, layers", (2, 2)),
    # With layers outermost, each layer has one fragment for K and one for V.
    ("block_major", (12, 12)),
    ("apart", (12, 12)),
])  # fmt: skip
def test_outermost_heads_form_one_fragment(packing, num_fragments):
    layout = "NHD" if packing in ("heads first", "kv, heads, layers") else "HND"
    common = of(num_layers=6, total_num_kv_heads=8, layout=layout, packing=packing)
    whole, half = cache(**common), cache(tp_size=2, **common)
    found = [
        plan_transfer(half, whole, 1).num_fragments,
        plan_transfer(whole, half, 0).num_fragments // 2,  # read from two ranks
    ]
    assert tuple(found) == num_fragments


MAXIMAL = [(both, "NHD", False) for both in itertools.product(PACKINGS, repeat=2)]
MAXIMAL += [
    ((packing,) * 2, layout, True)
    for packing in ("heads first", "kv, heads, layers")
    for layout in ("NHD", "HND")
]


@pytest.mark.parametrize(("packings", "layout", "allow_permutation"), spread(MAXIMAL, 6))
@pytest.mark.parametrize(("local", "remote"), [*DIFFERENT, (of(tp_size=2), of(tp_size=8))])
def test_fragments_are_maximal(local, remote, packings, layout, allow_permutation):
    local, remote = ({**side, "packing": p} for side, p in zip((local, remote), packings))
    if allow_permutation:
        local, remote = ({**side, "layout": layout} for side in (local, remote))
    plan = plan_transfer(cache(**local), cache(**remote), 0, allow_permutation=allow_permutation)
    f = plan.fragments
    ends = set(
        zip(
            f.remote_rank, f.remote_page, f.remote_region, f.remote_offset + f.length,
            f.local_page, f.local_region, f.local_offset + f.length,
        )
    )  # fmt: skip
    begins = set(zip(*f[:-1]))
    assert len(begins) == len(f.length) and not ends & begins


def test_engines_with_different_scales_are_rejected():
    common = of(dtype="float8_e4m3fn")
    plain = cache(engine_id="L", **common)
    scaled = cache(engine_id="R", k_scale=[[1.0], [0.5]], v_scale=[[1.0], [1.0]], **common)
    message = (
        r"local k_scale of layer 1, head 0 is 1.0 \(engine 'L'\), but remote k_scale is 0.5 "
        r"\(engine 'R'\): expected equal values"
    )
    with pytest.raises(ValueError, match=message):
        plan_transfer(plain, scaled, 0)
    per_head = cache(engine_id="H", k_scale=[[1.0] * 4, [0.5] * 4], **common)
    # Equal scales that are given per head.
    assert plan_transfer(scaled, per_head, 0).num_fragments == 4
    assert plan_transfer(plain, cache(k_scale=[[1.0], [1.0]], **common), 0).num_fragments == 4
    other = cache(v_scale=[[1, 1, 1, 1], [1, 1, 2, 1]], **common)
    with pytest.raises(ValueError, match=r"local v_scale of layer 1, head 2 is 1\.0"):
        plan_transfer(plain, other, 0)


def test_adjacent_whole_pages_form_one_run():
    plan = plan_transfer(cache(), cache(), 0)
    pages = np.arange(1, 11, dtype=np.int32)[:, None]
    assert plan.apply(pages, pages + 5).num_fragments == 4
    assert plan.apply(pages[::-1], pages[::-1] + 5).num_fragments == 4
    assert plan.apply(pages, pages[::-1]).num_fragments == 40
    assert plan.apply(pages[:0], pages[:0]).num_fragments == 0
    parts = plan_transfer(cache(block_size=16), cache(), 0)  # four remote pages fill one local page
    remote = np.arange(1, 41).reshape(10, 4)
    assert parts.apply(pages, remote).num_fragments == 4
    remote[3, 2] = 77
    assert parts.apply(pages, remote).num_fragments == 4 * 3
    torn = plan_transfer(cache(tp_size=2), cache(), 0)
    assert torn.apply(pages, pages).num_fragments == 160


def test_pages_that_do_not_fit_are_rejected():
    plan = plan_transfer(cache(), cache(tp_size=2), 0)
    pages = np.arange(1, 4, dtype=np.int32)[:, None]
    large = pages.astype(np.int64)
    for local, remote, message in (
        (pages[:, 0], pages, r"local_pages has shape \[3\]: expected \[groups, 1\]"),
        (pages, pages[:2], "rank 0 has 2 groups, but local_pages has 3"),
        (pages, {0: pages}, r"remote_pages is missing ranks \[1\] \(ranks present: \[0\]"),
        (pages, {"a": pages, 0: pages}, r"ranks present: \['a', 0\]"),
        (pages - 1, pages, "local_pages holds 0: expected page numbers, 1 to 2147483647"),
        (pages - 4, pages, "local_pages holds -3: expected page numbers, 1 to"),
        (pages, pages - 2, "remote_pages holds -1: expected page numbers, 1 to"),
        (pages.astype(np.uint64) + 2**63, pages, "local_pages holds 9223372036854775809"),
        (pages, large + 2**40, "remote_pages holds 1099511627777"),
        (pages // 2 + 1, pages, "local_pages has page 2 twice: expected each page once"),
        # The ids are too large for a bitmap, so duplicates are found by sorting.
        (pages // 2 + 10**6, pages, "local_pages has page 1000001 twice: expected each page once"),
        (pages, pages.astype(float), "remote_pages has dtype float64"),
    ):
        error = TypeError if "dtype" in message else ValueError
        with pytest.raises(error, match=message):
            plan.apply(local, remote)


def test_block_sizes_with_huge_common_multiple_are_rejected():
    with pytest.raises(ValueError, match=r"local block_size is 16 .*remote block_size is 1000003"):
        plan_transfer(cache(block_size=16), cache(block_size=1_000_003), 0)
