# SPDX-License-Identifier: Apache-2.0
"""Callers of vLLM's block tables and of those of its NPU variant, beside the slot formula."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvcache import ContextParallel
from kvcache.compat import ascend_block_table, vllm_block_table
from tests.compat.callers import load


def slot(blocks, position, block_size):
    return blocks[position // block_size] * block_size + position % block_size


@pytest.mark.parametrize("older", [False, True], ids=["newest", "older"])
@pytest.mark.parametrize("seed", range(3))
def test_caller_of_vllms_tables(seed, older):
    names = ("vllm.v1.worker.block_table", "kvcache.compat.vllm_block_table")
    worker = load("gpu_worker", *names)
    rng = random.Random(seed)
    sizes = [16, 32]
    batch = worker.Batch(5, 256, 64, sizes, [16, 8])
    blocks, free, lengths = {}, [*range(1, 400)], {}
    rng.shuffle(free)
    for step in range(60):
        if len(blocks) < 5 and rng.random() < 0.4:
            blocks[step] = ([free.pop()], [free.pop(), free.pop()])
            lengths[step] = 0
            batch.add(step, blocks[step])
        counts = {name: rng.randint(1, 9) for name in blocks}
        for name in [name for name in blocks if lengths[name] + counts[name] > 256]:
            batch.remove(name)
            del blocks[name], lengths[name], counts[name]
        for name, groups in blocks.items():
            ends = [lengths[name] + counts[name]] * 2
            missing = [
                max(-(-end // size) - len(ids), 0) for end, size, ids in zip(ends, sizes, groups)
            ]
            new = [[free.pop() for _ in range(count)] for count in missing]
            batch.append(name, new)
            for ids, more in zip(groups, new):
                ids += more
        if not blocks:
            continue
        batch.reorder(rng.choice([*blocks]), rng.choice([*blocks]))
        found = batch.step(counts, older)
        for g, size in enumerate(sizes):
            for name, ids in blocks.items():
                positions = range(lengths[name], lengths[name] + counts[name])
                assert found[g][name] == [slot(ids[g], p, size) for p in positions]
        for name in blocks:
            lengths[name] += counts[name]
        free = [b for b in range(1, 400) if not any(b in i for ids in blocks.values() for i in ids)]


@pytest.mark.parametrize("kernel_sizes", [None, [0], [48, 32], [128]])
def test_caller_of_the_npu_tables(kernel_sizes):
    names = ("vllm_ascend.worker.block_table", "kvcache.compat.ascend_block_table")
    worker = load("npu_worker", *names)
    rows, starts, counts = [[3, 9], [7], [5, 2]], [126, 0, 40], [3, 5, 1]
    table = worker.one_table(128, kernel_sizes, 2)
    assert table.slot_mapping.gpu.dtype == torch.int32 and len(table.slot_mapping.gpu) == 64 + 2 * 4
    assert table.logical_block_size == {None: 128, 48: 32}.get(
        kernel_sizes and kernel_sizes[0], 128
    )
    step, drafts, positions = worker.run(table, rows, starts, counts)
    expected = [
        slot(blocks, p, 128) for blocks, s, n in zip(rows, starts, counts) for p in range(s, s + n)
    ]
    assert step == expected
    assert drafts == [slot(rows[i // 2], p, 128) for i, p in enumerate(positions)]


def test_caller_of_the_npu_tables_of_several_groups():
    names = ("vllm_ascend.worker.block_table", "kvcache.compat.ascend_block_table")
    worker = load("npu_worker", *names)
    tables = worker.all_tables([32, 64], [[16]], [8, 3], worker.GROUPS)
    assert [table.get_cpu_tensor().shape for table in tables] == [(4, 16), (4, 12)]
    assert [table.is_mamba_group for table in tables] == [False, True]
    tables.add_row(([4, 5], [6]), 0)
    begin, positions = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([30, 31, 32])
    tables.compute_slot_mapping(1, begin, positions)
    assert tables[0].slot_mapping.np[:4].tolist() == [158, 159, 160, -1]
    lists = [np.array([33]), np.array([0])], [np.array([0], np.int32)] * 2
    tables.compute_slot_mapping_draft(np.array([0]), np.array([1]), *lists)
    assert tables[0].slot_mapping.np[:2].tolist() == [161, -1]
    tables.compute_slot_mapping(1, begin, positions, *lists)
    assert tables[0].slot_mapping.np[:2].tolist() == [161, -1]
    tables.compute_slot_mapping(1, begin, positions, None, None)
    assert tables[0].slot_mapping.np[:3].tolist() == [158, 159, 160]
    tables.compute_slot_mapping_draft(np.array([0], np.int32), np.array([1]))
    assert tables[0].slot_mapping.np[:2].tolist() == [129, -1]


@pytest.mark.parametrize("rank", range(4))
def test_npu_tables_distribute_slots_over_ranks(rank):
    cp = ContextParallel(2, rank // 2, 2, rank % 2)
    table = ascend_block_table.BlockTable(8, 4, 6, 64, False, "cpu", [4], 2, 1, context_parallel=cp)
    assert table.block_table.np.shape[0] == 4 * 2 and len(table.slot_mapping.np) == 64 + 2 * 2 * 4
    table.add_row([3, 5], 1)
    positions = np.arange(32)
    table.compute_slot_mapping(np.full(32, 1, np.int32), positions)
    ids = np.array([6, 7, 10, 11])[positions // 16]
    offset = positions % 16
    local = ids * 4 + offset // 8 * 2 + offset % 2
    assert (
        table.slot_mapping.np[:32].tolist() == np.where(offset // 2 % 4 == rank, local, -1).tolist()
    )


def test_eighth_argument_is_a_number_of_drafts_or_a_list_of_widths():
    groups = (4, 64, 32, False, "cpu", [16, 32], [16, 32])
    drafts = vllm_block_table.MultiGroupBlockTable(*groups, 6)
    assert [table.max_num_blocks_per_req for table in drafts] == [7, 7]
    widths = vllm_block_table.MultiGroupBlockTable(*groups, [5, None], 1)
    assert [table.max_num_blocks_per_req for table in widths] == [5, 2]
    plain = vllm_block_table.MultiGroupBlockTable(*groups, None)
    assert [table.max_num_blocks_per_req for table in plain] == [4, 2]


def test_groups_are_tables_with_the_same_calls():
    tables = vllm_block_table.MultiGroupBlockTable(4, 64, 32, False, "cpu", [16, 32], [16, 16])
    tables.add_row(([4], [6]), 0)
    begin, positions = np.array([0, 2, 9], np.int32), np.array([3, 4])
    tables[1].compute_slot_mapping(1, begin, positions)
    assert tables[1].slot_mapping.np[:3].tolist() == [12 * 16 + 3, 12 * 16 + 4, -1]
    tables[0].compute_slot_mapping(num_reqs=1, query_start_loc=begin, positions=positions)
    assert tables[0].slot_mapping.np[:3].tolist() == [67, 68, -1]
    assert type(tables[0]) is vllm_block_table.BlockTable
    ids = vllm_block_table.BlockTable.map_to_kernel_blocks(np.array([0, 2]), 2, np.arange(2))
    assert ids.tolist() == [0, 1, 4, 5]


FIRST = (64, 4, 8, 32, False, "cpu")
MULTI = (4, 64, 32, False, "cpu", [16, 32])
NPU, GPU = ascend_block_table, vllm_block_table


def slots(*given, **named):
    table = GPU.BlockTable(*FIRST, 16)
    table.add_row([1], 0)
    table.compute_slot_mapping(*given, **named)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: GPU.BlockTable(*FIRST, 48), ValueError, "kernel_block_size 48 .* block_size 64"),
    (lambda: NPU.BlockTable(*FIRST, [48, 96]), ValueError, r"kernel_sizes \[48, 96\] divides"),
    (lambda: NPU.BlockTable(*FIRST, 16), TypeError, "kernel_sizes is 16: expected a list"),
    (lambda: NPU.BlockTable(*FIRST, [16], kernel_block_size=16), ValueError,
     "kernel_block_size is 16 and kernel_sizes"),
    (lambda: NPU.BlockTable(*FIRST, [16], 1, -1), ValueError, "num_speculative_tokens is -1"),
    (lambda: NPU.MultiGroupBlockTable(*MULTI, 0, [4]), ValueError,
     "max_num_blocks has 1 entries, but block_sizes has 2"),
    (lambda: NPU.MultiGroupBlockTable(*MULTI, 0, None, [[16]] * 3), ValueError,
     "kernel_sizes has 3 entries, but block_sizes has 2"),
    (lambda: NPU.MultiGroupBlockTable(*MULTI, kv_cache_groups=[SimpleNamespace()]), ValueError,
     "kv_cache_groups has 1 entries, but block_sizes has 2"),
    (lambda: NPU.MultiGroupBlockTable(*MULTI, kv_cache_groups=3), TypeError,
     "kv_cache_groups is 3"),
    (lambda: GPU.MultiGroupBlockTable(*MULTI, [16]), ValueError,
     "kernel_block_sizes has 1 entries, but block_sizes has 2"),
    (lambda: slots(2, np.array([0, 1]), np.array([1])), ValueError,
     "query_start_loc .* num_reqs is 2"),
    (lambda: slots(True, np.array([0, 1]), np.array([1])), TypeError, "num_reqs is True"),
    (lambda: slots(1, np.array([0, 1]), np.array([1]), 4), TypeError, "4 positional arguments"),
    (lambda: slots(1, 5, np.array([1])), ValueError, "query_start_loc is 5"),
    (lambda: slots(1, np.array([0, 1]), np.array([1]), num_reqs=1), TypeError,
     "num_reqs is 1: expected it once"),
    (lambda: slots(1, np.array([0, 1]), np.array([1]), query_start_loc=np.array([0, 1])), TypeError,
     "query_start_loc .* once"),
    (lambda: slots(np.array([0])), TypeError, "positions is missing"),
    (lambda: slots(np.array([0]), np.array([1]), positions=np.array([1])), TypeError,
     "positions once"),
])  # fmt: skip
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_an_overflowing_row_changes_nothing():
    for table in (GPU.BlockTable(*FIRST, 16), NPU.BlockTable(*FIRST, [16])):
        table.add_row([1, 2], 1)
        before = table.block_table.np.copy()
        with pytest.raises(ValueError, match="row 1"):
            table.append_row([3] * 7, 1)
        assert (table.block_table.np == before).all() and table.num_blocks_per_row[1] == 8


def groups_with_states(**options):
    groups = [SimpleNamespace(kv_cache_spec=kind()) for kind in (object, type("MambaSpec", (), {}))]
    return NPU.MultiGroupBlockTable(*MULTI, kv_cache_groups=groups, **options)


def test_lists_of_compressed_groups_are_checked():
    tables = groups_with_states()
    tables.add_row(([4], [6]), 0)
    begin, positions = np.array([0, 1], np.int32), np.array([3])
    lists = [np.array([5]), np.array([0])], [np.array([0], np.int32)] * 2
    names = ("positions_compressed_list", "req_indices_compressed_list")
    tables.compute_slot_mapping(1, begin, positions, **dict(zip(names, lists)))
    assert tables[0].slot_mapping.np[:2].tolist() == [4 * 16 + 5, -1]
    tables.compute_slot_mapping(1, begin, positions, lists[0])  # without the other: not compressed
    assert tables[0].slot_mapping.np[:2].tolist() == [4 * 16 + 3, -1]
    for call in (tables.compute_slot_mapping_draft, partial(tables.compute_slot_mapping, 1)):
        with pytest.raises(ValueError, match="positions_compressed_list has 1 entries"):
            call(begin, positions, lists[0][:1], lists[1])
    with pytest.raises(TypeError, match="6 positional arguments"):
        tables.compute_slot_mapping(1, begin, positions, *lists, 3)
    with pytest.raises(TypeError, match="4 positional arguments"):
        tables.compute_slot_mapping(1, begin, positions, lists[0], **{names[1]: lists[1]})


def test_rows_of_states_hold_the_blocks_of_all_ranks():
    cp = ContextParallel(dcp_world_size=2)
    tables = groups_with_states(max_num_blocks=[2, np.int64(2)], context_parallel=cp)
    assert [table.max_num_blocks_per_req for table in tables] == [2, 4]
    group = SimpleNamespace(kv_cache_spec=type("MambaSpec", (), {})())
    one = NPU.BlockTable(64, 4, 2, 32, kv_cache_group=group, context_parallel=cp)
    assert one.max_num_blocks_per_req == 4
    with pytest.raises(TypeError, match=r"max_num_blocks\[1\] is True"):
        groups_with_states(max_num_blocks=[2, True])


def test_options_of_the_npu_launch_are_accepted():
    assert len(groups_with_states(use_fused_slot_mapping=False)) == 2
    with pytest.raises(TypeError, match="enable_multistream_slot_mapping is 1"):
        groups_with_states(enable_multistream_slot_mapping=1)
