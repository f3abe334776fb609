# SPDX-License-Identifier: Apache-2.0
"""The interfaces in `kvcache.compat`: every name of the contract is found in its module, a name in the
wrong place raises an error that names the module, and the page for users of other engines names what
exists.
"""

import contextlib
import dataclasses
import importlib
import inspect
import pkgutil
import re
from enum import Enum

import pytest

import kvcache
from kvcache import compat
from kvcache.compat import (
    ascend_block_table,
    block_space_manager,
    kv_cache_manager,
    kv_transfer,
    vllm_block_table,
)
from tests.machinery.shared import REPO

SIZES = (16, 4, 8, 64, False, "cpu")
GROUPS = (4, 128, 64, False, "cpu", [16, 32])
TABLE_CALLS = (
    "add_row append_row clear_row move_row swap_row commit_block_table commit_slot_mapping clear "
    "compute_slot_mapping"
)
# The names of each line of the contract: (module, object, attributes).
WALK = {
    "A1": (vllm_block_table, "table", "block_table.np block_table.cpu block_table.gpu "
           "slot_mapping.np slot_mapping.cpu slot_mapping.gpu num_blocks_per_row"),
    "A2": (vllm_block_table, "table", "map_to_kernel_blocks blocks_per_kv_block"),
    "A3": (vllm_block_table, "table", "add_row append_row clear_row move_row swap_row"),
    "A4": (vllm_block_table, "table", "compute_slot_mapping slot_mapping"),
    "A5": (vllm_block_table, "table", "compute_slot_mapping"),
    "A6": (vllm_block_table, "table", "compute_slot_mapping commit_slot_mapping"),
    "A7": (vllm_block_table, "table", "commit_block_table commit_slot_mapping clear "
           "get_device_tensor get_cpu_tensor get_numpy_array"),
    "A8": (vllm_block_table, "tables", f"{TABLE_CALLS} block_tables __getitem__"),
    "A9": (kvcache, "context", "pcp_world_size pcp_rank dcp_world_size dcp_rank"),
    "B1": (ascend_block_table, "npu_table", "kernel_block_size logical_block_size "
           "physical_block_size blocks_per_phys_block"),
    "B2": (ascend_block_table, "npu_table", "slot_mapping"),
    "B3": (ascend_block_table, "npu_table", "block_table"),
    "B4": (ascend_block_table, "npu_tables", f"{TABLE_CALLS} compute_slot_mapping_draft"),
    "B5": (kv_cache_manager, "manager", "manager.cache.hash_block_size"),
    "B6": (kvcache, "ops", "copy_blocks"),
    "B7": (ascend_block_table, "npu_table", "get_device_tensor device"),
    "C1": (kv_transfer, None, "get_kv_connector_cache_layout"),
    "C2": (kv_transfer, "KVOutputAggregator", "from_connector aggregate"),
    "C3": (kv_transfer, None, "copy_kv_blocks"),
    "C4": (kv_transfer, None, "kv_postprocess_blksize_on_receive kv_postprocess_layout_on_receive "
           "kv_postprocess_blksize_and_layout_on_receive"),
    "C5": (kv_transfer, None, "yield_req_data"),
    "C6": (kv_transfer, "topology", "tp_rank tp_size pp_rank pp_size engine_id tensor_shape is_mla "
           "total_num_kv_heads is_kv_layout_blocks_first split_k_and_v cross_layers_blocks "
           "block_size_position tp_ratio pp_ratio block_size_ratio is_kv_replicated "
           "replicates_kv_cache get_target_remote_ranks tp_ratio_from_engine_id "
           "block_size_ratio_from_engine_id get_target_remote_ranks_from_engine_id"),
    "C6, the older name": (kv_transfer, "tp_topology", "remote_tp_size remote_block_size tp_ratio "
           "get_target_remote_ranks_from_engine_id"),
    "C7": (kvcache.layouts, None, "AttentionBackend backend register_backend"),
    "D1": (kv_cache_manager, "manager", "block_size manager"),
    "D2": (kv_cache_manager, "manager", "get_computed_blocks"),
    "D3": (kv_cache_manager, "manager", "allocate_slots"),
    "D4": (kv_cache_manager, "manager", "append_slots"),
    "D5": (kv_cache_manager, "manager", "manager.take_copies"),
    "D6": (kv_cache_manager, "manager", "free"),
    "D7": (kv_cache_manager, "manager", "manager.pool.num_evicted"),
    "D8": (kv_cache_manager, "manager", "get_num_common_prefix_blocks reset_prefix_cache "
           "manager.cache.start_epoch"),
    "D9": (kvcache, None, "hash_blocks Request"),
    "D10": (kvcache, "kernel_manager", "for_groups block_sizes"),
    "E1": (block_space_manager, "sequences", "block_size sliding_window enable_caching"),
    "E1, the full name": (block_space_manager, None, "SelfAttnBlockSpaceManager BlockSpaceManager"),
    "E2": (block_space_manager, "sequences", "can_allocate allocate get_cross_block_table "
           "watermark_blocks"),
    "E2, the answers": (block_space_manager, "AllocStatus", "OK LATER NEVER"),
    "E3": (block_space_manager, "sequences", "can_append_slots append_slots"),
    "E4": (block_space_manager, "sequences", "fork"),
    "E5": (block_space_manager, "sequences", "can_swap_out swap_out can_swap_in swap_in"),
    "E6": (block_space_manager, "sequences", "sliding_window get_block_table"),
    "E7": (block_space_manager, "sequences", "access_all_blocks_in_seq mark_blocks_as_computed "
           "get_common_computed_block_ids get_num_cached_tokens "
           "remove_seq_from_computed_blocks_tracker get_prefix_cache_hit_rate reset_prefix_cache "
           "get_num_free_gpu_blocks get_num_free_cpu_blocks get_block_table free"),
    "E8": (block_space_manager, None, "SequenceLike SequenceGroupLike"),
}  # fmt: skip
MAKE = {
    "table": lambda: vllm_block_table.BlockTable(*SIZES, 16, 1),
    "tables": lambda: vllm_block_table.MultiGroupBlockTable(*GROUPS, [16, 16], 0, 1),
    "npu_table": lambda: ascend_block_table.BlockTable(*SIZES, [16], 1, 0),
    "npu_tables": lambda: ascend_block_table.MultiGroupBlockTable(*GROUPS, 0, [8, 4], [[16]], 1),
    "context": lambda: kvcache.ContextParallel(1, 0, 2, 1),
    "topology": lambda: kv_transfer.KVTopology("a", 0, 1),
    "tp_topology": lambda: kv_transfer.TpKVTopology(
        0, {"a": 1}, False, 4, "FLASH_ATTN", "a", {"a": 16}
    ),
    "manager": lambda: kv_cache_manager.KVCacheManager(16, 9, 128, None, True, 64),
    "kernel_manager": lambda: kvcache.KVCacheManager,
    "sequences": lambda: block_space_manager.BlockSpaceManager(16, 9, 9, 0.01, None, True),
    "ops": lambda: importlib.import_module("kvcache.ops"),
}
LINES = {f"A{i}" for i in range(1, 10)} | {f"B{i}" for i in range(1, 8)}
LINES |= {f"C{i}" for i in range(1, 8)} | {f"D{i}" for i in range(1, 11)}
LINES |= {f"E{i}" for i in range(1, 9)}


def test_the_walk_has_every_line_of_the_contract():
    assert {line.partition(",")[0] for line in WALK} == LINES and len(LINES) == 41


@pytest.mark.parametrize("line", WALK)
def test_names_of_the_contract_are_in_their_modules(line):
    module, of, names = WALK[line]
    of = module if of is None else MAKE[of]() if of in MAKE else getattr(module, of)
    for name in names.split():
        value = of
        for part in name.split("."):
            value = getattr(value, part)


# The parameters of each call, in the order of the original.
SIGNATURES = {
    "vllm_block_table.BlockTable": "block_size max_num_reqs max_num_blocks_per_req "
    "max_num_batched_tokens pin_memory device kernel_block_size cp_kv_cache_interleave_size",
    "vllm_block_table.MultiGroupBlockTable": "max_num_reqs max_model_len max_num_batched_tokens "
    "pin_memory device block_sizes kernel_block_sizes num_speculative_tokens "
    "cp_kv_cache_interleave_size",
    "ascend_block_table.BlockTable": "block_size max_num_reqs max_num_blocks_per_req "
    "max_num_batched_tokens pin_memory device kernel_sizes cp_kv_cache_interleave_size "
    "num_speculative_tokens kv_cache_group",
    "ascend_block_table.MultiGroupBlockTable": "max_num_reqs max_model_len max_num_batched_tokens "
    "pin_memory device block_sizes num_speculative_tokens max_num_blocks kernel_sizes "
    "cp_kv_cache_interleave_size kv_cache_groups",
    "ascend_block_table.MultiGroupBlockTable.compute_slot_mapping_draft": "self req_indices "
    "positions positions_compressed_list req_indices_compressed_list",
    "kv_transfer.KVOutputAggregator": "expected_finished_count",
    "kv_transfer.KVOutputAggregator.from_connector": "connector world_size",
    "kv_transfer.KVOutputAggregator.aggregate": "self outputs output_rank",
    "kv_transfer.copy_kv_blocks": "src_kv_caches dst_kv_caches src_block_ids dst_block_ids direction",
    "kv_transfer.kv_postprocess_blksize_on_receive": "cache indices block_size_ratio",
    "kv_transfer.kv_postprocess_layout_on_receive": "cache indices",
    "kv_transfer.kv_postprocess_blksize_and_layout_on_receive": "cache indices block_size_ratio",
    "kv_transfer.yield_req_data": "scheduler_output",
    "kv_transfer.TpKVTopology": "tp_rank remote_tp_size is_mla total_num_kv_heads attn_backend "
    "engine_id remote_block_size tensor_shape",
    "kv_cache_manager.KVCacheManager": "block_size num_gpu_blocks max_model_len sliding_window "
    "enable_caching num_preallocate_tokens",
    "kv_cache_manager.KVCacheManager.get_computed_blocks": "self request",
    "kv_cache_manager.KVCacheManager.allocate_slots": "self request num_tokens computed_blocks "
    "num_lookahead_tokens",
    "kv_cache_manager.KVCacheManager.append_slots": "self request num_tokens",
    "kv_cache_manager.KVCacheManager.free": "self request",
    "kv_cache_manager.KVCacheManager.get_num_common_prefix_blocks": "self request "
    "num_running_requests",
    "block_space_manager.SelfAttnBlockSpaceManager": "block_size num_gpu_blocks num_cpu_blocks "
    "watermark sliding_window enable_caching",
    "block_space_manager.BlockSpaceManager.can_allocate": "self seq_group num_lookahead_slots",
    "block_space_manager.BlockSpaceManager.allocate": "self seq_group",
    "block_space_manager.BlockSpaceManager.can_append_slots": "self seq_group num_lookahead_slots",
    "block_space_manager.BlockSpaceManager.append_slots": "self seq num_lookahead_slots",
    "block_space_manager.BlockSpaceManager.fork": "self parent_seq child_seq",
    "block_space_manager.BlockSpaceManager.can_swap_in": "self seq_group num_lookahead_slots",
    "block_space_manager.BlockSpaceManager.swap_in": "self seq_group",
    "block_space_manager.BlockSpaceManager.can_swap_out": "self seq_group",
    "block_space_manager.BlockSpaceManager.swap_out": "self seq_group",
    "block_space_manager.BlockSpaceManager.access_all_blocks_in_seq": "self seq now",
    "block_space_manager.BlockSpaceManager.mark_blocks_as_computed": "self seq_group "
    "token_chunk_size",
    "block_space_manager.BlockSpaceManager.get_common_computed_block_ids": "self seqs",
    "block_space_manager.BlockSpaceManager.get_prefix_cache_hit_rate": "self device",
    "block_space_manager.BlockSpaceManager.reset_prefix_cache": "self device",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_in_the_order_of_the_original(name):
    call = compat
    for part in name.split("."):
        call = getattr(call, part)
    parameters = inspect.signature(call).parameters.values()
    places = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]
    expected = SIGNATURES[name].split()
    assert places[: len(expected)] == expected


# --- names in the wrong place ---------------------------------------------------------------------


@pytest.mark.parametrize(("of", "name", "module"), [
    *((kvcache, name, "kv_transfer") for name in kv_transfer.__all__),
    *((kvcache, name, "block_space_manager") for name in block_space_manager.__all__),
    (kvcache.worker, "BlockTable", "vllm_block_table or kvcache.compat.ascend_block_table"),
    (kvcache.transfer, "KVTopology", "kv_transfer"),
    (kvcache.allocator, "BlockSpaceManager", "block_space_manager"),
    (kv_transfer, "MultiGroupBlockTable", "vllm_block_table"),
    (kvcache, "BlockTable", "vllm_block_table or kvcache.compat.ascend_block_table"),
    (kvcache, "MultiGroupBlockTable", "vllm_block_table"),
    (compat, "BlockTable", "vllm_block_table or kvcache.compat.ascend_block_table"),
    (compat, "MultiGroupBlockTable", "ascend_block_table"),
    (kvcache.KVCacheManager, "allocate_slots", "kv_cache_manager"),
    (kvcache.KVCacheManager(16, 9, 128), "allocate_slots", "kv_cache_manager"),
    (kvcache.KVCacheManager(16, 9, 128), "append_slots", "kv_cache_manager"),
    (kvcache.KVCacheManager(16, 9, 128), "get_computed_blocks", "kv_cache_manager"),
    (kvcache.KVCacheManager, "get_num_common_prefix_blocks", "kv_cache_manager"),
    (kvcache.KVCacheManager, "reset_prefix_cache", "kv_cache_manager"),
    *(
        (kvcache.KVCacheManager(16, 9, 128), name, "block_space_manager")
        for line in ("E2", "E5", "E7")
        for name in WALK[line][2].split()
        if name not in ("free", "reset_prefix_cache", "watermark_blocks")
    ),
])  # fmt: skip
def test_a_name_in_the_wrong_place_raises_an_error_that_names_its_module(of, name, module):
    with pytest.raises(AttributeError, match=f"no attribute '{name}': .*kvcache.compat.{module}"):
        getattr(of, name)
    assert not hasattr(of, name)


@pytest.mark.parametrize("name", ["find_prefix", "reset", "drain_events", "stats", "hashes_of"])
def test_a_name_of_the_prefix_cache_raises_an_error_that_names_it(name):
    for of in (kvcache.KVCacheManager, kvcache.KVCacheManager(16, 9, 128)):
        with pytest.raises(AttributeError, match=f"'{name}': expected manager.cache.{name}$"):
            getattr(of, name)


def test_an_import_from_the_wrong_place_names_the_module():
    with pytest.raises(
        ImportError, match=r"import from kvcache.compat.vllm_block_table or kvcache\."
    ):
        from kvcache import BlockTable  # noqa: F401
    with pytest.raises(ImportError, match=r"import from kvcache.compat.kv_transfer"):
        from kvcache import copy_kv_blocks  # noqa: F401


def test_names_that_are_nowhere_raise_the_usual_errors():
    for of in (kvcache, compat, kvcache.KVCacheManager, kvcache.KVCacheManager(16, 9, 128)):
        with pytest.raises(AttributeError, match=r"has no attribute 'blocktable'$"):
            of.blocktable  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'blocktable'"):
        from kvcache import blocktable  # noqa: F401


def test_names_without_torch_and_with_it_are_those_of_the_modules():
    for name in compat.__all__:
        value = getattr(compat, name)
        if not inspect.ismodule(value):
            homes = [each for each in (kv_transfer, kv_cache_manager, block_space_manager)
                     if getattr(each, name, None) is value]  # fmt: skip
            assert len(homes) == 1, name


# --- the modules ----------------------------------------------------------------------------------

INTERFACES = [
    vllm_block_table, ascend_block_table, kv_transfer, kv_cache_manager, block_space_manager,
]  # fmt: skip


@pytest.mark.parametrize("module", INTERFACES, ids=lambda module: module.__name__)
def test_each_module_has_a_table_and_an_example(module):
    assert "| there | here |\n|---|---|\n" in module.__doc__ and ">>> " in module.__doc__
    for line in re.findall(r"^\| .*", module.__doc__, re.MULTILINE):
        assert line.count(" | ") == 1 and line.endswith(" |"), line


# --- the page for users of other engines ----------------------------------------------------------

# Names on this side that are neither a module nor public: attributes that other engines' objects have,
# and values.
VALUES = {"sha256_cbor", "xxhash_cbor", "load_inplace", "if", "direction", "MambaSpec"}


def rows():
    """Return (number, there, here, how) of each row of the page's tables."""
    found = []
    lines = (REPO / "docs" / "coming_from.md").read_text().splitlines()
    for number, line in enumerate(lines, 1):
        cells = [each.strip() for each in line.strip("| ").split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[2] != "how":
            found.append(pytest.param(*cells, id=f"line {number}"))
    return found


def spans(cell):
    """Return the dotted name at the start of each code span, and the keywords in it."""
    for span in re.findall(r"`([^`]+)`", cell):
        yield from re.findall(r"^\.?([A-Za-z_][\w.]*)", span)


def names_of(value, found, depth=0):
    """Collect the names of a class or function: attributes, fields, members and parameters."""
    if inspect.isclass(value):
        found |= {name for name in dir(value) if not name.startswith("_")}
        if dataclasses.is_dataclass(value):
            found |= {field.name for field in dataclasses.fields(value)}
        if issubclass(value, Enum):
            found |= {*value.__members__}
        for name in {"__init__", *dir(value)}:
            if (depth == 0 and not name.startswith("_")) or name == "__init__":
                names_of(getattr(value, name, None), found, depth + 1)
    elif callable(value):
        with contextlib.suppress(TypeError, ValueError):
            found |= {*inspect.signature(value).parameters}


def names_here(packages):
    """Return all public names of packages, modules included."""
    found = set()
    for package in packages:
        found.add(package.__name__)
        for name in getattr(package, "__all__", vars(package)):
            found.add(name)
            names_of(getattr(package, name), found)
    for each in MAKE.values():
        found |= {name for name in dir(each()) if not name.startswith("_")}
    return found


KERNEL = (
    kvcache, kvcache.allocator, kvcache.transfer, kvcache.layouts, kvcache.worker, kvcache.step,
)  # fmt: skip


def is_known(name, known):
    """Return whether a dotted name is known, as a whole or by its last part."""
    return name in known or name.rpartition(".")[2] in known


def test_the_page_has_rows_of_each_kind():
    hows = [row.values[2] for row in rows()]
    assert {*hows} == {"drop-in", "rename", "rewrite"} and len(hows) > 60


@pytest.mark.parametrize(("there", "here", "how"), rows())
def test_names_in_a_row_of_the_page_exist(there, here, how):
    in_compat = names_here([*INTERFACES, compat])
    in_kernel = names_here(KERNEL)
    for name in spans(there):
        name = name.removeprefix("request.")
        if how == "drop-in" and not name.startswith("vllm") and name not in ("SequenceStatus",):
            parts = {"get_kv_cache_shape", "get_kv_cache_stride_order", "num_computed_tokens"}
            assert is_known(name, in_compat) or name in parts, f"{name} is not in kvcache.compat"
    for name in spans(here):
        known = is_known(name.removeprefix("plan."), in_kernel | in_compat | VALUES)
        assert known, f"{name} is not in kvcache"


def test_every_module_is_reachable():
    names = {each.name for each in pkgutil.iter_modules(compat.__path__)}
    assert names == {module.__name__.rpartition(".")[2] for module in INTERFACES}
