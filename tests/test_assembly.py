# SPDX-License-Identifier: Apache-2.0
"""Building a whole cache from a plan with one call.

The simulator (tests/simulator) checks the content of such caches over many steps.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

import kvcache
from kvcache import (
    Admit,
    AttentionMetadataBuilder,
    BlockTables,
    ContextParallel,
    External,
    GroupSpec,
    KVCacheManager,
    KVStorage,
    LayerSpec,
    Request,
    plan_cache,
)
from tests.machinery.shared import context_of

FULL = [LayerSpec(f"full.{i}", "full_attention", 4, 2, 8, dtype="float32") for i in range(4)]
LOCAL = [
    LayerSpec(f"local.{i}", "sliding_window", 4, 2, 8, dtype="float32", options={"window": 10})
    for i in range(4)
]
STATES = [
    LayerSpec(f"state.{i}", "recurrent", 4, dtype="float32", state_bytes=1024) for i in range(2)
]
MODELS = {
    "full": FULL,
    "sliding + full": [*LOCAL, *FULL[:2]],
    "recurrent + full": [*STATES, *FULL[:2]],
    "MLA": [LayerSpec(f"mla.{i}", "full_attention", 4, 1, 24, 0) for i in range(3)],
    "fp8":
        [LayerSpec(f"fp8.{i}", "full_attention", 4, 2, 8, dtype="float8_e4m3fn") for i in range(3)],
    "unequal K and V + sliding": [LayerSpec("wide", "full_attention", 4, 2, 8, 4, dtype="float16"),
        *LOCAL[:1]],
}  # fmt: skip
MAX_LEN, CHUNK = 64, 16  # tokens


def plan_of(layers, num_pages=60, **options):
    plan = plan_cache(layers, 2**24, max_model_len=MAX_LEN, **options)
    return replace(plan, num_pages=num_pages)


class Written:
    """A cache in which each layer holds random K and V of two requests, or their last states."""

    def __init__(self, plan, **options):
        self.cache = cache = kvcache.build(
            plan, max_num_reqs=3, num_preallocate_tokens=0, **options
        )
        for storage in cache.storages:
            if storage.dtype.is_floating_point and storage.dtype.itemsize == 1:
                storage.set_scales(*torch.ones(2, storage.num_layers, 1))
        step = cache.manager.step(new=[Request("a", range(20)), Request("b", range(50, 83))])
        assert cache.worker.apply(step).completed and not step.status.any()
        self.lengths = np.array([20, 33])
        self.rows = np.repeat(step.rows, self.lengths)
        self.positions = np.concatenate([np.arange(n) for n in self.lengths])
        cache.tables.compute_slot_mapping(self.rows, self.positions)
        cache.tables.commit_slot_mapping(len(self.rows))
        self.layers = {}
        for spec in plan.layers:
            storage, table = (
                each[cache.group(spec.name)] for each in (cache.storages, cache.tables)
            )
            if spec.state_bytes:
                columns = (self.lengths - 1) // table.block_size
                slots = table.block_table.gpu[step.rows, columns].long()
            else:
                slots = cache.slots(spec.name, len(self.rows)).clone()
            dtype = torch.bfloat16 if storage.k_scale is not None else storage.dtype
            shapes = (len(slots), storage.num_kv_heads)
            sizes = (storage.head_size, storage.v_head_size)
            kv = [torch.randint(-7, 8, (*shapes, size)).to(dtype) for size in sizes]
            cache.write(
                spec.name, kv[0], kv[1] if sizes[1] and not spec.state_bytes else None, slots
            )
            self.layers[spec.name] = slots, kv

    def check(self):
        """Check that no write changed what another layer or group holds."""
        for name, (slots, kv) in self.layers.items():
            found = self.cache.gather(name, slots, kv[0].dtype)
            assert torch.equal(found[0], kv[0]) and torch.equal(found[1], kv[1]), name


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("model", MODELS)
def test_written_tokens_are_read_back(model, layout):
    Written(plan_of(MODELS[model]), layout=layout).check()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("model", ["recurrent + full", "MLA", "scales"])
def test_kernel_blocks_of_tables_and_tensors_agree(model, layout):
    scaled = {"scale_bytes_per_token": 4, "dtype": "int8"}
    scales = [LayerSpec(f"scaled.{i}", "full_attention", 16, 2, 8, **scaled) for i in range(2)]
    plan = plan_of({**MODELS, "scales": scales}[model])
    if model == "MLA":
        plan = plan_of([replace(spec, block_size=16) for spec in MODELS["MLA"]])
    written = Written(plan, layout=layout, kernel_sizes=[3, 4])
    written.check()
    cache = written.cache
    for spec in plan.layers:
        group = cache.group(spec.name)
        table, storage = cache.tables[group], cache.storages[group]
        if spec.state_bytes:
            continue
        assert table.kernel_block_size == storage.block_size == 4 and table.blocks_per_kv_block > 1
        blocks = cache.kv_cache(spec.name)
        assert blocks.shape[0] == plan.num_pages * table.blocks_per_kv_block
        # Convert the tensor to the shape that a kernel reads.
        key = blocks[:, 0] if model != "MLA" else blocks[:, :, None]
        column, offset = np.divmod(written.positions, 4)
        found = key[table.block_table.cpu[written.rows, column].long(), offset]
        assert torch.equal(found, written.layers[spec.name][1][0])
        if spec.scale_bytes_per_token:
            assert storage.scale_cache(0).shape == (blocks.shape[0], 4, 4)


def test_parts_match_the_plan():
    plan = plan_of(MODELS["sliding + full"])
    cache = kvcache.build(plan, max_num_reqs=3, num_host_blocks=9, backend="TRITON_ATTN")
    assert cache.plan is plan and cache.manager.groups == plan.groups
    assert cache.pages.page_bytes == plan.page_bytes
    assert cache.pages.num_blocks == plan.num_pages and cache.host_pages.num_blocks == 9
    assert cache.worker.pages is cache.pages and cache.worker.host is cache.host_pages
    places = {cache.kv_cache(spec.name).data_ptr() for spec in plan.layers}
    # Groups share pages, but the layers within a group do not share memory.
    assert len(places) == len(plan.groups[0].layers)
    assert kvcache.build(plan, max_num_reqs=3).host_pages is None


def test_tables_follow_from_groups_and_kinds():
    plan = plan_of(
        [*FULL[:1], *LOCAL[:1], *STATES[:1]], context_parallel=ContextParallel(dcp_world_size=2)
    )
    sizes = {"max_num_reqs": 2, "max_model_len": MAX_LEN, "max_num_tokens": CHUNK}
    tables = BlockTables.for_groups(
        plan.groups, **sizes, kernel_sizes=[4], context_parallel=plan.context_parallel
    )
    found = {g.kind: tables[i].shape for i, g in enumerate(plan.groups)}
    assert {kind: layout.window for kind, layout in found.items()} == {
        "full_attention": None, "sliding_window": 10, "recurrent": None,
    }  # fmt: skip
    assert [found[k].slot_mapping for k in ("full_attention", "recurrent")] == [True, False]
    assert found["full_attention"].kernel_block_size == 4
    assert found["recurrent"].kernel_block_size == found["recurrent"].block_size
    assert all(layout.world_size == 2 for layout in found.values())
    for group, table in zip(plan.groups, tables.block_tables):
        assert table.max_num_blocks_per_req == -(-MAX_LEN // (2 * group.block_size))


CROSS = [LayerSpec(f"cross.{i}", "cross_attention", 4, 2, 8, dtype="float32") for i in range(2)]


def encoder_cache(**options):
    """Build a cache with an encoder group, for at most 32 tokens and 50 encoder tokens per request
    and 32 tokens per step.
    """
    plan = plan_cache([*FULL[:2], *CROSS], 2**20, max_model_len=32, max_encoder_tokens=50)
    return kvcache.build(plan, max_num_reqs=3, **options)


def test_encoder_longer_than_planned_is_rejected():
    cache = encoder_cache()
    for length, call in [
        (51, lambda request: cache.manager.step(new=[request])),
        (2**31 - 1, lambda request: cache.manager.would_fit(request)),
    ]:
        with pytest.raises(ValueError) as caught:
            call(Request("r1", range(9), num_encoder_tokens=length))
        assert str(caught.value) == (
            f"num_encoder_tokens of request 'r1' is {length}: expected at most max_encoder_tokens, "
            "which is 50"
        )
    assert cache.manager.pool.num_free == cache.plan.num_pages - 1
    decoder = kvcache.build(plan_of(FULL), max_num_reqs=1)
    with pytest.raises(ValueError, match="is 1: expected at most max_encoder_tokens, which is 0"):
        decoder.manager.step(new=[Request("r1", range(9), num_encoder_tokens=1)])


def test_encoder_has_its_own_metadata():
    tables = encoder_cache().tables
    encoder = next(g for g, each in enumerate(tables.block_tables) if each.shape.encoder)
    assert AttentionMetadataBuilder(tables).groups == [1 - encoder]
    assert AttentionMetadataBuilder(tables, groups=[encoder]).groups == [encoder]
    with pytest.raises(ValueError, match=r"groups is \[0, 1\]: expected a separate builder"):
        AttentionMetadataBuilder(tables, groups=[0, 1])


def test_tables_may_consist_of_only_an_encoder_group():
    groups = [GroupSpec("cross_attention", 16)]
    sizes = {"max_num_reqs": 2, "max_model_len": 64, "max_num_tokens": 32}
    tables = BlockTables.for_groups(groups, **sizes, max_encoder_tokens=33)
    assert tables[0].block_table.np.shape == (2, 3)
    assert BlockTables.for_groups(groups, **sizes)[0].block_table.np.shape == (2, 4)
    with pytest.raises(ValueError, match="max_encoder_tokens is 5: expected None, as no group's"):
        BlockTables.for_groups([GroupSpec("full_attention", 16)], **sizes, max_encoder_tokens=5)
    tables.add_row([[5]], 1)
    tables[0].compute_slot_mapping(np.array([1]), np.array([3]))
    assert tables[0].slot_mapping.np[0] == 5 * 16 + 3


@pytest.mark.parametrize("layers", [
    [LayerSpec("a", "full_attention", 4, 2, 8), LayerSpec("b", "full_attention", 4, 4, 4)],
    [LayerSpec("a", "full_attention", 4, 2, 8), LayerSpec("b", "full_attention", 4, 2, 10, 6)],
    [LayerSpec("a", "full_attention", 4, 2, 8),
     LayerSpec("b", "full_attention", 4, 2, 8, dtype="float16")],
    [LayerSpec("a", "recurrent", 4, state_bytes=256),
     LayerSpec("b", "recurrent", 4, state_bytes=256, dtype="float32"), *FULL[:1]],
    [LayerSpec("a", "full_attention", 1, 1, 3, dtype="int8"),
     LayerSpec("b", "recurrent", 1, state_bytes=8, dtype="float32")],
    [LayerSpec("a", "full_attention", 1, 1, 1, dtype="int8", scale_bytes_per_token=5),
     LayerSpec("b", "full_attention", 1, 1, 1, 0, dtype="float32")],
], ids=["heads", "head sizes", "dtype", "dtype of states", "odd bytes", "odd scales"])  # fmt: skip
def test_each_plan_can_be_built(layers):
    Written(plan_of(layers, num_pages=200)).check()


def test_tokens_without_slots_are_not_dropped():
    cache = kvcache.build(plan_of(FULL[:1]), max_num_reqs=2)
    cache.kv_cache("full.0").zero_()
    step = cache.manager.step(new=[Request("r1", range(20))])
    cache.worker.apply(step)
    key, value = torch.rand(2, 24, 2, 8)
    with pytest.raises(
        ValueError, match="key has 20 tokens: expected at most 0, the number of tokens"
    ):
        cache.write("full.0", key[:20], value[:20])
    cache.tables.compute_slot_mapping(np.full(20, step.rows[0]), np.arange(20))
    for n, message in [
        (24, "key has 24 tokens: expected at most 20"),
        (8, "key has 8 tokens: expected 20"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.write("full.0", key[:n], value[:n])
    assert not cache.gather("full.0", cache.slots("full.0", 20))[0].any()
    with pytest.raises(TypeError, match="num_tokens is None: expected an integer"):
        cache.slots("full.0", None)
    cache.write("full.0", key[:8], value[:8], cache.slots("full.0", 8))
    cache.write("full.0", key[:20], value[:20])
    cache.tables.commit_slot_mapping(num_tokens=12)
    assert len(cache.slots("full.0", 12)) == 12
    with pytest.raises(ValueError, match="num_tokens is 13: expected at most 12"):
        cache.slots("full.0", 13)
    with pytest.raises(ValueError, match="positions"):  # nothing is written or counted
        cache.tables.compute_slot_mapping(np.full(2, step.rows[0]), np.array([0, 10**6]))
    assert cache.tables[0].num_computed_slots == 12
    cache.worker.apply(cache.manager.step(step.rows, [1], token_ids=[7]))
    with pytest.raises(ValueError, match="key has 12 tokens: expected at most 0"):
        cache.write("full.0", key[:12], value[:12])  # uses the previous step's slots


def test_invalid_calls_are_reported():
    plan = plan_of(FULL)
    cache = kvcache.build(plan, max_num_reqs=1)
    for call, error, message in [
        (lambda: kvcache.build([], max_num_reqs=1), TypeError, r"plan is \[\]: expected a CachePlan"),
        (lambda: kvcache.build(plan, max_num_reqs=1, layout="DNH"), ValueError, "layout is 'DNH'"),
        *(
            (lambda name=name: kvcache.build(plan, max_num_reqs=1, **{name: 2}), TypeError,
             f"{name} is 2: expected no {name}, because the plan sets it")
            for name in ("context_parallel", "num_gpu_blocks", "max_model_len",
                         "max_num_batched_tokens", "max_encoder_tokens", "groups")
        ),
        (lambda: kvcache.build(plan, max_num_reqs=1, evict=1), TypeError, "option 'evict' is unknown"),
        (lambda: kvcache.build(plan, max_num_reqs=1, swap_options=5), TypeError,
         "swap_options is 5: expected a mapping"),
        (lambda: kvcache.build(plan, max_num_reqs=1, swap_options={"way": 1}), TypeError,
         "swap_options has 'way': expected some of method, "),
        (lambda: kvcache.build(plan, max_num_reqs=1, kernel_sizes=4), TypeError,
         r"kernel_sizes is 4: expected a list of candidates, such as \[4\]"),
        (lambda: kvcache.build(plan, max_num_reqs=1, device="x"), ValueError, "device is 'x': expected"),
        (lambda: cache.kv_cache("full.9"), ValueError, "layer_name is 'full.9': expected one of full.0"),
        (lambda: BlockTables.for_groups(
            [16], max_num_reqs=1, max_model_len=1, max_num_tokens=1
        ), TypeError, r"groups\[0\] is 16: expected a GroupSpec"),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    group, sizes = plan.groups[0], {"max_model_len": 64, "max_num_tokens": 16}
    for wrong, message in [
        (group, r"groups is GroupSpec\(.*: expected a sequence"),
        ((each for each in [group]), r"groups is <generator .*: expected a sequence"),
        (("full_attention", 16), r"groups\[0\] is 'full_attention': expected a GroupSpec"),
    ]:
        with pytest.raises(TypeError, match=message):
            KVCacheManager.for_groups(wrong, 9, 64)
        with pytest.raises(TypeError, match=message):
            BlockTables.for_groups(wrong, max_num_reqs=1, **sizes)
    for call in (
        lambda: KVCacheManager.for_groups([group], 9, 64, context_parallel=2),
        lambda: BlockTables.for_groups([group], max_num_reqs=1, context_parallel=2, **sizes),
    ):
        with pytest.raises(TypeError, match="context_parallel is 2: expected a ContextParallel"):
            call()
    odd = plan_of([LayerSpec("odd", "full_attention", 6, 1, 1, dtype="int8")])
    with pytest.raises(ValueError, match="none of kernel_sizes"):
        kvcache.build(odd, max_num_reqs=1, kernel_sizes=[4])
    padded = replace(odd, layer_page_bytes=13, page_bytes=13)
    with pytest.raises(
        ValueError, match=r"kernel_sizes .* has 13 bytes per page: expected a multiple of 3"
    ):
        kvcache.build(padded, max_num_reqs=1, kernel_sizes=[2])
    cache = kvcache.build(plan_of([*FULL[:1], *STATES]), max_num_reqs=1)
    with pytest.raises(ValueError, match="has no slot mapping"):
        cache.slots("state.0", 1)
    assert isinstance(cache.storages[0], KVStorage)


def test_row_context_has_its_own_slots():
    layers = [
        LayerSpec("full", "full_attention", 4, 2, 8, dtype="float32"),
        LayerSpec("local", "sliding_window", 4, 2, 8, dtype="float32", options={"window": 6}),
    ]
    plan = plan_cache(layers, 2**20, max_model_len=64, max_num_batched_tokens=16)
    cache = kvcache.build(plan, max_num_reqs=3, num_preallocate_tokens=0)
    written = {name: torch.randn(2, 2, 40, 2, 8) for name in ("full", "local")}
    rows, first = np.array([0, 1], np.int32), 0
    requests = [Request(str(i), range(i, 40)) for i in range(2)]
    step = cache.manager.step(new=[Admit(each, num_tokens=8) for each in requests])
    while True:
        cache.worker.apply(step)
        starts = np.array([0, 8, 16], np.int32)
        positions = np.tile(np.arange(first, first + 8), 2)
        cache.tables.compute_slot_mapping(rows, positions, query_start_loc=starts)
        cache.tables.commit_slot_mapping(16)
        for name, kv in written.items():
            new = kv[:, :, first : first + 8].flatten(1, 2)  # concatenate the rows
            hnd = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in new]
            cache.write(name, *hnd)  # strided as in HND
        first += 8
        if first == 32:
            break
        step = cache.manager.step(rows, [8, 8])
    slots = cache.slots("full", 16).clone()
    for name, kv in written.items():
        key, value = context_of(cache, name, [1, 0], [32, 5])
        wanted = [torch.cat([kv[side, 1, :32], kv[side, 0, :5]]) for side in range(2)]
        if name == "local":  # positions outside the window read as zeros
            group = cache.group(name)
            for row, begin, n in ((1, 0, 32), (0, 32, 5)):
                null = np.repeat(cache.tables[group].get_numpy_array()[row] == 0, 4)[:n]
                assert null.tolist() == [position < 16 for position in range(n)]
                for each in wanted:
                    each[begin : begin + n][torch.from_numpy(null)] = 0
        assert torch.equal(key, wanted[0]) and torch.equal(value, wanted[1]), name
    assert torch.equal(cache.slots("full", 16), slots)  # the step's own slots are unchanged
    tables = cache.tables[0]
    long = tables.slots_of(np.zeros(500, np.int32), np.tile(np.arange(20), 25))
    assert len(long) == 500 and long.dtype == torch.int64  # more positions than a step has
    assert torch.equal(long[:20], tables.slots_of(None, torch.arange(20), query_start_loc=[0, 20]))
    for call, error, message in (
        (lambda: context_of(cache, "full", [0], [33]), ValueError, "because row 0 holds no"),
        (lambda: context_of(cache, "full", [3], [1]), ValueError, r"req_indices\[0\] is 3"),
        (lambda: cache.gather("no", slots), ValueError, "layer_name is 'no'"),
        (lambda: tables.slots_of(np.zeros(1)), TypeError, "positions is missing"),
        (lambda: tables.slots_of(None, np.zeros(1, int)), ValueError, "neither req_indices nor"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_unknown_options_name_the_public_function():
    plan, group = plan_of(FULL), GroupSpec("full_attention", 16)
    for call, name in (
        (lambda **o: kvcache.KVCacheManager(16, 9, 99, **o), "KVCacheManager"),
        (lambda **o: KVCacheManager.for_groups([group], 9, 99, **o), "KVCacheManager.for_groups"),
        (lambda **o: kvcache.build(plan, max_num_reqs=4, **o), "kvcache.build"),
    ):
        with pytest.raises(
            TypeError, match=rf"^{name}: option 'max_reqs' is unknown: expected one"
        ):
            call(max_reqs=4)


def test_null_pages_in_kernel_blocks_are_not_written():
    window = LayerSpec("w", "sliding_window", 16, 1, 8, dtype="float32", options={"window": 16})
    plan = plan_cache([window], 2**20, max_model_len=128, max_num_batched_tokens=128)
    for kernel_sizes in (None, [8], [4]):
        cache = kvcache.build(
            plan, max_num_reqs=4, kernel_sizes=kernel_sizes, num_preallocate_tokens=0
        )
        request = Request("a", range(100))
        # 96 tokens are external, and most of them are outside the window before they are written.
        step = cache.manager.step(new=[Admit(request, num_tokens=4, external=External(96))])
        cache.worker.apply(step)
        slots = cache.tables[0].slots_of(np.zeros(96, np.int32), np.arange(96))
        ones = torch.ones(96, 1, 8)
        cache.write("w", ones, ones, slots)
        assert cache.pages.layer(0)[0].sum() == 0
        assert cache.gather("w", slots)[0][:, 0, 0].tolist() == [0.0] * 80 + [1.0] * 16


@pytest.mark.parametrize(("layers", "clear"), [
    (FULL, "zero"),
    ([*LOCAL, *FULL], "zero"),
    (MODELS["fp8"], "zero"),
    ([*STATES, *FULL[:2]], "fresh"),
    ([*MODELS["fp8"], *FULL], "fresh"),
])  # fmt: skip
def test_fresh_pages_are_cleared_where_a_group_may_read_nan(layers, clear):
    plan = plan_of(layers)
    assert kvcache.build(plan, max_num_reqs=4).worker.clear == clear
    assert kvcache.build(plan, max_num_reqs=4, clear="fresh").worker.clear == "fresh"


def test_no_nan_of_a_state_is_left_in_an_attention_block():
    layers = [
        LayerSpec("full", "full_attention", 16, 2, 16, dtype="bfloat16"),
        LayerSpec("state", "recurrent", 16, dtype="float32", state_bytes=2048),
    ]
    cache = kvcache.build(plan_of(layers, state_interval=16), max_num_reqs=4)
    cache.pages.memory.fill_(0xFF)  # NaN in every dtype
    request = Request("a", range(5))
    cache.worker.apply(cache.manager.step(new=[request]))
    blocks = cache.manager.block_ids(request, cache.group("full"))
    assert not cache.kv_cache("full")[torch.from_numpy(blocks.astype(np.int64))].isnan().any()


def test_memory_that_was_never_used_holds_zeros():
    assert not kvcache.build(plan_of(FULL), max_num_reqs=4).pages.memory.any()
