# SPDX-License-Identifier: Apache-2.0
"""Objects in a known state, valid calls for them, and their subsequent behavior.

A scene's `calls()` yields (name, function, dict of valid arguments), with new arguments for each
call. Its `follow()` continues to use the objects and returns the results as plain values, which are
compared with those of an untouched twin.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace

import numpy as np
import torch

import kvcache
import kvcache.transfer as transfer
from kvcache import (
    Admit,
    AttentionMetadataBuilder,
    BlockPool,
    BlockTables,
    CacheOptions,
    ContextParallel,
    External,
    GroupSpec,
    KVCacheManager,
    KVStorage,
    LayerSpec,
    Pages,
    Request,
    StepPlan,
    StepReport,
    SwapEngine,
    TableShape,
    Worker,
    compat,
    hash_blocks,
    layouts,
    plan_cache,
)
from kvcache.allocator import check_invariants
from kvcache.compat import BlockSpaceManager, vllm_block_table

Call = tuple[str, Callable, dict[str, object]]


def plain(value: object) -> object:
    """Convert a value to plain values that are equal if the contents are equal."""
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().view(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if is_dataclass(value):
        fields = value.__dataclass_fields__
        return [type(value).__name__, *(plain(getattr(value, name)) for name in fields)]
    return value if isinstance(value, int | float | str | bytes | None) else repr(value)


class Scene:
    """Base class of scenes."""

    is_constant = False  # whether no call changes the scene

    def calls(self) -> Iterator[Call]:
        raise NotImplementedError

    def follow(self) -> object:
        return None

    def draw(self, rng: random.Random) -> tuple[str, Callable, dict[str, object], list[str]]:
        """Draw a call.

        Return the call's name, function and valid arguments, and the optional parameters that may
        be made invalid.
        """
        name, function, arguments = rng.choice([*self.calls()])
        further = [each for each in parameter_names(function) if each not in arguments]
        return name, function, arguments, further

    def right_value(self, name: str, rng: random.Random) -> object:
        """Return a valid value for an optional argument, or None if none is known."""
        return None

    def others(self) -> list[object]:
        """Return valid objects to pass where an object of another type is expected."""
        return []

    def close(self) -> None:
        """Release the scene's resources."""


_SKIPPED = {"device"}  # optional arguments to skip


def parameter_names(function: Callable) -> tuple[str, ...]:
    """Return the names of a function's named parameters."""
    if hasattr(function, "__signature__"):  # the function was created for only one call
        return tuple(function.__signature__.parameters)
    if inspect.ismethod(function):
        return _names_of(function.__func__)[1:]
    return _names_of(function)


@functools.lru_cache(maxsize=500)
def _names_of(function: Callable) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a native function
        return ()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(n for n, each in parameters.items() if each.kind in kinds and n not in _SKIPPED)


class ManagerScene(Scene):
    """A request-level manager with running, swapped, freed and cached requests."""

    def __init__(self, *, windowed: bool, host: bool) -> None:
        groups = [GroupSpec("full_attention", 4)]
        if windowed:
            groups.append(GroupSpec("sliding_window", 4, {"window": 6}))
        self.manager = KVCacheManager.for_groups(
            groups,
            60,
            64,
            num_preallocate_tokens=4,
            enable_events=True,
            max_num_reqs=8,
            num_host_blocks=20 if host else 0,
        )
        m = self.manager
        m.cache.set_now(1.0)
        tokens = [list(range(100 * i, 100 * i + 18)) for i in range(8)]
        self.a, self.b, self.c = (Request(name, tokens[i]) for i, name in enumerate("abc"))
        self.new, self.same = Request("new", tokens[3]), Request("same", [*tokens[0], 5, 7])
        self.by_slots = Request("slots", tokens[4])
        old = Request("old", tokens[5])
        plans = [
            m.step(
                new=[
                    Admit(self.a, num_tokens=18),
                    Admit(self.b, num_tokens=10),
                    Admit(old, num_tokens=18),
                ]
            )
        ]
        plans.append(m.step([0, 1], [1, 2], token_ids=[5], num_token_ids=[1, 0]))
        m.free(old)
        m.admit(Admit(self.by_slots, num_tokens=18), ())
        if host:
            plans.append(m.step(swap_out=[1]))
        self.plan = plans[-1]
        m.report(StepReport(plans[0].step_id, True))

    def others(self) -> list[object]:
        return [self.a, self.b, self.c, self.new, self.by_slots, self.manager, self.plan]

    def calls(self) -> Iterator[Call]:
        m, a, new = self.manager, self.a, self.new
        requests = {
            **{"num_computed_tokens": {}, "row": {}, "state": {}},
            **{"release_blocks": {}, "block_ids": {"group": 0}},
            **{"finish_receiving": {"num_tokens": 1}},
            **{"reject_tokens": {"num_tokens": 1}, "checkpoint_tokens": {"num_tokens": 3}},
        }
        of_cache = {
            **{"hashes": {}, "cached_tokens": {"read_cache": None}, "access": {"now": 2.0}},
            "find_prefix": {"read_cache": True},
            "num_common_prefix_blocks": {"num_running_requests": 1, "group": 0},
        }
        for owner, calls in ((m, requests), (m.cache, of_cache)):
            for name, further in calls.items():
                yield name, getattr(owner, name), {"request": a, **further}
        yield "extend", m.extend, {"request": self.by_slots, "num_tokens": 1}
        yield "free", self.free, {"request": a}
        yield "free", m.free, {"retention": [(0, 4, 5, None)]}
        yield "would_fit", m.would_fit, {"request": Admit(new, 4)}
        yield "admit", m.admit, {"request": Admit(new, 4), "computed_blocks": ()}
        yield "fork", m.fork, {"parent": a, "child": self.same}
        yield "pin", m.cache.pin, {"session": "s", "request": a}
        yield "unpin", m.cache.unpin, {"session": "s"}
        yield "set_now", m.cache.set_now, {"seconds": 3.0}
        yield "find", m.cache.find, {"hashes": m.cache.hashes(a), "group": 0}
        yield "hashes_of", m.cache.hashes_of, {"ids": [1, 2], "medium": "gpu"}
        yield "evict", m.cache.evict, {"ids": [1, 2]}
        yield "invalidate", m.invalidate, {"ids": [1]}
        yield "abort", m.abort, {"step_id": self.plan.step_id}
        yield "reset_prefix_cache", m.cache.reset, {"group": 0}
        yield "report", m.report, {"report": StepReport(self.plan.step_id, True, [1], [])}
        rows = {"rows": [0], "num_tokens": [2], "token_ids": [3, 4], "num_token_ids": [2]}
        yield "step", m.step, {**rows, "num_rejected_tokens": [0], "num_lookahead_tokens": 1}
        yield "step", m.step, {"new": [Admit(new, 4, num_reserved_blocks=1)]}
        yield "step", m.step, {"new": [new, Admit(self.c, read_cache=True)]}
        yield "step", m.step, {"new": [Admit(new, external=External(4))]}
        yield "append_tokens", a.append_tokens, {"token_ids": [1, 2]}

    def free(self, request: Request) -> object:
        return self.manager.free(request)

    def follow(self) -> object:
        m = self.manager
        check_invariants(m)
        out = [self.a.token_ids, self.b.token_ids, m.pool.num_free, m.cache.drain_events()]
        out.append(m.step([0, 1], [1, 1], token_ids=[8, 9], new=[self.new, self.c]))
        out += [m.block_ids(each) for each in (self.a, self.by_slots)]
        out.append(m.step(new=[Request("again", [*range(500, 518), 3])]))
        out.append(m.free(self.a))
        out += [m.cache.drain_events(), m.pool.num_free, m.pool.num_cached, m.pool.num_loading]
        check_invariants(m)
        return plain(out)


class Seq:
    """A sequence of an engine. The return value of each of its methods can be made invalid."""

    def __init__(self, seq_id: object, tokens: list[int], status: object = "WAITING") -> None:
        self.seq_id, self.tokens, self.status = seq_id, tokens, status
        self.length: object = None

    def get_len(self) -> object:
        return len(self.tokens) if self.length is None else self.length

    def get_token_ids(self) -> object:
        return self.tokens


class Group:
    """A group of sequences."""

    def __init__(self, *seqs: Seq, request_id: object = "g", encoder: Seq | None = None) -> None:
        self.seqs, self.request_id, self.encoder = list(seqs), request_id, encoder

    def get_seqs(self) -> object:
        return self.seqs

    def is_encoder_decoder(self) -> object:
        return self.encoder is not None

    def get_encoder_seq(self) -> object:
        return self.encoder


class SequenceScene(Scene):
    """A manager of sequence groups."""

    def __init__(self, *, window: int | None, caching: bool) -> None:
        self.manager = m = BlockSpaceManager(4, 40, 20, 0.1, window, caching)
        self.a, self.b = Seq(1, list(range(18))), Seq(2, list(range(50, 60)))
        self.s, self.forked = Seq(3, list(range(80, 89))), Seq(4, list(range(18)), "RUNNING")
        self.ga, self.gb = Group(self.a, request_id="a"), Group(self.b, request_id="b")
        self.gs = Group(self.s, request_id="s", encoder=Seq(9, [1] * 6))
        for group in (self.ga, self.gb, self.gs):
            m.allocate(group)
            for seq in group.seqs:
                seq.status = "RUNNING"
        if caching:
            m.mark_blocks_as_computed(self.ga, 18)
        m.swap_out(self.gs)
        self.s.status = "SWAPPED"

    def others(self) -> list[object]:
        liar = Seq(7, [1, 2, 3])
        liar.length = 9
        grown = Seq(1, [*range(18), 5])
        return [self.ga, self.gb, self.gs, self.a, self.b, self.s, liar, Group(liar), grown]

    def fresh(self) -> Group:
        return Group(Seq(20, list(range(18))), Seq(21, list(range(18))), request_id="n")

    def calls(self) -> Iterator[Call]:
        m = self.manager
        grown = Seq(1, [*range(18), 5], "RUNNING")
        yield "can_allocate", m.can_allocate, {"seq_group": self.fresh(), "num_lookahead_slots": 1}
        yield "allocate", m.allocate, {"seq_group": self.fresh()}
        encoder = Group(Seq(22, [1, 2]), request_id="e", encoder=Seq(23, [1] * 5))
        yield "allocate", m.allocate, {"seq_group": encoder}
        yield (
            "can_append_slots",
            m.can_append_slots,
            {"seq_group": self.ga, "num_lookahead_slots": 1},
        )
        yield "append_slots", m.append_slots, {"seq": grown, "num_lookahead_slots": 1}
        yield "fork", m.fork, {"parent_seq": self.a, "child_seq": self.forked}
        yield "free", m.free, {"seq": self.a}
        yield "free_cross", m.free_cross, {"seq_group": self.gs}
        yield "get_block_table", m.get_block_table, {"seq": self.a}
        yield "get_cross_block_table", m.get_cross_block_table, {"seq_group": self.gs}
        yield "access", m.access_all_blocks_in_seq, {"seq": self.a, "now": 2.0}
        mark = {"seq_group": self.gb, "token_chunk_size": 3}
        yield "mark_blocks_as_computed", m.mark_blocks_as_computed, mark
        yield "common", m.get_common_computed_block_ids, {"seqs": [self.a, self.b]}
        yield "get_num_cached_tokens", m.get_num_cached_tokens, {"seq": Seq(30, list(range(18)))}
        yield "remove", m.remove_seq_from_computed_blocks_tracker, {"seq": self.a}
        yield "hit_rate", m.get_prefix_cache_hit_rate, {"device": "gpu"}
        yield "reset_prefix_cache", m.reset_prefix_cache, {"device": "gpu"}
        yield "can_swap_out", m.can_swap_out, {"seq_group": self.ga}
        yield "swap_out", m.swap_out, {"seq_group": self.ga}
        yield "can_swap_in", m.can_swap_in, {"seq_group": self.gs, "num_lookahead_slots": 1}
        yield "swap_in", m.swap_in, {"seq_group": self.gs}

    def follow(self) -> object:
        m = self.manager
        m.check_invariants()
        out: list = [m.get_num_free_gpu_blocks(), m.get_num_free_cpu_blocks()]
        out += [list(m.get_block_table(each)) for each in (self.a, self.b)]
        a = Seq(1, [*range(18), 5, 6], "RUNNING")
        out.append(m.append_slots(a, 2))
        m.mark_blocks_as_computed(Group(a, request_id="a"), 1)
        out += [m.fork(a, Seq(5, a.tokens, "RUNNING")), m.append_slots(Seq(5, a.tokens), 0)]
        other = Group(Seq(6, list(range(17))), request_id="o")
        m.allocate(other)
        out += [list(m.get_block_table(other.seqs[0])), m.swap_in(self.gs)]
        m.free(a)
        out += [m.get_num_free_gpu_blocks(), m.get_num_free_cpu_blocks()]
        m.check_invariants()
        return plain(out)


class PoolScene(Scene):
    """A standalone block pool."""

    def __init__(self) -> None:
        self.pool = BlockPool(20, eviction="learned")
        self.hashes = hash_blocks(range(40), 8)
        self.pool.allocate(5)
        self.pool.publish([1, 2, 3], self.hashes[:3])
        self.pool.release([3])

    def calls(self) -> Iterator[Call]:
        p = self.pool
        yield "BlockPool", BlockPool, {"num_blocks": 5, "eviction": "lru", "eviction_options": {}}
        yield "pool.allocate", p.allocate, {"n": 2}
        for name in ("retain", "release", "evict", "ref_counts", "hit", "pin", "unpin"):
            yield f"pool.{name}", getattr(p, name), {"ids": [1, 2]}
        yield "pool.access", p.access, {"ids": [1], "now": 1.0}
        yield "pool.set_now", p.set_now, {"seconds": 2.0}
        yield "pool.is_pinned", p.is_pinned, {"id": 1}
        released = {"ids": [1], "prefix_tokens": [8], "tokens_per_block": 8}
        yield "pool.notify_release", p.notify_release, {**released, "retention": [(0, 4, 5, None)]}
        published = {"ids": [4, 5], "hashes": self.hashes[3:5], "group": 0, "parent": bytes(32)}
        yield "pool.publish", p.publish, {**published, "is_chain": True}
        yield "pool.lookup", p.lookup, {"hashes": self.hashes, "group": 0, "prefix": True}

    def follow(self) -> object:
        p = self.pool
        p.check_invariants()
        out = [p.num_free, p.num_cached, p.num_evicted, p.num_pinned, p.lookup(self.hashes)]
        out += [p.ref_counts(range(1, 20)), p.allocate(14), p.allocate(1), p.lookup(self.hashes)]
        return plain(out)


class ValueScene(Scene):
    """Value classes, and functions that change nothing."""

    is_constant = True

    def __init__(self) -> None:
        layers = [LayerSpec(f"l{i}", "full_attention", 4, 2, 8) for i in range(2)]
        layers.append(LayerSpec("w", "sliding_window", 4, 2, 8, options={"window": 8}))
        self.budget = {"layers": layers, "budget_bytes": 2**18, "max_model_len": 64}
        self.plan = plan_cache(**self.budget)

    def calls(self) -> Iterator[Call]:
        yield "Request", Request, {"request_id": "r", "token_ids": [1, 2, 3], "cache_salt": "s"}
        items = {"mm_items": [("i", 0, 2)], "prompt_embeds": np.zeros((3, 2), np.float32)}
        yield "Request", Request, {"request_id": "r", "token_ids": [1, 2, 3], **items}
        more = {"lora": ("a", "b"), "num_encoder_tokens": 3, "block_hashes": [bytes(32)]}
        yield "Request", Request, {"request_id": "r", "token_ids": [1] * 4, **more}
        hashed = {"token_ids": list(range(9)), "block_size": 4, "seed": "0"}
        yield "hash_blocks", hash_blocks, {**hashed, "extra_keys": [None, [("a", 1)]]}
        yield "ContextParallel", ContextParallel, {"pcp_world_size": 2, "pcp_rank": 1}
        group = {"kind": "sliding_window", "block_size": 4, "options": {"window": 8}}
        yield "GroupSpec", GroupSpec, {**group, "layers": ("a",)}
        layer = {"name": "l", "kind": "full_attention", "block_size": 4, "num_kv_heads": 2}
        yield "LayerSpec", LayerSpec, {**layer, "head_size": 8, "dtype": "bfloat16"}
        options = {"enable_caching": True, "num_preallocate_tokens": 4, "watermark": 0.1}
        yield "CacheOptions", CacheOptions, {**options, "eviction": "lru", "max_num_reqs": 4}
        sizes = {"block_size": 4, "num_gpu_blocks": 20, "max_model_len": 64}
        yield "KVCacheManager", KVCacheManager, {**sizes, "enable_caching": True, "watermark": 0.1}
        groups = [GroupSpec("full_attention", 4), GroupSpec("sliding_window", 4, {"window": 6})]
        several = {"groups": groups, "num_gpu_blocks": 20, "max_model_len": 64}
        yield "for_groups", KVCacheManager.for_groups, {**several, "max_encoder_tokens": 8}
        pools = {"block_size": 4, "num_gpu_blocks": 20, "num_cpu_blocks": 10, "watermark": 0.1}
        yield "BlockSpaceManager", BlockSpaceManager, {**pools, "sliding_window": 8}
        yield "plan_cache", plan_cache, {**self.budget}
        yield "pages_per_request", self.plan.pages_per_request, {"num_tokens": 9}
        yield "build", kvcache.build, {"plan": self.plan, "max_num_reqs": 2, "num_host_blocks": 3}
        yield "StepReport", StepReport, {"step_id": 1, "completed": True}
        yield "choose_layout", layouts.choose_layout, {"required": {"a": "NHD", "b": None}}
        backend = layouts.backend("FLASHINFER")
        shape = {"num_blocks": 3, "block_size": 4, "num_kv_heads": 2, "head_size": 8}
        yield "backend.shape", backend.shape, shape
        yield "memory_order", backend.memory_order, {"layout": "NHD", "cross_layers": False}
        yield "backend", layouts.backend, {"name": "MLA"}


class TableScene(Scene):
    """Block tables of two groups, and the attention metadata built from them."""

    def __init__(self) -> None:
        groups = [GroupSpec("full_attention", 4), GroupSpec("sliding_window", 8, {"window": 12})]
        sizes = {"max_num_reqs": 4, "max_model_len": 32, "max_num_tokens": 16}
        self.tables = BlockTables.for_groups(groups, **sizes)
        self.tables.add_row(([5, 6, 7], [2, 3]), 1)
        shape = TableShape(4, 8, kernel_block_size=2)
        self.one = BlockTables([shape], max_num_reqs=4, max_num_tokens=16)[0]
        self.one.add_row([3, 4], 0)
        self.builder = AttentionMetadataBuilder(self.tables)

    def others(self) -> list[object]:
        return [self.tables, self.one, self.builder]

    def calls(self) -> Iterator[Call]:
        t, o = self.tables, self.one
        sizes = {"block_size": 4, "max_num_reqs": 4, "max_num_blocks_per_req": 8}
        sizes["max_num_batched_tokens"] = 16
        yield (
            "compat.BlockTable",
            vllm_block_table.BlockTable,
            {**sizes, "kernel_block_size": 2, "device": "cpu"},
        )
        multi = {"max_num_reqs": 4, "max_model_len": 32, "max_num_tokens": 16}
        groups = [GroupSpec("full_attention", 4)]
        yield "tables.for_groups", BlockTables.for_groups, {"groups": groups, **multi}
        more = {"pin_memory": False, "device": "cpu", "block_sizes": [4, 8]}
        engines = {"max_num_reqs": 4, "max_model_len": 32, "max_num_batched_tokens": 16, **more}
        yield "compat.MultiGroupBlockTable", vllm_block_table.MultiGroupBlockTable, engines
        shape = {
            "block_size": 8,
            "max_num_blocks": 4,
            "kernel_block_size": 4,
            "cp_kv_cache_interleave_size": 2,
        }
        yield "TableShape", TableShape, {**shape, "window": 9, "circular": True}
        shapes = [TableShape(4, 8), TableShape(8, 4)]
        yield (
            "BlockTables",
            BlockTables,
            {"shapes": shapes, "max_num_reqs": 4, "max_num_tokens": 16},
        )
        yield "tables.add_row", t.add_row, {"block_ids": [[1, 2], [3]], "row": 0}
        yield "tables.append_row", t.append_row, {"block_ids": [[1], [3]], "row": 1}
        for name in ("move_rows", "swap_rows"):
            yield f"tables.{name}", getattr(t, name), {"src": [1], "tgt": [2]}
            yield f"table.{name}", getattr(o, name), {"src": [0], "tgt": [2]}
        for name in ("move_row", "swap_row"):
            yield f"table.{name}", getattr(o, name), {"src": 0, "tgt": 2}
        yield "tables.clear_rows", t.clear_rows, {"rows": [1]}
        yield "table.clear_row", o.clear_row, {"row": 0}
        yield "table.add_row", o.add_row, {"block_ids": [1, 2], "row": 0}
        yield "table.append_row", o.append_row, {"block_ids": [1, 2], "row": 0}
        rows, positions = np.array([1, 1], np.int32), np.array([3, 4])
        slots = {"req_indices": rows, "positions": positions}
        yield "tables.compute_slot_mapping", t.compute_slot_mapping, dict(slots)
        yield "slots_of", t[0].slots_of, dict(slots)
        started = {**slots, "req_indices": [1], "query_start_loc": np.array([0, 2], np.int32)}
        yield "table.compute_slot_mapping", t[0].compute_slot_mapping, started
        yield "commit_slot_mapping", t.commit_slot_mapping, {"num_tokens": 2}
        yield "commit_block_table", t.commit_block_table, {"num_reqs": 2}
        idx = torch.tensor([1, -1], dtype=torch.int32)
        gathered = {"idx_mapping": idx, "num_computed_tokens": idx.clone().fill_(3)}
        yield "tables.gather", t.gather, {**gathered, "max_num_tokens": 16}
        yield "tables.apply", t.apply, {"plan": _table_plan(), "num_blocks": 20}
        yield "table.getitem", t.__getitem__, {"group": 0}
        mapped = {"block_ids": [1, 2], "blocks_per_kv_block": 2}
        yield "map_to_kernel_blocks", o.map_to_kernel_blocks, mapped
        yield "get_device_tensor", o.get_device_tensor, {"num_reqs": 2}
        builder = {"tables": t, "max_num_reqs": 3, "groups": [0]}
        yield "AttentionMetadataBuilder", AttentionMetadataBuilder, builder
        batch = {"rows": [1, -1], "query_lens": [1, 0], "seq_lens": [9, 0], "num_padded_reqs": 3}
        yield "builder.build", self.builder.build, batch
        yield "ContextParallel", ContextParallel, {"dcp_world_size": 2, "dcp_rank": 1}

    def follow(self) -> object:
        t, o = self.tables, self.one
        out = [t[g].get_numpy_array().copy() for g in (0, 1)] + [o.get_numpy_array().copy()]
        out += [t[g].num_blocks_per_row.copy() for g in (0, 1)] + [o.num_blocks_per_row.copy()]
        t.append_row(([8], [9]), 1)
        t.compute_slot_mapping(np.array([1], np.int32), np.array([11]))
        out += [t[g].slot_mapping.np.copy() for g in (0, 1)]
        batch = self.builder.build(rows=[1], query_lens=[1], seq_lens=[9])
        out += [batch[0].block_table.clone(), batch[1].seqused_k.clone()]
        return plain(out)


def _table_plan() -> StepPlan:
    ids = np.array([1], np.int32)
    none = np.zeros(0, np.int32)
    splits = [np.array([0, 1], np.int32)] * 2
    return StepPlan(
        1,
        none,
        none,
        none,
        append_rows=ids,
        append_splits=splits,
        append_ids=[ids] * 2,
        replace=[np.zeros((0, 3), np.int32)] * 2,
    )


class WorkerScene(Scene):
    """A worker with host pages: storage, pages and swaps."""

    def __init__(self) -> None:
        self.storage = KVStorage(12, 4, 2, 8, num_layers=2, dtype=torch.float32)
        pages = self.storage.pages
        pages.memory.copy_(torch.arange(pages.memory.numel()).to(torch.uint8))
        self.pages, self.host = pages, pages.on_host(10)
        self.host.memory.fill_(9)
        shape = TableShape(4, 8)
        self.table = BlockTables([shape], max_num_reqs=4, max_num_tokens=16)[0]
        self.worker = Worker(self.storage, self.table, self.host)
        self.worker.apply(self.plan(1, append_ids=[[1, 2, 3]]))
        self.engine = SwapEngine(self.pages, self.host)

    def plan(self, step_id: int, **sections: object) -> StepPlan:
        none = np.zeros(0, np.int32)
        ids = np.array(sections.pop("append_ids", [[4]])[0], np.int32)
        values = {
            **{"append_rows": np.array([0], np.int32), "append_ids": [ids]},
            **{"append_splits": [np.array([0, len(ids)], np.int32)]},
            **{"replace": [np.zeros((0, 3), np.int32)]},
            **{name: np.array(value, np.int32) for name, value in sections.items()},
        }
        return (
            StepPlan(step_id, none, none, none, previous_step_id=step_id - 1, **values)
            if (step_id > 1)
            else StepPlan(step_id, none, none, none, **values)
        )

    def others(self) -> list[object]:
        return [self.storage, self.pages, self.host, self.table, self.worker, self.plan(2)]

    def calls(self) -> Iterator[Call]:
        s, w = self.storage, self.worker
        moves = {
            "swap_out": [[1, 2]],
            "copy": [[2, 5]],
            "zero": [6],
            "fresh": [4],
            "swap_in": [[3, 7]],
        }
        full = self.plan(2, **moves, clear_rows=[2])
        full = replace(full, replace=[np.array([[0, 1, 8]], np.int32)])
        for name in ("apply", "start"):
            yield f"worker.{name}", getattr(w, name), {"plan": full}
        for section in StepPlan.__dataclass_fields__:
            if section not in ("is_empty", "rows", "status", "num_computed_tokens", "num_tokens"):
                yield (
                    f"worker.apply.{section}",
                    _applier(w, full, section),
                    {section: getattr(full, section)},
                )
        yield "Worker", Worker, {"storage": s, "tables": self.table, "host": self.host}
        sizes = {"num_blocks": 4, "block_size": 4, "num_kv_heads": 2, "head_size": 8}
        yield "KVStorage", KVStorage, {**sizes, "dtype": torch.bfloat16, "num_layers": 2}
        over = {"pages": self.pages, "block_size": 4, "num_kv_heads": 1, "head_size": 8}
        yield "KVStorage.over", KVStorage.over, {**over, "layers": [0]}
        cache = torch.zeros(2, 5, 4, 2, 8)
        yield "from_tensors", KVStorage.from_tensors, {"kv_caches": [cache], "backend": None}
        yield "Pages.allocate", Pages.allocate, {"num_blocks": 4, "sizes": [[64, 64]]}
        yield "Pages.over", Pages.over, {"layers": [torch.zeros(5, 4)], "block_dim": 0}
        yield "on_host", self.pages.on_host, {"num_blocks": 3, "pin_memory": False}
        yield "pages.zero", self.pages.zero, {"ids": np.array([1, 2], np.int32)}
        yield "pages.layer", self.pages.layer, {"number": 0}
        yield "pages.fragment", self.pages.fragment, {"region": 0}
        yield "key_cache", s.key_cache, {"layer": 0}
        key, slots = torch.ones(3, 2, 8), torch.tensor([5, 6, -1])
        written = {"key": key, "value": key.clone(), "slot_mapping": slots}
        yield "write", s.write, {"layer": 0, **written}
        yield "gather", s.gather, {"layer": 0, "slot_mapping": slots, "dtype": None}
        yield "set_scales", s.set_scales, {"k_scale": torch.ones(2, 1), "v_scale": torch.ones(2, 1)}
        pairs = np.array([[1, 2], [3, 4]], np.int32)
        yield "SwapEngine", SwapEngine, {"device": self.pages, "host": self.host, "method": None}
        yield "swap_out", self.engine.swap_out, {"pairs": pairs}
        yield "swap_in", self.engine.swap_in, {"pairs": pairs}
        yield "before_write", self.engine.before_write, {"pages": np.array([1])}
        yield "engine.wait", self.engine.wait, {"timeout_s": 0.1}
        yield "num_fragments", self.engine.num_fragments, {"direction": "out", "pairs": pairs}

    def follow(self) -> object:
        out = [self.pages.memory.clone(), self.host.memory.clone(), self.worker.last_step_id]
        out += [self.table.get_numpy_array().copy(), self.table.num_blocks_per_row.copy()]
        self.worker.apply(self.plan(2, copy=[[1, 9]], swap_in=[[4, 10]]))
        out += [self.pages.memory.clone(), self.table.get_numpy_array().copy()]
        return plain(out)


def _applier(worker: Worker, plan: StepPlan, section: str) -> Callable:
    """Return a function that applies the plan with one section replaced. Errors of this call must
    name the section.
    """

    def apply(**sections: object) -> object:
        return worker.apply(replace(plan, **sections))

    apply.__signature__ = inspect.Signature(
        [inspect.Parameter(section, inspect.Parameter.KEYWORD_ONLY)]
    )
    return apply


class TransferScene(Scene):
    """Transfer plans, copies between caches, and conversions of received blocks."""

    def __init__(self) -> None:
        sizes = {"num_layers": 2, "total_num_kv_heads": 2, "head_size": 8, "block_size": 4}
        self.description = {"engine_id": "a", **sizes}
        self.cache = transfer.CacheDescription(**self.description)
        self.plan = transfer.plan_transfer(self.cache, self.cache, 0)
        self.source = {"l": torch.arange(2 * 5 * 4 * 2 * 8.0).view(2, 5, 4, 2, 8)}
        self.destination = {"l": torch.zeros(2, 5, 4, 2, 8)}
        self.received = torch.arange(5 * 2 * 4 * 8.0).view(5, 2, 4, 8).transpose(1, 2)

    def others(self) -> list[object]:
        return [self.cache, self.plan, self.source]

    def calls(self) -> Iterator[Call]:
        described = {**self.description, "tp_size": 2, "dtype": "bfloat16"}
        yield "CacheDescription", transfer.CacheDescription, described
        yield "from_dict", transfer.CacheDescription.from_dict, {"values": self.cache.to_dict()}
        planned = {"local": self.cache, "remote": self.cache, "local_rank": 0}
        yield "plan_transfer", transfer.plan_transfer, planned
        ids = np.array([[1], [2]])
        yield "plan.apply", self.plan.apply, {"local_pages": ids, "remote_pages": ids.copy()}
        copied = {"src_kv_caches": self.source, "dst_kv_caches": self.destination}
        copied |= {"src_block_ids": [1, 2], "dst_block_ids": [3, 4], "direction": "h2d"}
        yield "copy_kv_blocks", compat.copy_kv_blocks, copied
        received = {"caches": [self.received], "indices": [1, 2], "remote_block_size": 2}
        yield "permute_received_blocks", transfer.permute_received_blocks, received
        ratio = {"cache": self.received, "indices": [1, 2], "block_size_ratio": 2}
        yield "blksize_on_receive", compat.kv_postprocess_blksize_on_receive, ratio
        yield "RemoteEngine", compat.RemoteEngine, {"tp_size": 2, "stages": None}
        yield (
            "heads_of_rank",
            transfer.heads_of_rank,
            {
                "total_num_kv_heads": 4,
                "tp_size": 2,
                "tp_rank": 1,
            },
        )
        yield (
            "layers_of_rank",
            transfer.layers_of_rank,
            {
                "num_layers": 4,
                "pp_size": 2,
                "pp_rank": 1,
            },
        )
        topology = {"tp_rank": 0, "tp_size": 2, "block_size": 4, "total_num_kv_heads": 4}
        topology |= {"is_mla": False, "engine_id": "a"}
        known = inspect.signature(compat.KVTopology).parameters
        yield "KVTopology", compat.KVTopology, {k: v for k, v in topology.items() if k in known}

    def follow(self) -> object:
        return plain([self.source["l"], self.destination["l"], self.received])


SCENES: dict[str, Callable[[], Scene]] = {
    "manager": lambda: ManagerScene(windowed=False, host=False),
    "manager, host": lambda: ManagerScene(windowed=False, host=True),
    "manager, window": lambda: ManagerScene(windowed=True, host=True),
    "sequences": lambda: SequenceScene(window=None, caching=False),
    "sequences, cached": lambda: SequenceScene(window=None, caching=True),
    "sequences, window": lambda: SequenceScene(window=8, caching=True),
    "pool": PoolScene,
    "values": ValueScene,
    "tables": TableScene,
    "worker": WorkerScene,
    "transfer": TransferScene,
}
