# SPDX-License-Identifier: Apache-2.0
"""Descriptions of caches: offsets of elements, serialization and rejected values."""

import itertools
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest

from kvcache.memory_plan import plan_cache
from kvcache.specs import ContextParallel, LayerSpec
from kvcache.transfer.description import CacheDescription, Coordinates
from tests.machinery.transfer_plan_checker import ORDERS, PARTS, Memory, cache, of


@pytest.mark.parametrize(("values", "message"), [
    (of(tp_size=3), "total_num_kv_heads is 4, tp_size is 3"),
    (of(pp_size=4), "num_layers is 2, pp_size is 4"),
    (of(cp_interleave=3), "cp_interleave is 3: expected a divisor of block_size, 4"),
    (of(block_size=0), "block_size is 0"),
    (of(memory_order=("kv", "block", "token")), "memory_order is .*including .*token"),
    (of(memory_order=("token", "block", "head", "element")),
     "only layer, kv and head before block"),
    (of(memory_order=("block", "element", "token")), "expected element last"),
    (of(memory_order=("block", "token", "token", "element")), "each at most once"),
    (of(memory_order=("block", "token", "element")), "num_kv_heads is 4: expected 1 with the"),
    (of(dtype="int3"), "dtype is 'int3'"),
    (of(is_mla=True), "total_num_kv_heads is 4: expected 1 with is_mla"),
    (of(version=2), "version is 2, of engine .*: expected 1"),
    (of(stages=[(1, 1)]), "num_layers is 2: expected 1, the total number of layers"),
    (of(stages=[(1, 3), (1, 1)]), "total_num_kv_heads is 4, tp_size is 3"),
    (of(stages=[(1, 1), (1, 0)]), r"tp_size of stages\[1\] is 0"),
    (of(stages=[(2, 1)], pp_size=2), "pp_size is 2: expected 1 with stages"),
    (of(stages=[(2, 1)], tp_size=2), "tp_size is 2: expected 1 with stages"),
    (of(scale_bytes_per_head=-1), "scale_bytes_per_head is -1"),
    (of(scale_bytes_per_head=4, packing="heads first"),
     "scale_bytes_per_token is 16: expected 0 with the memory order"),
    (of(k_scale=[[1.0], [1.0]]), "k_scale is given: expected None with dtype 'float32'"),
    (of(dtype="uint8", k_scale=[[1.0]]),
     r"k_scale has shape \[1, 1\]: expected \[2, 1\] or \[2, 4\]"),
    (of(dtype="uint8", k_scale=[[1.0], [0.0]]), r"k_scale is .*: expected finite numbers above 0"),
    (of(dtype="uint8", v_head_size=0, v_scale=[[1.0], [1.0]]),
     "v_scale is given: expected None, because there is no V"),
    (of(stages=[(1, 1), (1, 2)], packing="blocks_first", page_stride=255),
     "page_stride is 255: expected 256 to"),
    (of(stages=[(1, 1), (1, 2)], packing="blocks_first", page_stride=[256, 127]),
     r"page_stride\[1\] is 127: expected 128 to"),
    (of(stages=[(1, 1), (1, 2)], packing="blocks_first", page_stride=[256]),
     "page_stride has 1 entries: expected 2, one per stage"),
])  # fmt: skip
def test_impossible_descriptions_are_rejected(values, message):
    with pytest.raises(ValueError, match=message):
        cache(**values)


def test_description_round_trips_by_json_and_pickle():
    one = cache(tp_size=2, layout="HND", cp_world_size=2, v_head_size=1)
    assert CacheDescription.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert pickle.loads(pickle.dumps(one)) == one and hash(one) == hash(replace(one))
    two = cache(
        stages=[(1, 1), (1, 2)], packing="blocks_first", page_stride=[256, 128], dtype="uint8",
        scale_bytes_per_head=8, k_scale=np.full((2, 4), 0.5, np.float32), v_scale=[[1], [2]],
    )  # fmt: skip
    assert CacheDescription.from_dict(json.loads(json.dumps(two.to_dict()))) == two
    assert pickle.loads(pickle.dumps(two)) == two and hash(two) == hash(replace(two))
    assert two.stages == ((1, 1), (1, 2)) and two.v_scale == ((1.0,), (2.0,))
    values = one.to_dict()
    without = {name: value for name, value in values.items() if name != "num_layers"}
    for wrong, message in (
        ({**values, "version": 7, "new": 1}, "version is 7, of engine .*: expected 1"),
        ({**values, "colour": 1}, r"unknown fields \['colour'\]"),
        (without, r"missing fields \['num_layers'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            CacheDescription.from_dict(wrong)
    state = pickle.dumps(one).replace(b"version\x94K\x01", b"version\x94K\x05")
    with pytest.raises(ValueError, match=r"version is 5, of engine .*: expected 1"):
        pickle.loads(state)


@pytest.mark.parametrize("packing", ORDERS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("values", [of(v_head_size=1), of(is_mla=True, total_num_kv_heads=1)])
def test_offset_equals_the_plain_definition(packing, layout, values):
    one = cache(packing=packing, layout=layout, **values)
    memory = Memory(one, np.array([0]), np.array([[0]]), 1)
    sizes = [one.head_size, one.v_head_size][: len(one.head_bytes)]
    assert memory.region_length.tolist() == (one.region_bytes // 4).tolist()
    for layer, part, token, head in itertools.product(
        range(2), range(len(sizes)), range(4), range(one.total_num_kv_heads)
    ):
        region, offset = one.offset_of(layer, part, token, head)
        element = memory.elements[0, memory.region_start[region] + offset // 4]
        code = ((token * 2 + layer) * one.total_num_kv_heads + head) * PARTS + part
        assert element == code * max(sizes)


def test_ranks_of_uneven_stages_are_numbered_by_stage():
    one = cache(num_layers=6, stages=[(1, 2), (3, 4), (2, 1)], cp_world_size=2)
    assert one.world_size == 14
    numbers = [(cp, pp, tp) for cp in (0, 1) for pp, n in enumerate((2, 4, 1)) for tp in range(n)]
    for number, at in enumerate(numbers):
        assert one.coordinates(number) == at and one.rank_of(Coordinates(*at)) == number
        assert len(one.heads(number)) == (2, 1, 4)[at[1]] == one.stage_of(number).heads_per_rank
        assert one.layers(number) == (range(1), range(1, 4), range(4, 6))[at[1]]
    for name in ("placement", "region_bytes", "region_strides", "heads_per_rank"):
        with pytest.raises(
            ValueError, match=rf"{name} of engine 'a' differs by stage: use stage_of"
        ):
            getattr(one, name)
    alike = cache(stages=[(1, 2), (1, 2)])
    assert alike.heads_per_rank == 2 and alike.world_size == cache(pp_size=2, tp_size=2).world_size


def test_groups_of_a_plan_are_described_unless_untransferred():
    cp = ContextParallel(dcp_world_size=2)
    layers = [LayerSpec(f"full.{i}", "full_attention", 16, 2, 64) for i in range(4)]
    layers += [LayerSpec("mla", "full_attention", 16, 1, 576, v_head_size=0, replicated=True)]
    layers += [LayerSpec("own", "full_attention", 16, 2, 64, transferred=False)]
    layers += [LayerSpec("state", "recurrent", 1, state_bytes=64)]
    plan = plan_cache(layers, 2**24, max_model_len=64, context_parallel=cp)

    def described(name, **sizes):
        (group,) = [group for group in plan.groups if name in group.layers]
        return CacheDescription.of_group(
            group, plan.layers, engine_id="a", cp_world_size=2, **sizes
        )

    full = described("full.0", tp_size=4, pp_size=2)
    group = next(group for group in plan.groups if "full.0" in group.layers)
    assert (full.num_layers, full.layers(0)) == (2 * len(group.layers), range(len(group.layers)))
    assert (full.total_num_kv_heads, full.heads_per_rank, full.head_size) == (8, 2, 64)
    assert (full.block_size, full.cp_world_size) == (group.block_size, 2)
    assert described("full.0", tp_size=4, total_num_kv_heads=2).heads_per_rank == 1
    mla = described("mla", tp_size=4)
    assert (mla.is_mla, mla.total_num_kv_heads, mla.cp_world_size) == (True, 1, 1)
    with pytest.raises(
        ValueError, match=r"^group with layers \('own',\) has transferred=False: expected"
    ):
        described("own")
    with pytest.raises(
        ValueError, match="layer 'state' keeps a state: expected a group of K and V"
    ):
        described("state")
    with pytest.raises(ValueError, match=r"but layers lacks \['x'\]"):
        CacheDescription.of_group(
            replace(plan.groups[0], layers=("x",)), plan.layers, engine_id="a"
        )


def test_group_description_may_have_stages():
    layers = [LayerSpec(str(i), "full_attention", 16, 2, 64) for i in range(30)]
    plan = plan_cache(layers, 2**24, max_model_len=64)
    stages = [(30, 4), (2, 8)]
    with pytest.raises(ValueError, match="total_num_kv_heads is None with stages"):
        CacheDescription.of_group(plan.groups[0], plan.layers, engine_id="x", stages=stages)
    found = CacheDescription.of_group(
        plan.groups[0], plan.layers, engine_id="x", stages=stages, total_num_kv_heads=8
    )
    assert found.num_layers == 32
    with pytest.raises(TypeError, match="pp_size"):
        CacheDescription.of_group(plan.groups[0], plan.layers, engine_id="x", pp_size="2")


def test_circular_group_cannot_be_described():
    options = {"window": 16, "buffer": 79}
    layer = LayerSpec("c", "circular_window", 16, 1, 8, options=options)
    plan = plan_cache([layer], 2**20, max_model_len=256, max_num_batched_tokens=64)
    with pytest.raises(ValueError, match=r"group with layers \('c',\) is circular"):
        CacheDescription.of_group(plan.groups[0], plan.layers, engine_id="x")
