# SPDX-License-Identifier: Apache-2.0
"""Valid arguments for the fuzzer, selected by parameter name or by annotation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch

import kvcache
import kvcache.transfer as transfer
from kvcache import GroupSpec, KVCacheManager, LayerSpec, Request, StepReport
from kvcache.allocator import hashing
from kvcache.formats import format_named
from kvcache_exchange.disaggregation import steps
from kvcache_exchange.store import orders
from kvcache_serve import demo, engine
from tests.machinery.hostile import makers as m
from tests.machinery.hostile.makers import SIZES, TOKENS
from tests.machinery.hostile.ops import NAMES, arguments
from tests.simulator.sequences import Group, Seq, Status

if TYPE_CHECKING:
    pass

# Right values by annotation, for annotations that are not classes of the package.
PLAIN: dict[str, object] = {
    **dict.fromkeys(("int", "Count", "Size"), 1), **dict.fromkeys(("str", "Name", "Text"), "a"),
    "float": 1.0, "bool": True, "bytes": b"a", "object": object(), "Any": object(),
    "ndarray": np.array([1]), "Tensor": torch.ones(2, dtype=torch.int64), "dtype": torch.float32,
    "device": torch.device("cpu"), "Ids": [1, 2], "Lengths": [1], "Indices": [1, 2], "WireHash": 5,
    "Exception": RuntimeError("it failed"), "Enum": "gpu", "PathLike": "a",
}  # fmt: skip

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
    "rope_write_kv": ("k_scale", "v_scale", "q_weight", "k_weight", "query_out", "key_out"),
    "gather_kv": ("k_scale", "v_scale"),
    "gather_context": ("k_scale", "v_scale", "seq_starts", "positions"),
}

# The right value of a parameter: "Class.method.parameter", "Class.*.parameter", "function.parameter",
# or just the name of the parameter. Values of a class hold for its subclasses as well. A text that
# starts with "@" names an object of the world or an attribute of one.
_RIGHT: dict[str, object] = {
    "block_size num_tokens checked_first_live_token.start "
    "HostDeviceBuffer.upload.stop remote_block_size": 4,
    "num_kv_heads BlockPool.allocate.n GroupTable.move_row.tgt "
    "GroupTable.swap_row.tgt BlockTables.move_row.tgt BlockTables.swap_row.tgt "
    "blocks_per_kv_block num_layers total_num_kv_heads remote_tp_size "
    "block_size_ratio chat_workload.num_requests": 2,
    "head_size v_head_size num_blocks max_num_blocks_per_req "
    "checked_first_live_token.stop scale_bytes_per_token end_token stop": 8,
    "max_model_len piece_bytes value_bytes Hardware.load_ms.num_bytes": 64, "num_gpu_blocks": 20,
    "num_cpu_blocks": 10, "max_num_reqs": 3, "max_num_batched_tokens": 16,
    "kind": "full_attention",
    "check_planned_pages.kind checked_first_live_token.kind checked_max_pages.kind": "@kind",
    "options": {"window": 8}, "make_kind.name kind_class.name": "sliding_window",
    "backend.name TpKVTopology.attn_backend": "FLASHINFER", "tiny_model.name": "llama",
    "dtype": "float32", "pin_memory TpKVTopology.is_mla": False, "session": "pinned",
    "request requests parent": "@Request", "child": "@steps.child",
    "KVCacheManager.admit.request": "@steps.waiting",
    "KVCacheManager.extend.request": "@steps.slots",
    "KVCacheManager.finish_receiving.request": "@steps.receiving",
    "KVCacheManager.abort.step_id": "@steps.plan.step_id",
    "KVCacheManager.advance.starts": [TOKENS], "KVCacheManager.advance.stops": [TOKENS + 1],
    "KVStorage.over.num_kv_heads BlockPool.is_pinned.id num_reqs tp_size "
    "remote_pp_size": 1,
    "KVCacheManager.reject_tokens.num_tokens row GroupTable.move_row.src "
    "GroupTable.swap_row.src BlockTables.move_row.src BlockTables.swap_row.src "
    "BlockTables.num_speculative_tokens group layer number region "
    "HostDeviceBuffer.upload.start tp_rank pp_rank rank head local_rank first_token "
    "index StoreTier.replace_rank.index": 0,
    "now seconds": 2.0, "token_ids prompt": [1, 2, 3], "hashes": [bytes(32)], "ids": [1, 2],
    "BlockPool.publish.ids": [4, 5], "BlockPool.notify_release.prefix_tokens": [8],
    "BlockPool.notify_release.ids": [1], "seq_group": "@sequences.running",
    "BlockSpaceManager.swap_in.seq_group BlockSpaceManager.can_swap_in.seq_group": "@sequences.swapped",
    "layer_name": "l0", "KVCache.write.value": torch.ones(1, 2, 8),
    "KVCache.gather.slots": torch.tensor([4, 5]), "host_pages": "@KVCache.host_pages",
    "plan_cache.layers CacheDescription.of_group.layers": [LayerSpec("l", "full_attention", **SIZES)],
    "plan_cache.stages": None, "budget_bytes capacity_bytes": 2**16,
    "groups": [GroupSpec("full_attention", 4)], "src rows num_drafts": [0], "tgt": [2],
    "BlockTables.add_row.block_ids": [[1, 2], [3]], "BlockTables.append_row.block_ids": [[1], [3]],
    "MultiGroupBlockTable.block_sizes": [4, 8], "req_indices": np.array([0], np.int32),
    "positions GroupTable.state_pages.num_tokens": np.array([3]),
    "idx_mapping": torch.tensor([0], dtype=torch.int32),
    "KVFormat.dtype": "int8", "format_named.kv_format": "int8_token_head",
    "register_format.described": format_named("int8_token_head"),
    "KVFormat.parts.key_cache KVFormat.parts.value_cache": torch.zeros(5, 4, 2, 8).char(),
    "KVFormat.parts.scale_cache": torch.zeros(5, 4, 16, dtype=torch.uint8),
    "KVFormat.parts.dtype": torch.bfloat16,
    "GroupTable.state_pages.num_drafts Pages.offsets Pages.layers "
    "CacheDescription.offset_of.layer CacheDescription.offset_of.kv "
    "CacheDescription.offset_of.token CacheDescription.offset_of.head": np.array([0]),
    "seq_lens Scheduler.accept.token_ids": [5], "sizes": [[64, 64]], "num_bytes": 4096,
    "cache_salt": "s", "slot_mapping": torch.tensor([5, 6]), "k_scale v_scale": torch.ones(2, 1),
    "kv_caches": [torch.zeros(2, 5, 4, 2, 8)], "Pages.over.layers": [torch.zeros(5, 4)],
    "Pages.memory": torch.zeros(8 * 64, dtype=torch.uint8),
    "Pages.strides Pages.sizes Spans.of.length Transport.read.length": np.array([64]),
    "direction": "out", "pairs": np.array([[1, 2]], np.int32), "engine_id": "b",
    "sections": ((2, 4),), "KVTopology.with_remote.engine_id": "c",
    "TpKVTopology.engine_id name": "a", "TpKVTopology.remote_tp_size": {"a": 2, "b": 2},
    "TpKVTopology.remote_block_size": {"a": 4, "b": 4},
    "V1KVCacheManager.allocate_slots.computed_blocks": (),
    "CacheDescription.of_group.group": GroupSpec("full_attention", 4, layers=("l",)),
    "TransferPlan.apply.local_pages TransferPlan.apply.remote_pages "
    "StateTransferPlan.apply.local_pages StateTransferPlan.apply.remote_pages": np.array([[1], [2]]),
    "local_ids permute_pages.pages": np.array([1, 2]), "remote_ids": np.array([2, 1]),
    "peers": {0: "other"}, "peer": "other", "Spans.bases": "@Spans.bases",
    "Spans.offsets": "@Spans.offsets", "Spans.length": "@Spans.length",
    "Spans.of.addresses": np.array([4096]), "Spans.of.name Spans.beside.name": "addresses",
    "Spans.beside.addresses": np.array([4096, 8192]), "timeout_s": 5.0, "dst_block_ids": [3, 4],
    "copy_kv_blocks.direction": "h2d", "caches": [torch.zeros(5, 2, 4, 8).transpose(1, 2)],
    "kv_postprocess_blksize_on_receive.cache": torch.zeros(5, 2, 4, 8).transpose(1, 2),
    "kv_postprocess_layout_on_receive.cache "
    "kv_postprocess_blksize_and_layout_on_receive.cache": torch.zeros(5, 4, 2, 8),
    "remote_layout": "HND", "dims": ("block", "kv", "token", "head", "element"),
    "required": {"a": "NHD"}, "Connector.manager": "@connectors.other.manager",
    "ranks": "@connectors.other.ranks", "Connector.publish.request": "@connectors.computed",
    "Connector.withdraw.request Connector.cancel.request": "@connectors.request",
    "Connector.save.report": "@StepReport", "offer Offer.from_dict.values": "@connectors.offer",
    "layouts_of_plan.plan": "@connectors.one.plan",
    "KVIdentity.model KVIdentity.of_manager.model": {"name": "m"},
    "Offer.check_like.identity": "@Offer.identity", "Offer.engine_id": "one",
    "Offer.check_prompt.num_tokens": 2 * TOKENS, "Engine.abort.request_id": "waiting",
    "Engine.stop.request_id": "running", "Scheduler.manager": "@manager alone",
    "Hint.intent Receipt.intent": "pin", "Receipt.status": "done",
    "HintExecutor.planned.statuses found CacheView.apply.events": [],
    "PrefixCache.start_epoch.model_version": "newer weights",
    "Scheduler.accept.sequence Scheduler.finish.sequence Scheduler.fork.parent": "@ended sequence",
    "Batch.rows": "@Batch.rows", "Batch.starts": "@Batch.starts",
    "Batch.token_ids": [range(9), range(30, 33)],
    "messages": [{"role": "user", "content": "hello"}], "budget": "1MiB",
    "attach.model layer_specs.model": "@PreTrainedModel",
    "StoreRank.manager": "@StoreRank.description.identity",
    "StoreTier.over.manager": "@StoreTier._manager", "layers heads": (0, 1),
    "StoreTier.save.report": "@stored report", "keys": ["k1"],
    "BlockStore.open.memory DiskStore.open.memory": np.zeros(256, np.uint8),
    "fingerprint.pages": "@KVCache.pages", "path": "@trace",
    "WorkloadRequest.token_ids": np.arange(3, dtype=np.int32),
    "WorkloadRequest.content": np.arange(3), "compare.sizes": [100], "policies": ["lru"],
    "Hardware.load_ms.link": "host", "Replayer.num_blocks": 200, "Service.parse.text": "1000,10",
    "events": [kvcache.events.AllBlocksCleared()], "EventPublisher.endpoint": "tcp://127.0.0.1:0",
    "EventSubscriber.endpoint": "@EventPublisher.endpoint", "make_chats.vocab_size": 50,
    "make_chats.max_tokens": 100,
    "SwapEngine.host": lambda w: w.get("Pages").on_host(4),
    "KVCacheManager.report.report": lambda w: StepReport(w.get("steps").plan.step_id, True),
    "KVCacheManager.advance.rows": lambda w: [w.get("KVCacheManager").row(w.get("steps").slots)],
    "KVStorage.over.pages": m.empty_pages,
    "KVCacheManager.release_blocks.blocks": m.kept,
    "Request.chain.key": lambda w: hashing.hash_key(4, "0", "sha256_cbor", None),
    "BlockPool.publish.hashes": lambda w: m.hashes()[3:5],
    "BlockPool.lookup.hashes": lambda w: m.hashes(),
    "BlockPool.unpin.ids": lambda w: w.get("BlockPool").pin([1]) or [1],
    "seq parent_seq": lambda w: w.get("sequences").running.seqs[0],
    "seqs": lambda w: [w.get("sequences").running.seqs[0]],
    "BlockSpaceManager.allocate.seq_group": lambda w: Group("new", [Seq(7, [1, 2, 3])]),
    "BlockSpaceManager.can_allocate.seq_group": lambda w: Group("new", [Seq(7, [1, 2])]),
    "BlockSpaceManager.get_cross_block_table.seq_group "
    "BlockSpaceManager.free_cross.seq_group": m.encoder,
    "BlockSpaceManager.get_num_cached_tokens.seq": lambda w: Seq(9, list(range(TOKENS))),
    "child_seq": lambda w: Seq(8, w.get("sequences").running.seqs[0].tokens, Status.RUNNING),
    "KVCache.write.key": lambda w: w.get("steps") and torch.ones(1, 2, 8),
    "KVCache.slots.num_tokens": lambda w: w.get("steps") and 1,
    "BlockTables.apply.plan": m.multi_plan, "key value": torch.ones(2, 2, 8),
    "Worker.tables": m.table, "Worker.apply.plan Worker.start.plan": m.next_plan,
    "V1KVCacheManager.allocate_slots.request": lambda w: m.engine_request("new"),
    "CacheDescription.from_dict.values": lambda w: m.descriptions("a").to_dict(),
    "StateDescription.from_dict.values": lambda w: m.states("a").to_dict(),
    "fetch.groups": lambda w: [w.get("GroupFetch")],
    "Spans.from_bytes.data": lambda w: w.get("Spans").to_bytes(),
    "Transport.connect.metadata": m.third,
    "Transport.disconnect.peer": lambda w: (w.get("Transport"), "other")[1],
    "Transport.register.memory": lambda w: [(np.zeros(64, np.uint8).ctypes.data, 64)],
    "Transport.read.local": lambda w: w.get("transfer memory").ctypes.data + np.array([0]),
    "Transport.read.remote": lambda w: w.get("transfer memory").ctypes.data + np.array([4096]),
    "src_kv_caches dst_kv_caches": {"l": torch.zeros(2, 5, 4, 2, 8)},
    "outputs": lambda w: [m.connector_output(w)],
    "KVOutputAggregator.from_connector.connector": SimpleNamespace(get_finished_count=lambda: 1),
    "scheduler_output": SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
    ),
    "CacheRank.storages": lambda w: w.get("connectors").other.storages[0],
    "Connector.publish_cached.request Connector.hit_tokens.request "
    "StoreTier.match.request": lambda w: Request("new", range(TOKENS)),
    "Connector.begin.request": m.begun,
    "Connector.match.request": lambda w: Request("new", range(2 * TOKENS)),
    "Connector.check_peer.values": lambda w: w.get("connectors").other.connector.describe(),
    "GroupLayout.from_dict.values": lambda w: w.get("GroupLayout").to_dict(),
    "GroupLayout.description": lambda w: m.descriptions("a"),
    "layouts_of_plan.storages": lambda w: w.get("connectors").one.storages[0],
    "KVIdentity.from_dict.values": lambda w: w.get("KVIdentity").to_dict(),
    "CacheRank.begin.step": lambda w: steps.Step(),
    "digest_of_first": lambda w: lambda count: w.get("Offer").digest,
    "params": lambda w: engine.SamplingParams(max_tokens=2),
    "Scheduler.add.sequence": lambda w: engine.Sequence(Request("another", range(5))),
    "Scheduler.fork.child": lambda w: engine.Sequence(Request("fork", range(10))),
    "tokenizer": lambda w: m.Tokenizer(), "PagedModel.forward.batch": m.paged_batch,
    "Engine.model": lambda w: m.Model(w.get("KVCache")),
    "StoreRank.begin.orders": lambda w: [orders.LookUp(1, ())],
    "StoreTier.over.ranks": lambda w: [w.get("StoreRank")],
    "StoreTier.replace_rank.rank": m.new_rank,
    "StoreTier.manager": lambda w: KVCacheManager(4, 12, 64, enable_events=True),
    "StoreTier.begin.request": m.to_load,
    "BlockStore.put.values BlockStore.get.values DiskStore.put.values "
    "DiskStore.get.values": lambda w: [w.get("store memory")[1]],
    "folder": lambda w: w.get("folder") / "another", "read_hardware.path": m.hardware,
    "workload compare.requests optimum.requests": lambda w: [w.get("WorkloadRequest")],
    "make_text_chats.tokenizer": lambda w: m.chat_tokenizer(),
    "V1KVCacheManager.*.request": "@engine request",
    # the sanitizer
    "SanitizedGroup.kind": "full", "Sanitizer.groups": lambda w: [w.get("SanitizedGroup")],
    "Sanitizer.num_blocks": 9, "Sanitizer.*.group": 0, "Sanitizer.*.request_ids": ["a"],
    "Sanitizer.observe_state_write.group Sanitizer.observe_state_read.group": 1,
    "Sanitizer.*.starts": [0], "Sanitizer.*.block_table": np.array([[1, 2]]),
    "Sanitizer.*.stops Sanitizer.*.query_lens Sanitizer.*.seq_lens Sanitizer.*.pages "
    "Sanitizer.observe_tokens.num_tokens Sanitizer.observe_state_write.num_tokens "
    "Sanitizer.observe_state_read.num_tokens": [2],
    "Sanitizer.*.slot_mapping Sanitizer.observe_write.token_ids "
    "Sanitizer.observe_tokens.token_ids": [4, 5],
    "Sanitizer.observe_allocation.blocks Sanitizer.observe_free.blocks Sanitizer.observe_clear.blocks "
    "Sanitizer.*.src Sanitizer.*.dst Sanitizer.observe_request.token_ids "
    "SanitizedGroup.first_needed.starts": [1, 2],
    "transcript.chat": lambda w: demo.Chat([[1]], []),
}  # fmt: skip
RIGHT = {name: value for names, value in _RIGHT.items() for name in names.split()}
RIGHT |= {
    **{
        f"Transport.read_spans.{side}": lambda w, at=at: transfer.Spans.of(
            w.get("transfer memory").ctypes.data + np.array([at]), np.array([64]), "spans"
        )
        for side, at in (("local", 0), ("remote", 4096))
    },
    **{
        f"Offer.{name}": f"@Offer.{name}"
        for name in ("num_tokens", "digest", "identity", "groups", "blocks", "ranks", "lease")
    },
    "StoreTier.cancel.request": "@stored request",
    **{f"{op}.{name}": m.op(op, i) for op in NAMES for i, name in enumerate(arguments(op))},
}
