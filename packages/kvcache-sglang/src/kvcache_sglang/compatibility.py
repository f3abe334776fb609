# SPDX-License-Identifier: Apache-2.0
"""Checks at startup that the installed SGLang has what the plug-ins use.

The whole test suite is run with the version `TESTED`. A later version is accepted, with a warning, if
it has the classes, functions, parameters and attributes listed here.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Mapping
from typing import Any

import sglang

TESTED = "0.5.23"
_log = logging.getLogger("kvcache.sglang")

# For each class: what is used of it. A method that is called or replaced is listed with its parameters,
# "__init__" with the arguments that are passed, and an attribute with None.
Uses = Mapping[str, Mapping[str, str | None]]

_MEMORY = "sglang.srt.mem_cache"
_PREFIX_CACHE = f"{_MEMORY}.base_prefix_cache"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_UPDATES = {
    f"update_weights_from_{source}": "self recv_req"
    for source in ("disk", "distributed", "tensor", "ipc")
}
_ALLOCATOR = {"get_kvcache": "self", "available_size": "self", "page_size": None, "size": None}

EXCHANGE: Uses = {
    "sglang.srt.managers.scheduler:Scheduler": {
        "get_init_info": "self",
        "run_event_loop": "self",
        "process_input_requests": "self recv_reqs",
        "handle_generate_request": "self recv_req",
        "abort_request": "self recv_req",
        "is_fully_idle": "self for_health_check ignore_waiting",
        "flush_cache": "self",
        "get_internal_state": "self recv_req",
        **dict.fromkeys(
            ("tree_cache", "token_to_kv_pool_allocator", "tp_worker", "server_args", "page_size")
            + (
                "spec_algorithm",
                "disaggregation_mode",
                "dllm_config",
                "model_config",
                "rust_server",
            )
            + ("running_batch", "last_batch", "chunked_req", "waiting_queue", "enable_overlap")
            + ("result_queue", "forward_stream", "device_module", "_engine_paused")
            + ("_request_dispatcher", "tp_cpu_group")
        ),
    },
    "sglang.srt.managers.scheduler:SchedulerOutputStreamer": {
        "stream_output": "self reqs return_logprob"
    },
    "sglang.srt.managers.scheduler:ScheduleBatch": {"retract_decode": "self", "is_empty": "self"},
    "sglang.srt.managers.schedule_batch:FINISH_ABORT": {},
    "sglang.srt.managers.schedule_batch:Req": {
        "finished": "self",
        **dict.fromkeys(
            ("sampling_params", "finished_output", "finished_reason", "rid", "customized_info")
            + ("output_ids_through_stop", "origin_input_ids", "cache_salt", "extra_key")
        ),
    },
    "sglang.srt.managers.io_struct:TokenizedGenerateReqInput": dict.fromkeys(
        ("rid", "input_ids", "sampling_params", "cache_salt", "extra_key", "mm_inputs")
        + ("input_embeds", "lora_id")
    ),
    "sglang.srt.managers.io_struct:AbortReq": {"abort_all": None, "rid": None},
    _WEIGHTS: _UPDATES,
    f"{_PREFIX_CACHE}:InsertParams": {"__init__": "self key value prev_prefix_len"},
    f"{_PREFIX_CACHE}:MatchPrefixParams": {"__init__": "self key"},
    f"{_PREFIX_CACHE}:MatchResult": {"last_device_node": None, "device_prefix_len": None},
    f"{_MEMORY}.radix_cache:RadixKey": {"__init__": "self token_ids cache_salt"},
    f"{_MEMORY}.unified_radix_cache:UnifiedRadixCache": {
        "match_prefix": "self params",
        "insert": "self params",
        "lock": "self node_id",
        "unlock": "self lock",
        "path_device_indices": "self node",
        "ongoing_load_back": None,
    },
    f"{_MEMORY}.allocator:PagedTokenToKVPoolAllocator": {
        **_ALLOCATOR,
        "alloc": "self need_size",
        "free": "self free_index",
        "evict_to_free_tokens": "self tree_cache num_tokens",
    },
    f"{_MEMORY}.memory_pool:MHATokenToKVPool": dict.fromkeys(
        ("k_buffer", "v_buffer", "page_size", "dtype", "store_dtype", "layer_num")
        + ("is_quantized_kv_cache",)
    ),
    f"{_MEMORY}.memory_pool:MLATokenToKVPool": dict.fromkeys(
        ("kv_buffer", "kv_cache_dim", "page_size", "dtype", "store_dtype", "layer_num")
    ),
    "sglang.srt.model_executor.model_runner:ModelRunner": dict.fromkeys(
        ("prefill_attention_backend_str", "decode_attention_backend_str", "model")
    ),
    "sglang.srt.layers.radix_attention:RadixAttention": dict.fromkeys(
        ("layer_id", "k_scale", "v_scale")
    ),
}
HICACHE: Uses = {
    f"{_MEMORY}.hicache_storage:HiCacheStorage": {
        "register_mem_pool_host": "self mem_pool_host",
        "register_mem_host_pool_v2": "self host_pool host_pool_name",
        "batch_exists": "self keys extra_info",
        "batch_get_v1": "self keys host_indices extra_info",
        "batch_set_v1": "self keys host_indices extra_info",
        "batch_exists_v2": "self keys pool_transfers extra_info",
        "batch_get_v2": "self transfers extra_info",
        "batch_set_v2": "self transfers extra_info",
    },
    f"{_MEMORY}.hicache_storage:HiCacheStorageConfig": dict.fromkeys(
        ("extra_config", "is_mla_model", "tp_rank", "tp_size")
    ),
    f"{_MEMORY}.hicache_storage:PoolTransfer": dict.fromkeys(
        ("name", "keys", "host_indices", "hit_policy")
    ),
    f"{_MEMORY}.pool_host.base:HostKVCache": {
        "get_data_page": "self index",
        "set_from_flat_data_page": "self index data_page",
        "layout": None,
    },
    _WEIGHTS: _UPDATES,
}
SANITIZER: Uses = {
    "sglang.srt.managers.scheduler:Scheduler": {
        "run_batch": "self batch",
        "run_event_loop": "self",
        "get_internal_state": "self recv_req",
        **dict.fromkeys(
            ("tree_cache", "token_to_kv_pool_allocator", "tp_worker", "server_args", "forward_ct")
            + ("spec_algorithm", "disaggregation_mode", "is_hybrid_ssm")
        ),
    },
    "sglang.srt.model_executor.model_runner:ModelRunner": {"forward": "self forward_batch"},
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch": dict.fromkeys(
        ("forward_mode", "input_embeds", "replace_embeds", "rids", "req_pool_indices", "seq_lens")
        + ("extend_prefix_lens_cpu", "extend_seq_lens_cpu", "input_ids", "out_cache_loc")
        + ("out_cache_loc_virtual",)
    ),
    f"{_MEMORY}.allocator:PagedTokenToKVPoolAllocator": {
        **_ALLOCATOR,
        **dict.fromkeys(("alloc", "alloc_extend", "alloc_decode", "_release_page_ids", "clear")),
        "free_group": None,
    },
    "sglang.srt.managers.cache_controller:HiCacheController": {
        "start_writing": "self",
        "start_loading": "self",
        **dict.fromkeys(("write_queue", "load_queue", "mem_pool_host", "storage_backend")),
    },
}
PREFIX_CACHE: Uses = {
    f"{_PREFIX_CACHE}:BasePrefixCache": {
        "match_prefix": "self params",
        "touch_prefix": "self key",
        "checkpoint": "self req up_to",
        "evict": "self params",
        "inc_lock_ref": "self node",
        "dec_lock_ref": "self node params",
        "path_device_indices": "self node",
        "root_node_handle": "self extra_key",
        "unlock": "self lock",
        "update_eviction_metrics": "self num_evicted start_time",
        "init_metrics_collector": "self",
        "init_load_back": "self params",
        "check_hicache_events": "self",
        "ready_to_load_host_cache": "self",
    },
    f"{_PREFIX_CACHE}:InitLoadBackParams": {"best_match_node": None},
    f"{_PREFIX_CACHE}:TreeLock": {"__init__": "self node receipt"},
    f"{_PREFIX_CACHE}:MatchResult": dict.fromkeys(
        ("device_prefix_len", "last_device_node", "last_host_node", "best_match_node")
    ),
    f"{_MEMORY}.radix_cache:RadixKey": {
        "raw_token_ids": "self",
        "extra_key": None,
        "cache_salt": None,
    },
    f"{_MEMORY}.cache_init_params:CacheInitParams": dict.fromkeys(
        ("eviction_policy", "eviction_policy_config", "enable_kv_cache_events", "enable_metrics")
    ),
    f"{_MEMORY}.registry:TreeCacheBuildContext": dict.fromkeys(
        ("params", "server_args", "tp_size", "is_hybrid_swa", "is_hybrid_ssm")
        + ("enable_hierarchical_cache", "disable_radix_cache")
    ),
    f"{_MEMORY}.memory_pool:ReqToTokenPool": {"write": "self indices values"},
    f"{_MEMORY}.allocator:PagedTokenToKVPoolAllocator": {
        **_ALLOCATOR,
        "alloc": "self need_size",
        "free_segment": "self free_index start_pos",
        "evict_to_free_tokens": "self tree_cache num_tokens",
    },
    "sglang.srt.managers.schedule_batch:Req": dict.fromkeys(
        ("full_untruncated_fill_ids", "last_node", "lock", "output_ids", "kv")
    ),
    "sglang.srt.managers.schedule_batch:ReqKvInfo": dict.fromkeys(
        ("cache_protected_len", "cache_inserted_len", "req_pool_idx")
    ),
}


def check_version(uses: Uses) -> None:
    """Raise a one-line ValueError, which names the difference, if SGLang is too old or lacks a use."""
    found = sglang.__version__
    if _numbers(found) < _numbers(TESTED):
        raise ValueError(f"the version of SGLang is {found}: expected {TESTED} or later")
    if missing := [each for owner, used in uses.items() for each in _missing(owner, used)]:
        raise ValueError(
            f"the version of SGLang is {found}, and {'; '.join(missing)}: "
            f"expected SGLang {TESTED}, or a later version of kvcache"
        )
    if _numbers(found) > _numbers(TESTED):
        _log.warning(
            "SGLang %s has all that kvcache uses, but kvcache was tested with SGLang %s",
            found,
            TESTED,
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(re.match(r"\d*", part)[0] or 0) for part in text.split(".")[:3])


def _missing(owner: str, used: Mapping[str, str | None]) -> list[str]:
    module, name = owner.split(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return [f"{owner} is missing"]
    missing = []
    for attribute, parameters in used.items():
        method = getattr(found, attribute, None)
        if method is None and (parameters is not None or not _assigns(found, attribute)):
            missing.append(f"{name}.{attribute} is missing")
        elif parameters is not None:
            own = inspect.signature(method).parameters.values()
            expected = parameters.split()
            common = [each.name for each in own if each.name in expected]
            required = [each for each in own if each.default is each.empty and each.kind < 2]
            if common != expected or any(each.name not in expected for each in required):
                missing.append(
                    f"{name}.{attribute} has the parameters {', '.join(each.name for each in own)} "
                    f"(expected {', '.join(expected)})"
                )
    return missing


def _assigns(owner: Any, attribute: str) -> bool:
    """Return whether a class annotates an attribute, or its methods assign it to `self`."""
    own = [each for each in owner.__mro__ if each.__module__.startswith("sglang")]
    return any(attribute in vars(each).get("__annotations__", ()) for each in own) or any(
        re.search(rf"\bself\.{attribute}\b\s*[:=,)]", inspect.getsource(each)) for each in own
    )
