# SPDX-License-Identifier: Apache-2.0
"""Valid arguments for the fuzzer, selected by parameter name or by annotation."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch

import kvcache
import kvcache.layouts as layouts
import kvcache.transfer as transfer
from kvcache import GroupSpec, KVCacheManager, LayerSpec, Pages, Request, StepReport, compat
from kvcache.allocator import hashing
from kvcache_exchange.disaggregation import steps
from kvcache_exchange.store import orders
from kvcache_serve import demo, engine
from kvcache_serve.engine.transformers import layer_shapes
from tests.machinery.wrong_calls import makers as m
from tests.machinery.wrong_calls.makers import SIZES, TOKENS
from tests.machinery.wrong_calls.ops import ARGUMENTS
from tests.machinery.wrong_calls.scenes import Group, Seq

if TYPE_CHECKING:
    from tests.machinery.wrong_calls.world import World

# Valid values by annotation, for annotations that are not classes of the package.
PLAIN: dict[str, Callable[[], object]] = {
    **dict.fromkeys(("int", "Count", "Size"), lambda: 1),
    "float": lambda: 1.0,
    "bool": lambda: True,
    **dict.fromkeys(("str", "Name", "Text"), lambda: "a"),
    "bytes": lambda: b"a",
    "object": object,
    "Any": object,
    "ndarray": lambda: np.array([1]),
    "Tensor": lambda: torch.ones(2, dtype=torch.int64),
    "dtype": lambda: torch.float32,
    "device": lambda: torch.device("cpu"),
    "Ids": lambda: [1, 2],
    "Lengths": lambda: [1],
    "Indices": lambda: [1, 2],
    "WireHash": lambda: 5,
    "Exception": lambda: RuntimeError("it failed"),
    "Enum": lambda: "gpu",
    "PathLike": lambda: "a",
}

_MULTI = "BlockTables"


# Optional arguments that a valid call requires, because one of several must be given.
WITH = {
    "plan_cache": ("layers", "budget_bytes"),
    "EventPublisher": ("endpoint",),
    "Replayer": ("block_size",),
    "compare": ("block_size",),
    "LayerSpec": ("num_kv_heads", "head_size"),
    "GroupTable.compute_slot_mapping": ("req_indices", "positions"),
    "GroupTable.slots_of": ("req_indices", "positions"),
    "BlockTables.compute_slot_mapping": ("req_indices", "positions"),
    "Request": ("cache_salt",),
    "write_kv": ("k_scale", "v_scale"),
    "gather_kv": ("k_scale", "v_scale"),
}


def _key(w: World) -> torch.Tensor:
    return torch.ones(2, 2, 8)


def _caches(w: World) -> dict[str, torch.Tensor]:
    return {"l": torch.zeros(2, 5, 4, 2, 8)}


# The keys are "Class.method.parameter", "function.parameter", or just the name of the parameter.
RIGHT: dict[str, Callable[[World], object]] = {
    "block_size": lambda w: 4,
    "num_kv_heads": lambda w: 2,
    "head_size": lambda w: 8,
    "v_head_size": lambda w: 8,
    "max_model_len": lambda w: 64,
    "num_gpu_blocks": lambda w: 20,
    "num_cpu_blocks": lambda w: 10,
    "num_blocks": lambda w: 8,
    "max_num_reqs": lambda w: 3,
    "max_num_batched_tokens": lambda w: 16,
    "max_num_blocks_per_req": lambda w: 8,
    "num_tokens": lambda w: 4,
    "kind": lambda w: "full_attention",
    "check_planned_pages.kind": lambda w: w.get("kind"),
    "checked_first_live_token.kind": lambda w: w.get("kind"),
    "checked_max_pages.kind": lambda w: w.get("kind"),
    "checked_first_live_token.start": lambda w: 4,
    "checked_first_live_token.stop": lambda w: 8,
    "options": lambda w: {"window": 8},
    "make_kind.name": lambda w: "sliding_window",
    "kind_class.name": lambda w: "sliding_window",
    "register.name": lambda w: "a kind of no one",
    "backend.name": lambda w: "FLASHINFER",
    "tiny_model.name": lambda w: "llama",
    "dtype": lambda w: "float32",
    "device": lambda w: "cpu",
    "SwapEngine.device": lambda w: w.get("Pages"),
    "SwapEngine.host": lambda w: w.get("Pages").on_host(4),
    "HostDeviceBuffer.dtype": lambda w: torch.int32,
    "HostDeviceBuffer.shape": lambda w: (8,),
    "HostDeviceBuffer.device": lambda w: torch.device("cpu"),
    "pin_memory": lambda w: False,
    "others": lambda w: None,
    # requests
    "request_id": lambda w: "a",
    "session": lambda w: "pinned",
    "request": lambda w: w.get("Request"),
    "requests": lambda w: w.get("Request"),
    "parent": lambda w: w.get("Request"),
    "child": lambda w: w.get("steps").child,
    "KVCacheManager.admit.request": lambda w: w.get("steps").waiting,
    "KVCacheManager.would_fit.request": lambda w: w.get("steps").waiting,
    "KVCacheManager.extend.request": lambda w: w.get("steps").slots,
    "KVCacheManager.finish_receiving.request": lambda w: w.get("steps").receiving,
    "PrefixCache.find_prefix.request": lambda w: w.get("steps").waiting,
    "PrefixCache.cached_tokens.request": lambda w: w.get("steps").waiting,
    "KVCacheManager.step_id": lambda w: w.get("steps").plan.step_id,
    "KVCacheManager.abort.step_id": lambda w: w.get("steps").plan.step_id,
    "StepReport.of_ranks.reports": lambda w: [w.get("StepReport")],
    "KVCacheManager.report.report": lambda w: StepReport(w.get("steps").plan.step_id, True),
    "KVCacheManager.advance.rows": lambda w: [w.get("KVCacheManager").row(w.get("steps").slots)],
    "KVCacheManager.advance.starts": lambda w: [TOKENS],
    "KVCacheManager.advance.stops": lambda w: [TOKENS + 1],
    "KVStorage.over.pages": lambda w: Pages.allocate(8, [[256]]),
    "KVStorage.over.num_kv_heads": lambda w: 1,
    "KVCacheManager.reject_tokens.num_tokens": lambda w: 0,
    "now": lambda w: 2.0,
    "seconds": lambda w: 2.0,
    "token_ids": lambda w: [1, 2, 3],
    "hashes": lambda w: [bytes(32)],
    "ids": lambda w: [1, 2],
    "num_running_requests": lambda w: 1,
    "KVCacheManager.release_blocks.request": lambda w: m.kept(w),
    "HashKey": lambda w: None,
    "Request.chain.key": lambda w: hashing.hash_key(
        4, "0", "sha256_cbor", None),
    # the pool
    "BlockPool.id": lambda w: 1,
    "BlockPool.is_pinned.id": lambda w: 1,
    "BlockPool.allocate.n": lambda w: 2,
    "BlockPool.publish.ids": lambda w: [4, 5],
    "BlockPool.publish.hashes": lambda w: m.hashes()[3:5],
    "BlockPool.lookup.hashes": lambda w: m.hashes(),
    "BlockPool.notify_release.prefix_tokens": lambda w: [8],
    "BlockPool.notify_release.ids": lambda w: [1],
    "BlockPool.access.ids": lambda w: [1],
    "BlockPool.unpin.ids": lambda w: w.get("BlockPool").pin([1]) or [1],
    # sequences
    "seq": lambda w: w.get("sequences").running.seqs[0],
    "seq_group": lambda w: w.get("sequences").running,
    "seqs": lambda w: [w.get("sequences").running.seqs[0]],
    "BlockSpaceManager.allocate.seq_group": lambda w: Group(Seq(7, [1, 2, 3]), request_id="new"),
    "BlockSpaceManager.can_allocate.seq_group": lambda w: Group(Seq(7, [1, 2]), request_id="new"),
    "BlockSpaceManager.get_cross_block_table.seq_group": m.encoder,
    "BlockSpaceManager.free_cross.seq_group": m.encoder,
    "BlockSpaceManager.swap_in.seq_group": lambda w: w.get("sequences").swapped,
    "BlockSpaceManager.can_swap_in.seq_group": lambda w: w.get("sequences").swapped,
    "BlockSpaceManager.get_num_cached_tokens.seq": lambda w: Seq(9, list(range(TOKENS))),
    "parent_seq": lambda w: w.get("sequences").running.seqs[0],
    "child_seq": lambda w: Seq(8, w.get("sequences").running.seqs[0].tokens, "RUNNING"),
    "num_lookahead_slots": lambda w: 0,
    "token_chunk_size": lambda w: 1,
    "BlockSpaceManager.get_prefix_cache_hit_rate.device": lambda w: "gpu",
    "BlockSpaceManager.reset_prefix_cache.device": lambda w: "gpu",
    # the cache
    "layer_name": lambda w: "l0",
    "KVCache.write.key": lambda w: w.get("steps") and torch.ones(1, 2, 8),
    "KVCache.write.value": lambda w: torch.ones(1, 2, 8),
    "KVCache.gather.slots": lambda w: torch.tensor([4, 5]),
    "KVCache.slots.num_tokens": lambda w: w.get("steps") and 1,
    "host_pages": lambda w: w.get("KVCache").host_pages,
    "KVCache.pages": lambda w: w.get("KVCache").pages,
    "KVCache.tables": lambda w: w.get("KVCache").tables,
    "KVCache.storages": lambda w: w.get("KVCache").storages,
    "plan_cache.layers": lambda w: [LayerSpec("l", "full_attention", **SIZES)],
    "plan_cache.stages": lambda w: None,
    "budget_bytes": lambda w: 2**16,
    "CachePlan.layers": lambda w: w.get("CachePlan").layers,
    "CachePlan.groups": lambda w: w.get("CachePlan").groups,
    "groups": lambda w: [GroupSpec("full_attention", 4)],
    # tables
    "row": lambda w: 0,
    "src": lambda w: [0],
    "tgt": lambda w: [2],
    "GroupTable.move_row.src": lambda w: 0,
    "GroupTable.move_row.tgt": lambda w: 2,
    "GroupTable.swap_row.src": lambda w: 0,
    "GroupTable.swap_row.tgt": lambda w: 2,
    f"{_MULTI}.move_row.src": lambda w: 0,
    f"{_MULTI}.move_row.tgt": lambda w: 2,
    f"{_MULTI}.swap_row.src": lambda w: 0,
    f"{_MULTI}.swap_row.tgt": lambda w: 2,
    "rows": lambda w: [0],
    "block_ids": lambda w: [1, 2],
    f"{_MULTI}.add_row.block_ids": lambda w: [[1, 2], [3]],
    f"{_MULTI}.append_row.block_ids": lambda w: [[1], [3]],
    f"{_MULTI}.apply.plan": m.multi_plan,
    "MultiGroupBlockTable.block_sizes": lambda w: [4, 8],
    f"{_MULTI}.num_speculative_tokens": lambda w: 0,
    "blocks_per_kv_block": lambda w: 2,
    "num_reqs": lambda w: 1,
    "req_indices": lambda w: np.array([0], np.int32),
    "positions": lambda w: np.array([3]),
    "idx_mapping": lambda w: torch.tensor([0], dtype=torch.int32),
    "GroupTable.state_pages.num_tokens": lambda w: np.array([3]),
    "GroupTable.state_pages.num_drafts": lambda w: np.array([0]),
    "tables": lambda w: w.get("BlockTables"),
    "query_lens": lambda w: [1],
    "seq_lens": lambda w: [5],
    "group": lambda w: 0,
    # storage and pages
    "sizes": lambda w: [[64, 64]],
    "layer": lambda w: 0,
    "number": lambda w: 0,
    "region": lambda w: 0,
    "num_bytes": lambda w: 4096,
    "scale_bytes_per_token": lambda w: 8,
    "cache_salt": lambda w: "s",
    "key": _key,
    "value": _key,
    "slot_mapping": lambda w: torch.tensor([5, 6]),
    "k_scale": lambda w: torch.ones(2, 1),
    "v_scale": lambda w: torch.ones(2, 1),
    "kv_caches": lambda w: [torch.zeros(2, 5, 4, 2, 8)],
    "Pages.over.layers": lambda w: [torch.zeros(5, 4)],
    "Pages.memory": lambda w: torch.zeros(8 * 64, dtype=torch.uint8),
    "Pages.offsets": lambda w: np.array([0]),
    "Pages.strides": lambda w: np.array([64]),
    "Pages.sizes": lambda w: np.array([64]),
    "Pages.layers": lambda w: np.array([0]),
    "direction": lambda w: "out",
    "pairs": lambda w: np.array([[1, 2]], np.int32),
    "Worker.tables": lambda w: m.table(),
    "Worker.apply.plan": lambda w: m.next_plan(w),
    "Worker.start.plan": lambda w: m.next_plan(w),
    "SwapEngine.check_not_captured.name": lambda w: "swap_out",
    "SwapEngine.before_write.pages": lambda w: np.array([1]),
    "failed": lambda w: set(),
    "earlier": lambda w: None,
    "HostDeviceBuffer.upload.start": lambda w: 0,
    "HostDeviceBuffer.upload.stop": lambda w: 4,
    # transfers
    "engine_id": lambda w: "b",
    "num_layers": lambda w: 2,
    "total_num_kv_heads": lambda w: 2,
    "tp_rank": lambda w: 0,
    "tp_size": lambda w: 1,
    "pp_rank": lambda w: 0,
    "rank": lambda w: 0,
    "head": lambda w: 0,
    "local_rank": lambda w: 0,
    "remote_tp_size": lambda w: 2,
    "remote_pp_size": lambda w: 1,
    "sections": lambda w: ((2, 4),),
    "tensors": lambda w: (transfer.StateTensor(sections=((2, 4),)),),
    "local": lambda w: m.descriptions("a"),
    "remote": lambda w: m.descriptions("b"),
    "KVTopology.with_remote.remote": lambda w: compat.RemoteEngine(2, block_size=4),
    "KVTopology.with_remote.engine_id": lambda w: "c",
    "TpKVTopology.engine_id": lambda w: "a",
    "TpKVTopology.remote_tp_size": lambda w: {"a": 2, "b": 2},
    "TpKVTopology.remote_block_size": lambda w: {"a": 4, "b": 4},
    "TpKVTopology.attn_backend": lambda w: "FLASHINFER",
    "TpKVTopology.is_mla": lambda w: False,
    "V1KVCacheManager.allocate_slots.request": lambda w: m.engine_request("new"),
    "V1KVCacheManager.allocate_slots.computed_blocks": lambda w: (),
    "plan_states.local": lambda w: m.states("a"),
    "plan_states.remote": lambda w: m.states("b"),
    "source_readers.source": lambda w: m.descriptions("b"),
    "CacheDescription.from_dict.values": lambda w: m.descriptions("a").to_dict(),
    "StateDescription.from_dict.values": lambda w: m.states("a").to_dict(),
    "CacheDescription.of_group.group": lambda w: GroupSpec(
        "full_attention", 4, layers=("l",)),
    "CacheDescription.of_group.layers": lambda w: [LayerSpec("l", "full_attention", **SIZES)],
    "CacheDescription.offset_of.layer": lambda w: np.array([0]),
    "CacheDescription.offset_of.kv": lambda w: np.array([0]),
    "CacheDescription.offset_of.token": lambda w: np.array([0]),
    "CacheDescription.offset_of.head": lambda w: np.array([0]),
    "StateDescription.rank_of.at": lambda w: m.states("a").coordinates(0),
    "TransferPlan.apply.local_pages": lambda w: np.array([[1], [2]]),
    "TransferPlan.apply.remote_pages": lambda w: np.array([[1], [2]]),
    "StateTransferPlan.apply.local_pages": lambda w: np.array([[1], [2]]),
    "StateTransferPlan.apply.remote_pages": lambda w: np.array([[1], [2]]),
    "plan_range.plan": lambda w: w.get("TransferPlan"),
    "local_ids": lambda w: np.array([1, 2]),
    "remote_ids": lambda w: np.array([2, 1]),
    "first_token": lambda w: 0,
    "end_token": lambda w: 8,
    "peers": lambda w: {0: "other"},
    "peer": lambda w: "other",
    "fetch.groups": lambda w: [w.get("GroupFetch")],
    "Spans.bases": lambda w: w.get("Spans").bases,
    "Spans.offsets": lambda w: w.get("Spans").offsets,
    "Spans.length": lambda w: w.get("Spans").length,
    "Spans.of.addresses": lambda w: np.array([4096]),
    "Spans.of.length": lambda w: np.array([64]),
    "Spans.of.name": lambda w: "addresses",
    "Spans.beside.name": lambda w: "addresses",
    "Spans.beside.addresses": lambda w: np.array([4096, 8192]),
    "Spans.from_bytes.data": lambda w: w.get("Spans").to_bytes(),
    "name": lambda w: "a",
    "piece_bytes": lambda w: 64,
    "timeout_s": lambda w: 5.0,
    "Transport.connect.metadata": lambda w: m.third(w),
    "Transport.disconnect.peer": lambda w: (w.get("Transport"), "other")[1],
    "Transport.register.memory": lambda w: [(np.zeros(64, np.uint8).ctypes.data, 64)],
    "Transport.read.local": lambda w: w.get("transfer memory").ctypes.data + np.array([0]),
    "Transport.read.remote": lambda w: w.get("transfer memory").ctypes.data + np.array([4096]),
    "Transport.read.length": lambda w: np.array([64]),
    **{
        f"Transport.read_spans.{side}": lambda w, at=at: transfer.Spans.of(
            w.get("transfer memory").ctypes.data + np.array([at]), np.array([64]), "spans")
        for side, at in (("local", 0), ("remote", 4096))
    },
    "message": lambda w: b"hello",
    "agent": lambda w: "agent",
    "src_kv_caches": _caches,
    "dst_kv_caches": _caches,
    "src_block_ids": lambda w: [1, 2],
    "dst_block_ids": lambda w: [3, 4],
    "copy_kv_blocks.direction": lambda w: "h2d",
    "caches": lambda w: [torch.zeros(5, 2, 4, 8).transpose(1, 2)],
    "kv_postprocess_blksize_on_receive.cache": lambda w: torch.zeros(5, 2, 4, 8).transpose(1, 2),
    "kv_postprocess_layout_on_receive.cache": lambda w: torch.zeros(5, 4, 2, 8),
    "kv_postprocess_blksize_and_layout_on_receive.cache": lambda w: torch.zeros(5, 4, 2, 8),
    "indices": lambda w: [1, 2],
    "block_size_ratio": lambda w: 2,
    "remote_block_size": lambda w: 4,
    "remote_layout": lambda w: "HND",
    "permute_pages.pages": lambda w: np.array([1, 2]),
    "permutation": lambda w: None,
    "region_addresses.description": lambda w: m.descriptions("a"),
    "outputs": lambda w: [m.connector_output(w)],
    "KVOutputAggregator.from_connector.connector": lambda w: SimpleNamespace(
        get_finished_count=lambda: 1),
    "scheduler_output": lambda w: SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], resumed_req_ids=set())),
    "event": lambda w: ("stored", 1),
    "rule": lambda w: max,
    # layouts
    "dims": lambda w: ("block", "kv", "token", "head", "element"),
    "AttentionBackend.name": lambda w: "MINE",
    "described": lambda w: layouts.backend("FLASHINFER"),
    "required": lambda w: {"a": "NHD"},
    # disaggregation
    "Connector.manager": lambda w: w.get("connectors").other.manager,
    "ranks": lambda w: w.get("connectors").other.ranks,
    "layouts": lambda w: [w.get("GroupLayout")],
    "CacheRank.layouts": lambda w: w.get("Offer").groups,
    "CacheRank.storages": lambda w: w.get("connectors").other.storages[0],
    "Connector.publish.request": lambda w: w.get("connectors").computed,
    "Connector.publish_cached.request": lambda w: Request("new", range(TOKENS)),
    "Connector.withdraw.request": lambda w: w.get("connectors").request,
    "Connector.cancel.request": lambda w: w.get("connectors").request,
    "Connector.begin.request": m.begun,
    "Connector.match.request": lambda w: Request("new", range(2 * TOKENS)),
    "Connector.check_peer.values": lambda w: w.get("connectors").other.connector.describe(),
    "Connector.hit_tokens.request": lambda w: Request("new", range(TOKENS)),
    "Connector.save.report": lambda w: w.get("StepReport"),
    "offer": lambda w: w.get("connectors").offer,
    "Offer.from_dict.values": lambda w: w.get("connectors").offer,
    "GroupLayout.from_dict.values": lambda w: w.get("GroupLayout").to_dict(),
    "GroupLayout.description": lambda w: m.descriptions("a"),
    "layouts_of_plan.plan": lambda w: w.get("connectors").one.plan,
    "layouts_of_plan.storages": lambda w: w.get("connectors").one.storages[0],
    "KVIdentity.model": lambda w: {"name": "m"},
    "KVIdentity.of_manager.model": lambda w: {"name": "m"},
    "KVIdentity.check.other": lambda w: w.get("KVIdentity"),
    "KVIdentity.from_dict.values": lambda w: w.get("KVIdentity").to_dict(),
    "Offer.check_like.identity": lambda w: w.get("Offer").identity,
    "Offer.check_like.layouts": lambda w: w.get("Offer").groups,
    "CacheRank.begin.step": lambda w: steps.Step(),
    "Offer.engine_id": lambda w: "one",
    **{
        f"Offer.{each}": lambda w, each=each: getattr(w.get("Offer"), each)
        for each in ("num_tokens", "digest", "identity", "groups", "blocks", "ranks", "lease")
    },
    "digest_of_first": lambda w: lambda count: w.get("Offer").digest,
    "Offer.check_prompt.num_tokens": lambda w: 2 * TOKENS,
    # serving
    "prompt": lambda w: [1, 2, 3],
    "prompts": lambda w: [[1, 2, 3]],
    "params": lambda w: engine.SamplingParams(max_tokens=2),
    "Engine.abort.request_id": lambda w: "waiting",
    "Engine.stop.request_id": lambda w: "running",
    "index": lambda w: 0,
    "Scheduler.manager": lambda w: w.get("manager alone"),
    "Hint.intent": lambda w: "pin",
    "Receipt.intent": lambda w: "pin",
    "Receipt.status": lambda w: "done",
    "HintExecutor.planned.statuses": lambda w: [],
    "PrefixCache.start_epoch.model_version": lambda w: "newer weights",
    "Scheduler.add.sequence": lambda w: engine.Sequence(
        Request("another", range(5))),
    "Scheduler.accept.sequence": lambda w: w.get("ended sequence"),
    "Scheduler.finish.sequence": lambda w: w.get("ended sequence"),
    "Scheduler.fork.parent": lambda w: w.get("ended sequence"),
    "Scheduler.fork.child": lambda w: engine.Sequence(
        Request("fork", range(10))),
    "Scheduler.accept.token_ids": lambda w: [5],
    "num_drafts": lambda w: [0],
    "Batch.rows": lambda w: w.get("Batch").rows,
    "Batch.starts": lambda w: w.get("Batch").starts,
    "Batch.token_ids": lambda w: [range(9), range(30, 33)],
    "Batch.metadata.builder": lambda w: kvcache.AttentionMetadataBuilder(
        w.get("KVCache").tables),
    "work": lambda w: lambda engine: None,
    "messages": lambda w: [{"role": "user", "content": "hello"}],
    "loop": lambda w: w.get("EngineLoop"),
    "make_app.texts": lambda w: w.get("Texts"),
    "model_name": lambda w: "tiny",
    "tokenizer": lambda w: m.Tokenizer(),
    "text": lambda w: "hello",
    "budget": lambda w: "1MiB",
    "PagedModel.forward.batch": lambda w: m.paged_batch(w),
    "attach.model": lambda w: w.get("PreTrainedModel"),
    "layer_specs.model": lambda w: w.get("PreTrainedModel"),
    "PagedModel.shapes": lambda w: layer_shapes.layer_shapes(w.get("PreTrainedModel")),
    "PagedModel.model": lambda w: w.get("PreTrainedModel"),
    "PagedModel.cache": lambda w: w.get("PagedModel").cache,
    "Engine.model": lambda w: m.Model(w.get("KVCache")),
    # stores
    "model": lambda w: "m",
    "StoreTier.store": lambda w: w.get("BlockStore"),
    "StoreRank.store": lambda w: w.get("BlockStore"),
    "StoreRank.manager": lambda w: w.get("StoreRank").description.identity,
    "StoreRank.begin.orders": lambda w: [
        orders.LookUp(1, ())
    ],
    "StoreTier.over.ranks": lambda w: [w.get("StoreRank")],
    "StoreTier.over.manager": lambda w: w.get("StoreTier")._manager,
    "StoreTier.replace_rank.index": lambda w: 0,
    "StoreTier.replace_rank.rank": m.new_rank,
    "layers": lambda w: (0, 1),
    "heads": lambda w: (0, 1),
    "StoreTier.manager": lambda w: KVCacheManager(4, 12, 64, enable_events=True),
    **{
        f"StoreTier.{call}.request": lambda w: w.get("stored request")
        for call in ("begin", "cancel", "match")
    },
    "StoreTier.begin.request": m.to_load,
    "StoreTier.match.request": lambda w: Request("new", range(TOKENS)),
    "StoreTier.save.report": lambda w: w.get("stored report"),
    "StoreTier.invalidate.ids": lambda w: np.array([1]),
    "keys": lambda w: ["k1"],
    "BlockStore.put.values": lambda w: [w.get("store memory")[1]],
    "BlockStore.get.values": lambda w: [w.get("store memory")[1]],
    "DiskStore.put.values": lambda w: [w.get("store memory")[1]],
    "DiskStore.get.values": lambda w: [w.get("store memory")[1]],
    "BlockStore.open.memory": lambda w: np.zeros(256, np.uint8),
    "DiskStore.open.memory": lambda w: np.zeros(256, np.uint8),
    "value_bytes": lambda w: 64,
    "folder": lambda w: w.get("folder") / "another",
    "capacity_bytes": lambda w: 2**16,
    "fingerprint.pages": lambda w: w.get("KVCache").pages,
    "stop": lambda w: 8,
    "found": lambda w: [],
    # replay and events
    "path": lambda w: w.get("trace"),
    "read_hardware.path": m.hardware,
    "requests_of_trace": lambda w: [w.get("WorkloadRequest")],
    "compare.requests": lambda w: [w.get("WorkloadRequest")],
    "optimum.requests": lambda w: [w.get("WorkloadRequest")],
    "WorkloadRequest.token_ids": lambda w: np.arange(3, dtype=np.int32),
    "WorkloadRequest.content": lambda w: np.arange(3),
    "compare.sizes": lambda w: [100],
    "policies": lambda w: ["lru"],
    "Hardware.load_ms.link": lambda w: "host",
    "Hardware.load_ms.num_bytes": lambda w: 64,
    "workload": lambda w: [w.get("WorkloadRequest")],
    "chat_workload.num_requests": lambda w: 2,
    "Replayer.num_blocks": lambda w: 200,
    "Service.parse.text": lambda w: "1000,10",
    "events": lambda w: [kvcache.events.AllBlocksCleared()],
    "CacheView.apply.events": lambda w: [],
    "EventPublisher.endpoint": lambda w: "tcp://127.0.0.1:0",
    "EventSubscriber.endpoint": lambda w: w.get("EventPublisher").endpoint,
    "block_hash": lambda w: 5,
    "CacheView.num_leading.block_hashes": lambda w: [5],
    "BlockStored.block_hashes": lambda w: np.zeros((1, 32), np.uint8),
    "BlockRemoved.block_hashes": lambda w: np.zeros((1, 32), np.uint8),
    "parent_hash": lambda w: None,
    # the demo
    "make_chats.vocab_size": lambda w: 50,
    "make_chats.max_tokens": lambda w: 100,
    "make_text_chats.tokenizer": lambda w: m.chat_tokenizer(),
    "transcript.chat": lambda w: demo.Chat([[1]], []),
    "history": lambda w: [],
    **{
        f"{op}.{name}": m.op(op, i)
        for op, names in ARGUMENTS.items()
        for i, name in enumerate(names.split())
    },
}  # fmt: skip

for _name in ("append_slots", "free", "get_computed_blocks", "get_num_common_prefix_blocks"):
    RIGHT[f"V1KVCacheManager.{_name}.request"] = lambda w: w.get("engine request")

# In the classes with engine names, inherited calls take the same arguments as in the base classes.
for _below, _engine in (
    ("GroupTable", "BlockTable"),
    ("BlockTables", "MultiGroupBlockTable"),
    ("GroupTable", "AscendBlockTable"),
    ("BlockTables", "AscendMultiGroupBlockTable"),
):
    for _table in (WITH, RIGHT):
        _table |= {
            name.replace(_below, _engine, 1): value
            for name, value in _table.items()
            if name.startswith(f"{_below}.")
        }

RIGHT |= {
    "SanitizedGroup.kind": lambda w: "full",
    "Sanitizer.groups": lambda w: [w.get("SanitizedGroup")],
    "Sanitizer.num_blocks": lambda w: 9,
}
for _name in ("write", "load", "read", "state_write", "state_read", "tokens"):
    RIGHT |= {
        f"Sanitizer.observe_{_name}.group": lambda w, g=int("state" in _name): g,
        f"Sanitizer.observe_{_name}.request_ids": lambda w: ["a"],
        f"Sanitizer.observe_{_name}.starts": lambda w: [0],
        f"Sanitizer.observe_{_name}.stops": lambda w: [2],
        f"Sanitizer.observe_{_name}.query_lens": lambda w: [2],
        f"Sanitizer.observe_{_name}.seq_lens": lambda w: [2],
        f"Sanitizer.observe_{_name}.num_tokens": lambda w: [2],
        f"Sanitizer.observe_{_name}.pages": lambda w: [2],
        f"Sanitizer.observe_{_name}.slot_mapping": lambda w: [4, 5],
        f"Sanitizer.observe_{_name}.token_ids": lambda w: [4, 5],
        f"Sanitizer.observe_{_name}.block_table": lambda w: np.array([[1, 2]]),
    }
for _name in ("observe_allocation", "observe_free", "observe_clear"):
    RIGHT[f"Sanitizer.{_name}.blocks"] = lambda w: [1, 2]
for _name in ("src", "dst"):
    RIGHT[f"Sanitizer.observe_copy.{_name}"] = lambda w: [1, 2]
RIGHT |= {
    f"Sanitizer.{name}.request_id": lambda w: "a"
    for name in ("finish", "num_tokens", "observe_allocation", "observe_free", "observe_request")
}
RIGHT["Sanitizer.observe_request.token_ids"] = lambda w: [1, 2]
RIGHT["SanitizedGroup.first_needed.starts"] = lambda w: [1, 2]
