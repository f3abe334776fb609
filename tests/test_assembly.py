"""One call from a plan to a cache: every model goes the same way, and reads what it has written."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import kvcache
from kvcache import ContextParallel, KVStorage, LayerSpec, MultiGroupBlockTable, Request, plan_cache
from kvcache.kinds import make_kind

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
    "fp8": [
        LayerSpec(f"fp8.{i}", "full_attention", 4, 2, 8, dtype="float8_e4m3fn") for i in range(3)
    ],
    "unequal K and V + sliding": [
        LayerSpec("wide", "full_attention", 4, 2, 8, 4, dtype="float16"),
        *LOCAL[:1],
    ],
}
MAX_LEN, CHUNK = 64, 16  # tokens


def plan_of(layers, num_pages=60, **options):
    plan = plan_cache(layers, 2**24, max_model_len=MAX_LEN, **options)
    return replace(plan, num_pages=num_pages)


class Engine:
    """Writes for each token what follows from layer and token alone, and reads it back."""

    def __init__(self, plan, **options):
        self.cache = kvcache.build(plan, max_num_reqs=3, num_preallocate_tokens=0, **options)
        self.specs = plan.layers
        for storage in self.cache.storages:
            if storage.dtype.is_floating_point and storage.dtype.itemsize == 1:
                storage.set_scales(*torch.ones(2, storage.num_layers, 1))
        self.num_loaded = self.num_checked = 0

    def content(self, spec, tokens):
        """K and V [n, heads, size] of tokens, exact in the layer's dtype; of a state, K alone."""
        storage = self.cache.storages[self.cache.group(spec.name)]
        layer = self.specs.index(spec)
        dtype = torch.bfloat16 if storage.k_scale is not None else storage.dtype
        out = []
        for part, size in enumerate((storage.head_size, storage.v_head_size)):
            shape = (len(tokens), storage.num_kv_heads, size)
            numbers = np.array(tokens).reshape(-1, 1) * 7919 + np.arange(shape[1] * size)
            mixed = (numbers * 8 + layer * 2 + part) * 2654435761 % 2**32 // 2**16 % 15
            out.append(torch.from_numpy(mixed.reshape(shape)).to(dtype))
        return out

    def run(self, request, tokens):
        """Prefill in chunks, then two tokens one by one; returns how many tokens were cached."""
        manager, tokens = self.cache.manager, list(tokens)
        row, cached = self.step(
            manager.step(new=[request], new_num_tokens=[CHUNK]), tokens, request.num_tokens, CHUNK
        )
        done = min(cached + CHUNK, len(tokens))
        while done < len(tokens):
            n = min(CHUNK, len(tokens) - done)
            self.step(manager.step([row], [n]), tokens, done + n, n)
            done += n
        for token in (5000, 5001):
            tokens.append(token)
            self.step(manager.step([row], [1], token_ids=[token]), tokens, len(tokens), 1)
        manager.free(request)
        return cached

    def step(self, step, tokens, most, n):
        """Carries a step out; row and first new token."""
        assert step.status.tolist() == [0]
        report = self.cache.worker.apply(step)
        assert not report.failed_pages and not report.failed_host_pages
        self.num_loaded += len(step.swap_in)
        row, start = int(step.rows[0]), int(step.num_computed_tokens[0])
        stop = min(start + n, most)
        for spec in self.specs:
            self.check_history(spec, row, tokens, start, stop)
        for spec in self.specs:
            self.write(spec, row, tokens, start, stop)
        for spec in self.specs:
            self.check_history(spec, row, tokens, stop, stop)
        self.cache.manager.report(report)
        return row, start

    def slots(self, row, first, last):
        tables = self.cache.tables
        tables.compute_slot_mapping(
            req_indices=np.full(last - first, row), positions=np.arange(first, last)
        )
        tables.commit_slot_mapping(num_tokens=last - first)

    def state_page(self, spec, row, num_tokens):
        table = self.cache.tables[self.cache.group(spec.name)]
        column = (num_tokens - 1) // table.block_size
        return table.block_table.gpu[row, column : column + 1].long()

    def write(self, spec, row, tokens, start, stop):
        if spec.state_bytes:
            key, _ = self.content(spec, tokens[stop - 1 : stop])
            self.cache.write(spec.name, key, None, self.state_page(spec, row, stop))
            return
        self.slots(row, start, stop)
        self.cache.write(spec.name, *self.content(spec, tokens[start:stop]))

    def check_history(self, spec, row, tokens, computed, stop):
        """A step that begins after `computed` tokens reads what was written."""
        if computed == 0:
            return
        if spec.state_bytes:
            wanted = self.content(spec, tokens[computed - 1 : computed])
            slots = self.state_page(spec, row, stop)
        else:
            first = make_kind(spec.kind, spec.options).first_needed_token(computed)
            wanted = self.content(spec, tokens[first:computed])
            self.slots(row, first, computed)
            slots = self.cache.slots(spec.name, computed - first)
        found = self.cache.gather(spec.name, slots, wanted[0].dtype)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
        self.num_checked += len(slots)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_written_is_read(model, layout):
    engine = Engine(plan_of(MODELS[model]), layout=layout)
    prompt = list(range(32))
    assert engine.run(Request("first", prompt), prompt) == 0
    other = [*prompt[:28], *range(100, 110)]
    assert engine.run(Request("second", other), other) > 0
    assert engine.num_checked > 100


@pytest.mark.parametrize("model", MODELS)
def test_what_left_for_the_host_comes_back(model):
    plan = plan_of(MODELS[model])
    smallest = replace(plan, num_pages=plan.pages_per_request(MAX_LEN) + 1)
    engine = Engine(smallest, num_host_blocks=400)
    assert engine.cache.host_pages.num_blocks == 400
    prompts = [[1000 * i + j for j in range(33)] for i in range(8)]
    for number in [*range(8), 0, 1, 2]:
        prompt = prompts[number]
        engine.run(Request(f"r{number}", prompt), prompt)
    assert engine.num_loaded > 0 and engine.cache.manager.stats.hit_rate > 0


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("model", ["recurrent + full", "MLA", "scales"])
def test_kernel_blocks_of_tables_and_tensors_agree(model, layout):
    scaled = {"scale_bytes_per_token": 4, "dtype": "int8"}
    scales = [LayerSpec(f"scaled.{i}", "full_attention", 16, 2, 8, **scaled) for i in range(2)]
    plan = plan_of({**MODELS, "scales": scales}[model])
    if model == "MLA":
        plan = plan_of([replace(spec, block_size=16) for spec in MODELS["MLA"]])
    engine = Engine(plan, layout=layout, kernel_sizes=[3, 4])
    prompt = list(range(1, 38))
    engine.run(Request("first", prompt), prompt)
    cache, request = engine.cache, Request("second", prompt)
    step = cache.manager.step(new=[request])
    cache.worker.apply(step)
    row, num_cached = int(step.rows[0]), int(step.num_computed_tokens[0])
    assert num_cached > 0
    for spec in plan.layers:
        group = cache.group(spec.name)
        table, storage = cache.tables[group], cache.storages[group]
        if spec.state_bytes:
            continue
        assert table.kernel_block_size == storage.block_size == 4 and table.blocks_per_kv_block > 1
        blocks = cache.kv_cache(spec.name)
        assert blocks.shape[0] == plan.num_pages * table.blocks_per_kv_block
        key = blocks[:, 0] if model != "MLA" else blocks[:, :, None]  # as a kernel reads it
        wanted, _ = engine.content(spec, prompt[:num_cached])
        column, offset = np.divmod(np.arange(num_cached), 4)
        found = key[table.block_table.cpu[row, column].long(), offset]
        assert torch.equal(found, wanted)
        if spec.scale_bytes_per_token:
            assert storage.scale_cache(0).shape == (blocks.shape[0], 4, 4)


def test_parts_are_those_of_the_plan():
    plan = plan_of(MODELS["sliding + full"])
    cache = kvcache.build(
        plan,
        max_num_reqs=3,
        swap_options={"layers_per_event": 1},
        num_host_blocks=9,
        backend="TRITON_ATTN",
    )
    assert cache.plan is plan and cache.manager.groups == plan.groups
    assert cache.manager.options.page_bytes == cache.pages.page_bytes == plan.page_bytes
    assert cache.pages.num_blocks == plan.num_pages and cache.host_pages.num_blocks == 9
    assert cache.worker.pages is cache.pages and cache.worker.host is cache.host_pages
    assert cache.worker.engine.layers_per_event == 1
    for spec in plan.layers:
        group = cache.group(spec.name)
        index = plan.groups[group].layers.index(spec.name)
        assert cache.kv_cache(spec.name) is cache.storages[group].kv_caches[index]
    places = {cache.kv_cache(spec.name).data_ptr() for spec in plan.layers}
    assert len(places) == len(plan.groups[0].layers)  # groups share pages, layers of a group do not
    assert kvcache.build(plan, max_num_reqs=3).host_pages is None


def test_tables_follow_from_groups_and_kinds():
    plan = plan_of(
        [*FULL[:1], *LOCAL[:1], *STATES[:1]], context_parallel=ContextParallel(dcp_world_size=2)
    )
    sizes = {"max_num_reqs": 2, "max_model_len": MAX_LEN, "max_num_batched_tokens": CHUNK}
    tables = MultiGroupBlockTable.for_groups(
        plan.groups, **sizes, kernel_sizes=[4], context_parallel=plan.context_parallel
    )
    found = {g.kind: tables[i].layout for i, g in enumerate(plan.groups)}
    assert {kind: layout.window for kind, layout in found.items()} == {
        "full_attention": 0, "sliding_window": 10, "recurrent": 0,
    }  # fmt: skip
    assert [found[k].has_slots for k in ("full_attention", "recurrent")] == [True, False]
    assert found["full_attention"].kernel_block_size == 4
    assert found["recurrent"].kernel_block_size == found["recurrent"].block_size
    assert all(layout.world_size == 2 for layout in found.values())
    for group, table in zip(plan.groups, tables.block_tables):
        assert table.max_num_blocks_per_req == -(-MAX_LEN // (2 * group.block_size))


def test_wrong_calls_are_named():
    plan = plan_of(FULL)
    cache = kvcache.build(plan, max_num_reqs=1)
    for call, error, message in [
        (lambda: kvcache.build([], max_num_reqs=1), TypeError, r"plan is \[\]: expected a CachePlan"),
        (lambda: kvcache.build(plan, max_num_reqs=0), ValueError, "max_num_reqs is 0"),
        (lambda: kvcache.build(plan, max_num_reqs=1, layout="DNH"), ValueError, "layout is 'DNH'"),
        (lambda: kvcache.build(plan, max_num_reqs=1, num_host_blocks=-1), ValueError, "num_host_blocks"),
        (lambda: cache.kv_cache("full.9"), ValueError, "layer_name is 'full.9': expected one of full.0"),
        (lambda: MultiGroupBlockTable.for_groups(
            [16], max_num_reqs=1, max_model_len=1, max_num_batched_tokens=1
        ), TypeError, "a group is 16: expected a GroupSpec"),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    odd = plan_of([LayerSpec("odd", "full_attention", 6, 1, 1, dtype="int8")])
    with pytest.raises(ValueError, match="none of kernel_sizes"):
        kvcache.build(odd, max_num_reqs=1, kernel_sizes=[4])
    padded = replace(odd, layer_page_bytes=13, page_bytes=13)
    with pytest.raises(ValueError, match="has 13 bytes of a page: expected a multiple of 3"):
        kvcache.build(padded, max_num_reqs=1, kernel_sizes=[2])
    cache = kvcache.build(plan_of([*FULL[:1], *STATES]), max_num_reqs=1)
    with pytest.raises(ValueError, match="has no slot mapping"):
        cache.slots("state.0", 1)
    assert isinstance(cache.storages[0], KVStorage)
