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


OF_LAYERS = ("heads first", "kv, heads, layers", "all K, all V")  # without scales
SCALE_ORDERS = [n for n in ORDERS if n not in OF_LAYERS and not has_heads_outside(n)]


def drawn_side(rng, heads, num_layers, scales):
    """Draw a side with equal or uneven pipeline stages, context parallelism, and any memory order."""
    orders = SCALE_ORDERS if scales else [*ORDERS]
    block_size = int(rng.choice([2, 4, 6, 8]))
    values = of(
        packing=orders[rng.integers(len(orders))], layout=("NHD", "HND")[rng.integers(2)],
        block_size=block_size, cp_world_size=int(rng.choice([1, 1, 2, 3, 4, 8])),
        cp_interleave=int(rng.choice([n for n in (1, 2, 4, 8) if block_size % n == 0])),
        total_num_kv_heads=heads, is_mla=heads == 1 and bool(rng.integers(2)),
        num_layers=num_layers, scale_bytes_per_head=scales,
    )  # fmt: skip
    cuts = rng.choice(np.arange(1, num_layers), rng.integers(num_layers), replace=False)
    counts = np.diff([0, *np.sort(cuts), num_layers]).tolist()
    sizes = [tp for tp in (1, 2, 3, 4, 6, 8) if tp % heads == 0 or heads % tp == 0]
    if rng.integers(2):
        values["stages"] = [(count, int(rng.choice(sizes))) for count in counts]
    else:
        values["tp_size"] = int(rng.choice(sizes))
        values["pp_size"] = int(rng.choice([n for n in (1, 2, 3, 4, 8) if num_layers % n == 0]))
    return values


@pytest.mark.parametrize("seed", sampled(range(200), 8))
def test_plans_are_correct_for_random_sides(seed):
    """Draws all sizes of both sides, uneven stages, layouts, numbers of heads, MLA and scales."""
    rng = np.random.default_rng(seed)
    for _ in range(20):
        heads, num_layers = int(rng.choice([1, 2, 4, 6, 8])), int(rng.integers(1, 9))
        scales = int(rng.choice([0, 4, 8]))
        local, remote = (drawn_side(rng, heads, num_layers, scales) for _ in range(2))
        remote["is_mla"] = local["is_mla"]
        size = 0 if local["is_mla"] else int(rng.choice([2, 1, 0]))
        local, remote = (cache(v_head_size=size, **side) for side in (local, remote))
        allowed = bool(rng.integers(4))
        for rank in rng.permutation(local.world_size)[:3].tolist():
            check(local, remote, rank, allow_permutation=allowed, seed=seed)


def with_pattern(plan, **changes):
    """Return the plan with changes to the tables of its first pattern."""
    first = plan.patterns[0]
    changes = {name: change(getattr(first, name).copy()) for name, change in changes.items()}
    return replace(plan, patterns=(replace(first, **changes), *plan.patterns[1:]))


@pytest.mark.parametrize(("change", "message"), [
    (lambda plan: with_pattern(plan, layers=lambda t: t + [0, 8, 0, 0]),
     "an element is in the wrong place"),
    (lambda plan: with_pattern(plan, layers=lambda t: t + [0, 2, 0, 0]), "within an element"),
    (lambda plan: with_pattern(plan, layers=lambda t: t + [0, -(10**6), 0, 0]), "leaves its region"),
    (lambda plan: with_pattern(plan, runs=lambda t: t // [1, 1, 1, 1, 2]), "not exactly the bytes"),
    (lambda plan: replace(plan, patterns=plan.patterns * 2), "a remote byte is fetched twice"),
    (lambda plan: replace(plan, patterns=plan.patterns[1:]), "not exactly the bytes"),
    (lambda plan: replace(plan, permutation=ReceivePermutation(8, "HND")), "in the wrong place"),
], ids=["head", "torn", "outside", "half", "twice", "missing", "permutation"])  # fmt: skip
def test_planted_defects_are_detected(change, message):
    local = cache(tp_size=2, block_size=8)
    check(local, cache(), 0)
    with pytest.raises(Wrong, match=message):
        check(local, cache(), 0, change=change)


@pytest.mark.parametrize(("local", "remote"), [
    (of(block_size=8), of(block_size=2, layout="HND")),
    (of(block_size=8, layout="HND"), of(block_size=2, layout="HND")),
    (of(block_size=2, layout="HND"), of(block_size=8, layout="HND")),
    (of(block_size=4, layout="HND"), of(block_size=4, layout="NHD")),
])  # fmt: skip
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
