# SPDX-License-Identifier: Apache-2.0
"""Transfer plans executed on fake memories for all combinations of options, and detection of
planted defects.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from kvcache.transfer import CacheDescription
from kvcache.transfer.plan.transfer_plan import ReceivePermutation, pages_with, plan_transfer
from tests.machinery.shared import sampled, spread
from tests.machinery.transfer_plan_checker import (
    ORDERS,
    Memory,
    Wrong,
    cache,
    check,
    has_heads_outside,
    of,
)
from tests.machinery.transfer_plan_table import (
    HEADS,
    PARALLEL,
    SIZES,
    page_product,
    parallel_product,
    tally,
)

# The number of shares into which all combinations are divided. It is coprime to the numbers of
# sizes, so that each share contains every size.
NUM_SHARES = 797


@pytest.mark.parametrize("share", sampled(range(0, NUM_SHARES, 32)))
def test_plans_are_correct_for_all_parallel_sizes_and_numbers_of_heads(share):
    count = len(range(share, len(SIZES) ** 6 * len(HEADS), NUM_SHARES))
    counts, wrong = tally(parallel_product(start=share, step=NUM_SHARES))
    assert not wrong
    assert counts["right"] + counts["right, permuted"] == counts.total() == count


@pytest.mark.slow
@pytest.mark.parametrize("parallel", spread([(each,) for each in PARALLEL], 2), ids=str)
def test_plans_are_correct_for_all_layouts_and_packings(parallel):
    some = itertools.islice(page_product([parallel], block_sizes=(4, 8)), 0, None, 7)
    counts, wrong = tally(some)
    assert not wrong and counts["right"]
    refused = counts["refused: cp_interleave"]  # an interleave of 8 tokens exceeds a block of 4
    assert set(counts) <= {"right", "right, permuted", "refused: cp_interleave"}
    assert counts.total() - refused > 40


@pytest.mark.parametrize(
    "orders", spread([(pair,) for pair in itertools.product(ORDERS, repeat=2)], 5), ids=" to ".join
)
def test_plans_are_correct_for_all_pairs_of_memory_orders(orders):
    parallel = (of(), of(tp_size=2)), (of(block_size=8), of(pp_size=2)), (of(), of())
    for (sides, layouts), size in itertools.product(
        itertools.product(parallel, itertools.product(("NHD", "HND"), repeat=2)), (2, 1)
    ):
        local, remote = (
            cache(packing=packing, layout=layout, v_head_size=size, **side)
            for packing, layout, side in zip(orders, layouts, sides)
        )
        check(local, remote, local.world_size - 1)


def test_equal_pages_move_whole_in_every_memory_order():
    for packing, size in itertools.product(ORDERS, (2, 1)):
        one = cache(packing=packing, v_head_size=size)
        plan = plan_transfer(one, one, 0)
        assert plan.num_fragments == len(one.region_bytes)


@pytest.mark.parametrize("allow_permutation", [True, False])
@pytest.mark.parametrize(
    ("local", "remote"),
    [
        (of(tp_size=3), of(tp_size=2)),
        (of(block_size=6), of(block_size=4)),
        (of(pp_size=3), of(pp_size=2)),
        (of(cp_world_size=3, cp_interleave=2), of(cp_world_size=2, block_size=6)),
        (of(cp_world_size=2, cp_interleave=2), of(cp_world_size=3, layout="HND")),
        (of(tp_size=6, cp_world_size=3), of(tp_size=4, pp_size=2, packing="block_major")),
    ],
)
def test_plans_are_correct_for_sizes_that_do_not_divide_each_other(
    local, remote, allow_permutation
):
    sizes = of(num_layers=6, total_num_kv_heads=12)
    local, remote = cache(**sizes, **local), cache(**sizes, **remote)
    for rank in range(local.world_size):
        check(local, remote, rank, allow_permutation=allow_permutation, seed=rank)


SCALE_ORDERS = [name for name in ORDERS if name not in ("heads first", "kv, heads, layers")]
SCALE_ORDERS = [
    name for name in SCALE_ORDERS if name != "all K, all V" and not has_heads_outside(name)
]  # excludes memory orders that do not support scales


def drawn_side(rng, heads, num_layers, scales):
    """Draw a side with equal or uneven pipeline stages, context parallelism, and any memory order."""
    orders = SCALE_ORDERS if scales else [*ORDERS]
    values = of(
        packing=orders[rng.integers(len(orders))],
        layout=("NHD", "HND")[rng.integers(2)],
        block_size=int(2 ** rng.integers(1, 4)),
        cp_world_size=int(rng.choice([1, 1, 2])),
        cp_interleave=int(rng.choice([1, 2])),
        total_num_kv_heads=heads,
        is_mla=heads == 1 and bool(rng.integers(2)),
        num_layers=num_layers,
        scale_bytes_per_head=scales,
    )
    cuts = np.sort(
        rng.choice(np.arange(1, num_layers), rng.integers(num_layers - 1), replace=False)
    )
    counts = np.diff([0, *cuts, num_layers]).tolist()
    sizes = [tp for tp in (1, 2, 3, 4, 6, 8) if tp % heads == 0 or heads % tp == 0]
    if rng.integers(4):
        values["stages"] = [(count, int(rng.choice(sizes))) for count in counts]
    else:
        values["tp_size"] = int(rng.choice(sizes))
        values["pp_size"] = int(rng.choice([n for n in (1, 2, 3) if num_layers % n == 0]))
    return values


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(30)))
def test_plans_are_correct_for_random_uneven_stages_with_scales(seed):
    rng = np.random.default_rng(seed)
    for _ in range(12):
        heads, num_layers = int(rng.choice([1, 2, 4, 6])), int(rng.integers(2, 6))
        scales = int(rng.choice([0, 4, 8]))
        local, remote = (drawn_side(rng, heads, num_layers, scales) for _ in range(2))
        remote["is_mla"] = local["is_mla"]
        size = 0 if local["is_mla"] else int(rng.choice([2, 1, 0]))
        local, remote = (cache(v_head_size=size, **side) for side in (local, remote))
        allowed = bool(rng.integers(2))
        for rank in rng.permutation(local.world_size)[:4].tolist():
            check(local, remote, rank, allow_permutation=allowed, seed=seed)


def test_plans_are_correct_for_stages_with_different_tensor_parallel_sizes():
    """The prefill engine has stages with 3 layers on 1 rank and 1 layer on 4 ranks. The decode
    engine has 2 ranks.
    """
    prefill = cache(num_layers=4, stages=[(3, 1), (1, 4)])
    decode = cache(num_layers=4, tp_size=2)
    assert [prefill.layers(rank) for rank in range(5)] == [range(3)] + [range(3, 4)] * 4
    assert [prefill.heads(rank) for rank in (0, 1, 4)] == [range(4), range(1), range(3, 4)]
    assert plan_transfer(decode, prefill, 0).remote_ranks == (0, 1, 2)
    assert plan_transfer(decode, prefill, 1).remote_ranks == (0, 3, 4)
    assert [plan_transfer(prefill, decode, rank).remote_ranks for rank in range(5)] == [
        (0, 1), (0,), (0,), (1,), (1,),
    ]  # fmt: skip
    for local, remote in ((decode, prefill), (prefill, decode)):
        for rank in range(local.world_size):
            check(local, remote, rank)


@pytest.mark.parametrize("packing", SCALE_ORDERS)
@pytest.mark.parametrize("layouts", [*itertools.product(("NHD", "HND"), repeat=2)], ids="".join)
@pytest.mark.parametrize(
    "sizes", [(of(), of()), (of(block_size=8), of(tp_size=2)), (of(tp_size=2), of())]
)
def test_scales_move_with_their_heads(packing, layouts, sizes):
    local, remote = (
        cache(packing=packing, layout=layout, scale_bytes_per_head=4, **size)
        for layout, size in zip(layouts, sizes)
    )
    for rank in range(local.world_size):
        check(local, remote, rank)
        check(local, remote, rank, allow_permutation=False)
    moved = plan_transfer(local, remote, 0).fragments.length.sum()
    group = plan_transfer(local, remote, 0).tokens_per_group
    # There is one fragment each for K, V and scales of two layers.
    assert moved == group * 2 * local.heads_per_rank * (2 * 2 * 4 + 4)


def spoiled(**changes):
    """Return a function that applies `changes` to a plan. The changes modify the tables of layers
    or runs in place.
    """

    def change(plan):
        patterns = []
        for pattern in plan.patterns:
            layers, runs = pattern.layers.copy(), pattern.runs.copy()
            changes.get("layers", lambda table: None)(layers)
            changes.get("runs", lambda table: None)(runs)
            patterns.append(replace(pattern, layers=layers, runs=runs))
        return replace(plan, patterns=tuple(patterns))

    return change


def test_scales_of_another_layer_are_detected():
    local = cache(packing="block_major", scale_bytes_per_head=4, tp_size=2)
    remote = cache(packing="block_major", scale_bytes_per_head=4)
    with pytest.raises(Wrong, match="an element is in the wrong place"):
        check(local, remote, 0, change=spoiled_scales)


def spoiled_scales(plan):
    """Return the plan with the scales of the two layers exchanged."""
    patterns = []
    for pattern in plan.patterns:
        layers = pattern.layers.copy()
        if len(layers) == 2:  # this pattern has the scales of both layers, not K and V
            layers[:, :2] = layers[::-1, :2].copy()
        patterns.append(replace(pattern, layers=layers))
    return replace(plan, patterns=tuple(patterns))


def swap_k_and_v(layers):
    layers[0::2, :2], layers[1::2, :2] = layers[1::2, :2].copy(), layers[0::2, :2].copy()


def shift(column, by):
    def change(table):
        table[:, column] += by

    return change


def next_token(runs):
    runs[:, 1] = (runs[:, 1] + 4 * ROW) % (4 * 4 * ROW)


def half(runs):
    runs[:, 4] //= 2


def read_again_from_a_replica(plan):
    first = plan.patterns[0]
    again = replace(first, remote_rank=first.remote_rank + 1)
    return replace(plan, patterns=(*plan.patterns, again))


def read_twice(plan):
    return replace(plan, patterns=plan.patterns * 2)


ROW = 2 * 4  # bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoiled(layers=shift(1, ROW)), "an element is in the wrong place"),  # reads another head
        (spoiled(runs=next_token), "an element is in the wrong place"),
        (spoiled(layers=shift(1, 2)), "within an element"),
        (spoiled(layers=shift(1, -(10**6))), "leaves its region"),
        (spoiled(layers=shift(0, 4)), "a region that does not exist"),
        (spoiled(layers=shift(3, ROW)), "not exactly the bytes|leaves its region"),
        (spoiled(layers=swap_k_and_v), "an element is in the wrong place"),
        (spoiled(runs=half), "not exactly the bytes"),
        (read_again_from_a_replica, "a local byte is written twice"),
        (read_twice, "a remote byte is fetched twice"),
        (lambda plan: replace(plan, patterns=plan.patterns[1:]), "not exactly the bytes"),
    ],
    ids=[
        "head", "token", "torn", "outside", "region", "local offset", "K and V", "half", "replica",
        "twice", "missing",
    ],
)  # fmt: skip
def test_planted_defects_are_detected(change, message):
    # Local rank 0 holds 2 of 4 heads. It reads them from one remote rank that has all heads, or
    # from two remote ranks that have one head each.
    local = cache(tp_size=2)
    for remote in (cache(), cache(tp_size=8)):
        check(local, remote, 0)
    replicated = change is read_again_from_a_replica
    with pytest.raises(Wrong, match=message):
        check(local, cache(tp_size=8) if replicated else cache(), 0, change=change)


@pytest.mark.parametrize(
    "wrong", [ReceivePermutation(4, "NHD"), ReceivePermutation(8, "HND"), None]
)
def test_wrong_permutation_is_detected(wrong):
    local, remote = cache(block_size=8), cache(block_size=4, layout="HND")
    check(local, remote, 0)
    with pytest.raises(Wrong, match="an element is in the wrong place"):
        check(local, remote, 0, change=lambda plan: replace(plan, permutation=wrong))


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        (of(block_size=8), of(block_size=2, layout="HND")),
        (of(block_size=8, layout="HND"), of(block_size=2, layout="HND")),
        (of(block_size=2, layout="HND"), of(block_size=8, layout="HND")),
        (of(block_size=4, layout="HND"), of(block_size=4, layout="NHD")),
    ],
)
def test_permutation_matches_the_permute_op(local, remote):
    import torch

    from kvcache import KVStorage
    from kvcache.transfer import permute_received_blocks

    local, remote = cache(**local), cache(**remote)
    plan = plan_transfer(local, remote, 0)
    pages = np.array([[5, 2, 7, 1], [0, 4, 3, 6]])[:, : plan.local_pages_per_group]
    memory = Memory(local, np.array([0]), pages.reshape(1, -1), 8)
    elements = np.random.default_rng(0).permutation(len(memory.elements[0])).astype(np.float32)
    storage = KVStorage(
        8, local.block_size, 4, 2, num_layers=2, dtype=torch.float32, layout=local.layout
    )
    for layer, part in itertools.product(range(2), range(2)):
        fragment = storage.pages.fragment(2 * layer + part).view(torch.float32)
        fragment.copy_(torch.from_numpy(memory.part(elements, layer, part)))
    caches = [c for i in range(2) for c in (storage.key_cache(i), storage.value_cache(i))]
    permute_received_blocks(caches, pages, **plan.permutation._asdict())
    memory.permute(elements, pages, *plan.permutation)
    for layer, part in itertools.product(range(2), range(2)):
        got = storage.pages.fragment(2 * layer + part).view(torch.float32).numpy()
        assert np.array_equal(got, memory.part(elements, layer, part))


@pytest.mark.parametrize(
    ("tokens", "pages"),
    [((8, 13), [2, 3]), ((8, 12), [2]), ((7, 12), [1, 2]), ((0, 1), [0]), ((8, 8), [])],
)
def test_only_pages_with_requested_tokens_are_moved(tokens, pages):
    description = CacheDescription(
        engine_id="x", num_layers=1, total_num_kv_heads=1, head_size=8, block_size=4
    )
    assert np.flatnonzero(pages_with(description, 0, tokens, 5)).tolist() == pages
