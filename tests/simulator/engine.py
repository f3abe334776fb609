# SPDX-License-Identifier: Apache-2.0
"""An engine of the simulator: a cache with real bytes, its requests, and random operations on them.

The engine knows what a caller knows: its requests, their tokens and the answers of calls. It does not
predict blocks. If a call is rejected, nothing may have changed; otherwise, every byte that the next
steps read must be right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import numpy as np
import torch

from kvcache import (
    Admit,
    CacheOptions,
    CachePlan,
    ContextParallel,
    External,
    KVCacheManager,
    LayerSpec,
    Request,
    Status,
    StepPlan,
    StepReport,
    build,
    eviction_names,
    host_eviction_names,
    plan_cache,
)
from kvcache.allocator import RequestState, check_invariants
from kvcache.assembly import KVCache
from kvcache.events import AllBlocksCleared, BlockRemoved
from kvcache.kinds import AttentionKind, make_kind, register
from tests.simulator import walk
from tests.simulator.content import HEAD_SIZE, extended, mix, owner_of
from tests.simulator.exchange import Wire
from tests.simulator.laws import Laws
from tests.simulator.row import Row, Span, Wrong, differing
from tests.simulator.slot_bytes import Cells, SlotBytes
from tests.simulator.walked_calls import ADMIT_NAMES, SESSIONS, WalkedCalls

LONGEST, MOST_IN_FLIGHT = 40, 16


@register("test_sinks_and_stride")
class Strided(AttentionKind):
    """A user-defined attention kind. A token attends to the earlier tokens of its own stride and to
    all tokens of the previous stride.
    """

    def __init__(self, *, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens // self.stride - 1, 0) * self.stride


EXCHANGEABLE = ("full_attention", "sliding_window", "chunked_local")
# (kind, block size, options) of the layers. Equal layers form one group.
MIXES = [
    [("full_attention", 4, {})],
    [("sliding_window", 4, {"window": 6})],
    [("full_attention", 4, {}), ("sliding_window", 4, {"window": 6})],
    [
        ("full_attention", 4, {}),
        ("sliding_window", 2, {"window": 5}),
        ("chunked_local", 4, {"chunk_size": 10}),
    ],
    [("full_attention", 4, {}), ("recurrent", 4, {})],
    [("recurrent", 4, {}), ("sliding_window", 2, {"window": 9})],
    [("full_attention", 4, {}), ("recurrent", 2, {"num_speculative_blocks": 3})],
    [("full_attention", 4, {}), ("cross_attention", 4, {})],
    [("full_attention", 4, {}), ("circular_window", 4, {"window": 6, "buffer": 24})],
    [("chunked_local", 8, {"chunk_size": 12}), ("sliding_window", 8, {"window": 7})],
    [("full_attention", 8, {}), ("full_attention", 4, {}), ("recurrent", 4, {})],
    [("full_attention", 4, {}), ("full_attention", 4, {}), ("full_attention", 4, {})],
    [("test_sinks_and_stride", 4, {"stride": 6}), ("full_attention", 2, {})],
]

WITH_STATES = [mix for mix in MIXES if any(kind == "recurrent" for kind, _, _ in mix)]
EXCHANGED = [mix for mix in MIXES if {kind for kind, _, _ in mix} <= {*EXCHANGEABLE}]

# Values of options and parameters that need more than their type.
NAMES: dict[str, Callable[[random.Random], object]] = {
    "CacheOptions.eviction": lambda r: r.choice(eviction_names()),
    "CacheOptions.host_eviction": lambda r: r.choice(host_eviction_names()),
    "CacheOptions.eviction_options": lambda r: None,
    "CacheOptions.host_eviction_options": lambda r: None,
    "CacheOptions.host_write": lambda r: r.choice(["back", "through"]),
    "CacheOptions.hash_block_size": lambda r: r.choice([None, 2, 4]),
    "CacheOptions.retention_interval": lambda r: r.choice([None, 0, 4, 8, 12]),
    "CacheOptions.explain_misses": lambda r: r.choice([None, 1, 2]),
    "CacheOptions.watermark": lambda r: r.choice([0.0, 0.1]),
    "CacheOptions.max_num_reqs": lambda r: r.choice([2, 5, 8]),
    "CacheOptions.num_host_blocks": lambda r: r.choice([0, 6, 12, 40]),
    "CacheOptions.num_preallocate_tokens": lambda r: r.choice([0, 5, 64]),
    "CacheOptions.enable_caching": lambda r: r.random() < 0.9,
    "CacheOptions.min_gain_to_write": lambda r: r.choice([None, 0.0, 0.05]),
}


FREE_NAMES: dict[str, Callable[[random.Random], object]] = {
    "requests": lambda r: None,
    "retention": lambda r: [(0, r.randint(1, 30), r.choice([0, 35, 99]), r.choice([None, 1.0]))],
}


class Engine(SlotBytes, Laws, WalkedCalls):
    """An engine. The world calls `operate` with a generator per operation."""

    def __init__(
        self,
        name: str,
        rng: random.Random,
        layers: list[LayerSpec],
        shared: dict,
        wire: Wire,
        log: Callable,
    ) -> None:
        self.name, self.log, self.rng, self.wire = name, log, rng, wire
        self.version, self.generations = "", {}
        self.layers = layers
        options = (
            walk.options_of(rng, CacheOptions, NAMES, 0.4, {"enable_events": True, **shared})
            | shared
        )
        self.plan, self.ranks = self._build(rng, options)
        self.cache = self.ranks[0]
        self.scale = 1.0  # of fp8: what is stored depends on it
        if self.layers[0].dtype != "uint8":
            self.scale = rng.choice([0.5, 1.0])
            for storage in (each for rank in self.ranks for each in rank.storages):
                if storage.dtype is torch.float8_e4m3fn:
                    scales = torch.full((storage.num_layers, 1), self.scale)
                    storage.set_scales(scales, scales)
        self.manager: KVCacheManager = self.cache.manager
        specs = self.manager.groups
        self.kinds = [make_kind(each.kind, each.options) for each in specs]
        self.layer_numbers = [
            [[each.name for each in self.layers].index(name) for name in spec.layers]
            for spec in specs
        ]
        self.view_bytes()
        self.has_state = any(not kind.pages.has_slots for kind in self.kinds)
        options = self.manager.options
        self.hashing = (0, 0)
        if options.hash_algorithm.startswith("engine"):
            self.hashing = self.manager.cache.hash_block_size, options.num_hash_lookahead_tokens
        self.has_encoder = any(kind.pages.of_encoder for kind in self.kinds)
        spec_drafts = [k.num_speculative_blocks for k in self.kinds if not k.pages.has_slots]
        self.most_drafts = min(spec_drafts, default=4)
        self.takes_external = len(self.ranks) == 1 and not any(
            spec.cached and not spec.transferred and kind.pages.is_transferable
            for spec, kind in zip(specs, self.kinds)
        )
        self.rows: dict[int, Row] = {}
        self.idle: list[Row] = []
        self.kept: list[tuple[Row, list[Cells]]] = []
        self.may_keep: set[str] = set()  # names under which leases or canceled loads keep blocks
        self.held: list[list[int]] = []  # blocks that a connector holds one by one
        self.in_flight: list[int] = []  # steps that were not reported as completed
        # Plans of the last of these, which the worker has yet to carry out.
        self.pending: list[tuple[StepPlan, list[Span], list[int]]] = []
        self.most_pending = rng.choice([0, 0, 1, 2, 3])
        self.loras = [*([None] * rng.choice([9, 9, 1])), ("alpha", "/a"), ("beta", "/b", "1")]
        # With fences, what steps have read stays until they are reported as completed.
        self.reading: list[tuple[int, list[Cells], list[int], list[bytes]]] = []
        self.view: set[tuple] = set()  # what events say is cached
        self.tier = self.connector = self.mover = None
        if rng.random() < 0.6:
            self.tier = wire.tier_of(self)
        if len(self.ranks) == 1:
            self.connector, self.mover = wire.connector_of(self)
        self.sources = [each for each in (self.tier, self.connector) if each is not None]
        wire.engines[name] = self
        self.count = self.num_refused = self.num_checked = self.num_hits = self.num_loaded = 0
        # Operations that need not wait until the worker has carried out all plans.
        at_any_time = {
            **{self.step: 40, self.free: 6, self.report: 4, self.fork: 3, self.abort: 2},
            **{self.lose_plan: 1, self.change: 2, self.weights: 1, self.reads: 2},
            **{self.wrong_call: 2, self.append_tokens: 1, self.reject: 1, self.finish_receiving: 3},
        }
        operations = {
            **{**at_any_time, self.release_blocks: 1, self.hold_blocks: 1},
            **{self.lose_page: 2, self.poll: 6 if self.sources else 0},
        }
        if not self.has_state:
            operations |= {self.admit: 3, self.extend: 3, self.advance: 2}
        # The weights differ between seeds, so that each combination of operations is frequent in some.
        self.at_any_time = at_any_time
        self.operations = [*operations]
        self.weights_of = [weight * rng.choice([0, 0.3, 1, 1, 3]) for weight in operations.values()]
        self.weights_of[0], self.weights_of[1] = 60, max(self.weights_of[1], 3)

    # Setup -----------------------------------------------------------------------------------------

    @staticmethod
    def draw_layers(rng: random.Random) -> list[LayerSpec]:
        layers, dtype = [], rng.choice(["uint8", "uint8", "float8_e4m3fn"])
        for i, (kind, size, options) in enumerate(
            rng.choice(rng.choice([MIXES, WITH_STATES, EXCHANGED]))
        ):
            more: dict = {"state_bytes": 2 * HEAD_SIZE}
            if kind != "recurrent":
                more = {"num_kv_heads": 1, "head_size": HEAD_SIZE}
            if kind == "circular_window":
                more |= {"cached": False, "transferred": False}
            elif kind not in ("recurrent", "cross_attention"):
                more |= {"drafts": rng.random() < 0.25, "transferred": rng.random() < 0.9}
                more |= {"cached": i == 0 or rng.random() < 0.8}
            if kind == "cross_attention":
                more["transferred"] = False
            for j in range(rng.choice([1, 1, 2])):
                layers.append(
                    LayerSpec(f"{i}.{j}", kind, size, dtype=dtype, options=options, **more)
                )
        return layers

    def _build(self, rng: random.Random, options: dict) -> tuple[CachePlan, list[KVCache]]:
        self.most_batched = 16
        kernel_sizes, num_ranks = options.pop("kernel_sizes"), options.pop("num_ranks")
        cp_size = 1 if options.pop("is_tp") else num_ranks  # or ranks that hold the same KV head
        has_encoder = any(each.kind == "cross_attention" for each in self.layers)

        def plan_of(rank: int, num_bytes: int) -> CachePlan:
            return plan_cache(
                self.layers,
                num_bytes,
                max_model_len=LONGEST,
                max_num_batched_tokens=self.most_batched,
                max_encoder_tokens=6 if has_encoder else None,
                context_parallel=ContextParallel(dcp_world_size=cp_size, dcp_rank=rank % cp_size),
            )

        whole = plan_of(0, 1 << 20)
        is_exchanged = {each.kind for each in self.layers} <= {*EXCHANGEABLE}
        sizes = [1.0, 1.3, 1.6, 2.0, 3.0, 8.0][2 * is_exchanged :]
        pages = rng.choice(sizes) * whole.pages_per_request(LONGEST)
        num_bytes = (int(pages) + 2) * whole.page_bytes
        options |= {"max_num_reqs": options.get("max_num_reqs") or 4, "enable_events": True}
        options["fence_frees"] = rng.random() < 0.4
        options["num_host_blocks"] = rng.choice([0, 0, 4, 8, 16, 40])
        if options["num_host_blocks"]:
            options["host_write"] = rng.choice(["back", "through"])
        self.cp_size = cp_size
        if cp_size > 1:
            options["cp_kv_cache_interleave_size"] = rng.choice([1, 2])
        while True:  # an option that the others do not allow is named, and left out
            try:
                ranks = [
                    build(plan_of(rank, num_bytes), kernel_sizes=kernel_sizes, **options)
                    for rank in range(num_ranks)
                ]
                plan = ranks[0].plan
                groups = [(g.kind, g.block_size, dict(g.options)) for g in plan.groups]
                self.log(f"# {self.name}: {groups}, {plan.num_pages} pages, {num_ranks} ranks")
                self.log(f"{self.name} = build(plan, kernel_sizes={kernel_sizes}, **{options})")
                return plan, ranks
            except (ValueError, TypeError) as error:
                named = [each for each in options if each in str(error) and each != "max_num_reqs"]
                if not named and kernel_sizes is None:
                    raise
                if not named:
                    kernel_sizes = None
                for each in named:
                    del options[each]
                options["enable_events"] = True

    def owner(self, request: Request) -> int:
        lora = request.lora
        if lora and lora[0] in self.generations:  # weights that only this engine has
            lora = (*lora, self.name, self.generations[lora[0]])
        return owner_of(self.version, lora, request.cache_salt, self.scale)

    def new_row(self) -> Row:
        rng = self.rng
        free = [each for each in self.idle if each.request.num_tokens < LONGEST]
        if free and rng.random() < 0.5:
            row = rng.choice(free)
            self.idle.remove(row)
            row.contents, row.num_rejected, row.external = [], 0, (0, 0)
            row.last_start = row.start_before = 0
            row.goal = min(row.num_sampled + rng.randint(0, 10), LONGEST)
            return row
        self.count += 1
        # Prompts begin with a system prompt, or continue what an earlier request was about.
        differs = rng.choice([0, 8, 9, 12, 14, 17, 22, 24, 99, 99, 99])
        other = rng.choice([1000, 2000])
        tokens = [i + (other if i >= differs else 0) for i in range(LONGEST + 1)]
        units = [*tokens]
        num_prompt = rng.choice([rng.randint(1, 34), min(differs, 26) + rng.randint(1, 8)])
        options = {
            "lora": rng.choice(self.loras),
            "cache_salt": rng.choice([None] * 15 + ["salt"]),
            "session": rng.choice([None, "one"]),
            "read_cache": rng.random() < 0.95,
            "write_cache": rng.random() < 0.95,
        }
        if rng.random() < 0.1:
            at, n, image = rng.randint(0, 20), rng.randint(1, 8), rng.choice(["cat", "dog"])
            options["mm_items"] = [(image, at, n)]
            for p in range(at, min(at + n, LONGEST + 1)):
                units[p] = mix(owner_of(image, p - at), tokens[p]) >> 1
        if self.has_encoder and rng.random() < 0.5:
            options["num_encoder_tokens"] = rng.choice([3, 5])
        options["block_hashes"] = [] if self.hashing[0] else None
        request = Request(f"{self.name}.{self.count}", tokens[:num_prompt], **options)
        goal = num_prompt + rng.randint(0, 10)
        encoder = owner_of(self.name, self.count)
        row = Row(request, tokens, units, num_prompt, goal, encoder=encoder, hashing=self.hashing)
        row.add_hashes(num_prompt)
        return row

    # Calls -----------------------------------------------------------------------------------------

    def call(self, function: Callable, *args, **kwargs):
        """Make a call of the script. A rejected call must have changed nothing, and returns None."""
        text = [*map(walk.shown, args), *(f"{k}={walk.shown(v)}" for k, v in kwargs.items())]
        self.log(f"{self.name}.{getattr(function, '__qualname__', function)}({', '.join(text)})")
        before = self.snapshot()
        try:
            return function(*args, **kwargs)
        except (ValueError, TypeError) as error:
            self.num_refused += 1
            self.log(f"    {type(error).__name__}: {error}")
            if (after := self.snapshot()) != before:
                raise Wrong(
                    f"a rejected call has changed the engine: {differing(before, after)}"
                ) from error
            return None

    def snapshot(self) -> dict:
        """Return what a caller can see without changing anything."""
        manager, found = self.manager, {}
        for row, each in self.rows.items():
            request = each.request
            state = manager.state(request)
            found[each.name] = row, state, manager.num_computed_tokens(request), request.num_tokens
            if state is not RequestState.SWAPPED_OUT:
                found[each.name, "blocks"] = [
                    manager.block_ids(request, g).tolist() for g in range(len(self.kinds))
                ]
        for name, pool in (("pool", manager.pool), ("host", manager.host_pool)):
            if pool is not None:
                found[name] = pool.num_free, pool.num_cached, pool.num_total
        found["step"], found["epoch"] = manager.last_step_id, manager.cache.epoch
        found["kept"], found["pinned"] = manager.pool.num_kept, manager.pool.num_pinned
        return found

    def state(self, each: Row) -> RequestState:
        return self.manager.state(each.request)

    def computed(self, each: Row) -> int:
        return self.manager.num_computed_tokens(each.request)

    def on_device(self, by_step: bool | None = None) -> list[Row]:
        return [
            each
            for each in self.rows.values()
            if self.state(each) is RequestState.RUNNING and by_step in (None, each.by_step)
        ]

    # Operations ------------------------------------------------------------------------------------

    def operate(self, rng: random.Random) -> None:
        self.rng = rng
        operation = rng.choices(self.operations, self.weights_of)[0]
        if operation not in self.at_any_time:
            self.carry_out_all()
        operation()
        self.follow_events()
        if rng.random() < 0.15:
            check_invariants(self.manager)
            known = [*self.rows.values(), *self.idle]
            if known:
                each = rng.choice(known)
                self.check_hit(each.request)
                if not self.pending:
                    self.check_cached(each)

    def check_all(self) -> None:
        check_invariants(self.manager)
        for each in [*self.rows.values(), *self.idle] if not self.pending else []:
            self.check_cached(each)

    def step(self) -> None:
        rng, pool = self.rng, self.manager.pool
        while 2 * pool.num_free < pool.num_total and rng.random() < 0.5:
            rng.choice([self.free, self.report, self.release_blocks, self.withdraw])()
        able = [each for each in self.rows.values() if each.by_step and not each.is_receiving]
        able = [each for each in able if rng.random() < 0.8]
        rng.shuffle(able)
        rows, counts, ids, rejected, ahead, leaving = [], [], [], [], [], []
        left = self.most_batched
        for each in able:
            is_out = self.state(each) is RequestState.SWAPPED_OUT
            if self.manager.host_pool is not None and not is_out and rng.random() < 0.2:
                self.decide(each)
                leaving.append(each)
                continue
            tells = rng.random() < 0.8 or self.has_state
            tells |= each.num_valid < each.last_start  # at most two draft steps
            start = self.computed(each) - (each.num_rejected if tells else 0)
            missing = min(each.num_sampled, LONGEST) - start
            if missing <= 0 or left <= 0:
                continue
            count = rng.randint(1, min(missing, left))
            if rng.random() < (0.7 if self.has_state else 0.3):
                count = min(self.manager.checkpoint_tokens(each.request, count), count) or count
            if count == missing and rng.random() < 0.5:
                count = min(count + rng.randint(0, self.most_drafts), LONGEST - start, left)
            left -= count
            # Known tokens count as accepted, so rejections are told before later tokens are.
            is_told = (tells or not each.num_rejected) and (rng.random() < 0.7 or self.has_state)
            rows.append(each)
            counts.append(count)
            ids.append(each.late() if is_told else [])
            rejected.append(each.num_rejected if tells else 0)
            ahead.append(rng.choice([0, 0, 0, 2]) if LONGEST - start - count > 2 else 0)
        most_new = rng.choice([0, 1, 1, 2, 3]) if left > 0 else 0
        if rng.random() < 0.9:
            most_new = min(most_new, self.manager.options.max_num_reqs - len(self.rows))
        version = self.version, dict(self.generations)
        new = [self.new_admit(left) for _ in range(most_new)]
        if version != (self.version, self.generations):  # hits that were looked up may be gone
            new = [self.without_external(*each) for each in new]
        alone = [each for each in new if each[0].source is not None][:1]
        if alone and rng.random() < 0.6:  # the other rows may take what the load needs
            for each, _ in new:
                if each is not alone[0][0]:
                    self.put_back(each)
            new, rows, counts, ids, rejected, ahead, leaving = alone, [], [], [], [], [], []
        if not rows and not leaving and not new and rng.random() < 0.8:
            return
        before = {each: (self.computed(each), each.request.num_tokens) for each in rows}
        held = {each: self.blocks(each) for each in rows if any(map(len, self.blocks(each)))}
        is_alone = len(new) == 1 and not rows and not leaving
        expected = self.call(self.manager.would_fit, new[0][1]) if is_alone else None
        plan = self.call(
            self.manager.step,
            [each.row for each in rows],
            counts,
            new=[ask for _, ask in new],
            token_ids=[token for each in ids for token in each],
            num_token_ids=[len(each) for each in ids],
            num_rejected_tokens=rejected,
            num_lookahead_tokens=[*ahead, *(0 for _ in new)][: len(rows)] if rows else 0,
            swap_out=[each.row for each in leaving],
        )
        if plan is None:
            for each, _ in new:
                self.put_back(each)
            for each in rows:  # a row whose steps are all rejected ends
                if rng.random() < 0.2:
                    self.end(each)
            return
        for each, status in zip(rows, plan.answers.rows.status):
            after = self.computed(each), each.request.num_tokens
            if status != Status.SERVED and after != before[each]:
                raise Wrong(f"{each.name} waits, and changes from {before[each]} to {after}")
        if is_alone and expected is not None:
            self.check_fit(new[0][1], expected, int(plan.answers.new.status[0]))
        self.planned(plan, rows, rejected, leaving, [each for each, _ in new])
        self.check_plan(plan, held)
        for status in plan.status:  # make room
            if status != Status.SERVED and rng.random() < 0.8:
                self.free()
                self.release_blocks()
                if rng.random() < 0.5:
                    self.finish_receiving()
        done = [
            row for row in rows if self.rows.get(row.row) is row and self.computed(row) >= row.goal
        ]
        self.free(done)

    def new_admit(self, left: int) -> tuple[Row, Admit]:
        rng, each = self.rng, self.new_row()
        request = each.request
        options = {
            name: walk.drawn(rng, "Admit", name, kind, ADMIT_NAMES)
            for name, kind in Admit.__annotations__.items()
            if name not in ("request", "num_tokens", "external") and rng.random() < 0.2
        }
        count = rng.choice([left, left, rng.randint(1, left)])
        each.external, each.is_receiving, each.source = (0, 0), False, None
        if self.sources and rng.random() < 0.7:
            n = self.match(each)
            request = each.request  # an offer may have replaced it
            if n:
                first = self.manager.cache.cached_tokens(request).with_host
                each.external, each.is_receiving = (first, first + n), True
                return each, Admit(request, 0, External(n, delayed=True))
        cached = self.manager.cache.cached_tokens(request, read_cache=options.get("read_cache"))
        is_near = cached.num_host_blocks > options.get("max_host_blocks", 1 << 30)
        hit = cached.on_device if is_near else cached.with_host
        most = request.num_tokens - 1 - hit
        reads = request.read_cache if options.get("read_cache") is None else options["read_cache"]
        if (
            self.takes_external
            and most > 0
            and reads
            and not request.num_encoder_tokens
            and rng.random() < 0.25
        ):
            n, each.is_receiving = rng.randint(1, most), rng.random() < 0.6
            each.external = hit, hit + n
            return each, Admit(
                request,
                0 if each.is_receiving else count,
                External(n, each.is_receiving),
                **options,
            )
        return each, Admit(request, count, **options)

    def without_external(self, each: Row, ask: Admit) -> tuple[Row, Admit]:
        """Return a request without external tokens that no source has matched."""
        if each.source is not None or each.external == (0, 0):
            return each, ask
        each.external, each.is_receiving = (0, 0), False
        return each, Admit(each.request, self.rng.randint(1, 4))

    def match(self, each: Row) -> int:
        """Return how many tokens a source has for a new request."""
        self.carry_out_all()
        source = self.rng.choice([self.tier, *self.sources] if self.tier else self.sources)
        if self.connector is not None and self.foreign_offers() and self.rng.random() < 0.7:
            source = self.sources[-1]
        if source is self.tier:
            n = source.match(each.request)
            if n is None and self.rng.random() < 0.8:  # the store answers soon
                self.wire.answer_all()
                n = source.match(each.request)
            n = n or 0
        else:
            offer = self.offer_for(each)
            try:
                n = self.connector.match(each.request, offer)
            except ValueError:
                n = 0
        if n:
            each.source = source
            if not each.request.read_cache:
                raise Wrong(f"{n} tokens are matched for {each.name}, which reads no cache")
            if self.rng.random() < 0.2:
                self.weights()  # between the match and the step
        return n

    def foreign_offers(self) -> list[tuple]:
        return [each for each in self.wire.offers if each[0] is not self]

    def offer_for(self, each: Row) -> dict | None:
        """Return an offer of any engine, for a request with its tokens."""
        offers = self.foreign_offers()
        if not offers:
            return None
        _, of, offer = self.rng.choice(offers)
        other = of.request
        if len(other.token_ids) >= LONGEST - 1:
            return None
        n = min(other.num_tokens + 1, LONGEST)
        each.tokens, each.units = [*of.tokens], [*of.units]
        each.num_sampled = n
        each.request = Request(
            each.request.request_id + "*", of.tokens[:n], lora=other.lora, cache_salt=other.cache_salt,
            mm_items=other.mm_items, block_hashes=[] if self.hashing[0] else None,
            read_cache=each.request.read_cache,
        )  # fmt: skip
        each.add_hashes(n)
        return json.loads(json.dumps(offer))

    def poll(self) -> None:
        """Take what sources have loaded, and let the store save what was computed."""
        source = self.rng.choice(self.sources)
        if source is self.tier and self.rng.random() < 0.6:
            self.wire.answer_all()
        if source is not self.tier and self.rng.random() < 0.6:
            for name in [*self.mover.loads] * 2:
                if name in self.mover.loads:
                    self.mover.work(name, self.rng)
        self.take_from(source)
        if source is self.tier and self.manager.last_step_id >= 0:
            report = StepReport(self.manager.last_step_id, completed=True)
            self.carry_out_all()
            if self.in_flight:
                self.in_flight.clear()
                self.reading.clear()
                self.returned(self.call(self.manager.report, report))
            source.save(report)
            if self.rng.random() < 0.5:  # from now on, hits come from the store
                self.wire.answer_all()
                self.call(self.manager.cache.reset)

    def take_from(self, source: object) -> None:
        for arrived in source.poll():
            if self.takes(arrived):
                continue
            found = [each for each in self.rows.values() if each.request is arrived.request]
            if not found:
                raise Wrong(f"{arrived.request} arrives, and is not running")
            each = found[0]
            each.is_receiving, each.external, each.source = False, (0, 0), None
            if arrived.num_computed_tokens is None:  # its blocks are in quarantine
                del self.rows[each.row]
                each.row = -1
                self.put_back(each)
                continue
            at = arrived.num_computed_tokens
            if at != self.computed(each):
                raise Wrong(
                    f"{each.name} continues from {at}, and has computed {self.computed(each)}"
                )
            self.num_loaded += arrived.num_loaded_tokens
            self.log(
                f"{self.name}: {each.name} has loaded {arrived.num_loaded_tokens} tokens: {arrived.error}"
            )
            each.begins = (each.begins[0], at) if arrived.num_loaded_tokens else (at, at)
            self.goes_on_from(each, at)

    def takes(self, arrived: object) -> bool:
        """Return whether a load belongs to no request of a client."""
        return False

    def begin(self, each: Row) -> None:
        if self.rng.random() < 0.1:
            self.weights()  # between the step and the load
        self.may_keep.add(each.name)
        try:
            each.source.begin(each.request)
        except ValueError as error:
            self.log(f"    begin: {error}")
            self.leave(each)
            return
        if each.begins[1] != each.external[1]:
            raise Wrong(
                f"a load for {each.name} begins, although its hit has changed since the match"
            )

    def leave(self, each: Row) -> None:
        """End a request that receives tokens from a source."""
        self.log(f"{self.name}: cancel {each.name}")
        del self.rows[each.row]
        each.source.cancel(each.request)  # its blocks may be kept under its name

    def put_back(self, each: Row) -> None:
        if each.source is not None and each.row < 0:
            each.source.cancel(each.request)
        each.source = None
        each.is_receiving, each.external, each.row = False, (0, 0), -1
        self.idle.append(each)
        del self.idle[:-12]

    def planned(
        self,
        plan: StepPlan,
        rows: list[Row],
        rejected: list[int],
        leaving: list[Row],
        new: list[Row],
    ) -> None:
        """Note the answers of a step. The worker carries out its plan now or later."""
        self.in_flight.append(plan.step_id)
        answers, jobs = plan.answers, []
        for each, back, status, start in zip(
            rows, rejected, answers.rows.status, answers.rows.num_computed_tokens
        ):
            if status == Status.SERVED:
                if back:
                    each.num_rejected = 0
                del each.contents[int(start) :]
                jobs.append((each, int(start)))
        for each, status in zip(leaving, answers.swap_out.status):
            if (self.state(each) is RequestState.SWAPPED_OUT) != (status == Status.SERVED):
                raise Wrong(f"{each.name} has status {status}, and its state is {self.state(each)}")
        for i, each in enumerate(new):
            row, status, start = (int(x[i]) for x in answers.new[:3])
            if status != Status.SERVED:
                self.put_back(each)
                continue
            each.row, each.by_step, each.admitted_in = row, True, plan.step_id
            self.rows[row] = each
            self.admitted(each, start)
            if not each.is_receiving:
                jobs.append((each, start))
        if self.rng.random() < 0.5:
            self.check_written(jobs)
        copied = plan.swap_out[:, 0].tolist()
        if copied:  # rows may write to their blocks: an evicted block is copied before that
            tables = [ids for each in self.rows.values() for ids in self.blocks(each)]
            held = {page for ids in tables for page in ids.tolist()}
            copied = [page for page in copied if page not in held]
        self.pending.append((plan, self.spans_of(jobs), copied))
        loading = [each for each in new if each.row >= 0 and each.source is not None]
        while len(self.pending) > (0 if loading else self.most_pending):
            self.carry_out()
        if len(self.in_flight) > MOST_IN_FLIGHT:
            self.report()
        for each in loading:
            self.begin(each)

    def carry_out(self) -> None:
        """Carry out the oldest plan that the worker has not carried out."""
        plan, spans, copied = self.pending.pop(0)
        for rank in self.ranks:
            rank.worker.apply(plan)
        copies = self.bytes_of(copied)
        cells = self.compute(spans)
        if self.manager.options.fence_frees:
            pages = [kind.pages for kind in self.kinds]
            kept = [each for each in cells if pages[each.group].is_transferable]
            kept = [each for each in kept if pages[each.group].has_slots]
            self.reading.append((plan.step_id, kept, copied, copies))

    def carry_out_before_load(self, each: Row) -> None:
        """Carry out the plan that has admitted a row, and all others if there are no fences."""
        fences = self.manager.options.fence_frees
        while self.pending and (not fences or self.pending[0][0].step_id <= each.admitted_in):
            self.carry_out()

    def carry_out_all(self) -> None:
        while self.pending:
            self.carry_out()

    def admitted(self, each: Row, start: int) -> None:
        first, stop = each.external
        if stop > first and start != stop and each.source is None:
            raise Wrong(
                f"{each.name} continues from {start}: expected {stop}, the end of its external tokens"
            )
        hit = first if stop > first else start
        self.num_hits += hit > 0
        each.begins, each.num_rejected = (hit, start), 0
        each.contents = extended([], each.units[:start], self.owner(each.request))

    def spans_of(self, jobs: list[tuple[Row, int]]) -> list[Span]:
        """Return what a step computes for rows, from the given tokens on."""
        spans = []
        for each, start in jobs:
            end = sure = self.computed(each)
            if self.has_state and self.most_drafts:
                sure = min(end, max(start + 1, each.request.num_tokens))
            (first, stop), puts = each.external, []
            if stop > first:
                puts = self.received(each, first, stop, stop, sure)
                each.external = (0, 0)
            accepted, known = end, min(start, each.num_valid)
            if end > each.num_sampled:
                accepted = self.rng.randint(min(each.num_sampled, end), end)
            if known < start:  # computed from rejected drafts
                accepted = min(accepted, known)
            units = each.units[start : max(accepted, start)]
            right = (
                extended(each.contents[:start], units, self.owner(each.request)) if units else []
            )
            each.contents += [*right, *[None] * (end - start - len(right))]
            each.num_rejected = end - min(accepted, end)
            if each.num_sampled <= accepted < LONGEST:
                each.num_sampled = accepted + 1
            if known <= each.last_start and known < start:
                known = 0  # the manager keeps what two draft steps may read, and no more
            if known == start and self.rng.random() < 0.3:
                self.check_held(each, min(start, each.last_start, each.start_before))
                self.check_published(each, start)
            each.start_before, each.last_start = each.last_start, start
            spans.append(
                Span(
                    f"{each.name}, which computes {start} to {end},", each.row, start, end, sure,
                    each.contents[:end], known, each.begins, self.encoder_of(each), puts,
                )
            )  # fmt: skip
        return spans

    def decide(self, each: Row) -> None:
        """Tell the manager which drafts were rejected, and the tokens that it does not know."""
        if each.num_rejected:
            self.call(self.manager.reject_tokens, each.request, each.num_rejected)
            del each.contents[self.computed(each) :]
            each.num_rejected = 0
        if late := each.late():
            self.call(each.request.append_tokens, late)

    def reject(self) -> None:
        if rows := self.on_device():
            self.decide(self.rng.choice(rows))

    def append_tokens(self) -> None:
        rows = [each for each in self.rows.values() if each.late() and not each.num_rejected]
        if rows and not self.has_state:
            each = self.rng.choice(rows)
            late = each.late()[: self.rng.randint(1, 3)]
            self.call(each.request.append_tokens, late)

    def check_keep(self, each: Row) -> None:
        if each.name not in self.may_keep and all(each.name != of.name for of, _ in self.kept):
            raise Wrong(f"{each.name} cannot be freed with keep_blocks")

    def end(self, each: Row, keep: bool = False, **options) -> None:
        del self.rows[each.row]
        pages = self.pages_of(each) if keep else []
        num_refused = self.num_refused
        self.call(self.manager.free, each.request, keep_blocks=keep, **options)
        if self.num_refused > num_refused:  # blocks of an earlier row of this name are kept
            self.check_keep(each)
            keep = False
            self.call(self.manager.free, each.request)
        if keep:
            self.kept.append((each, pages))
        else:
            self.put_back(each)
        each.row, each.is_receiving = -1, False

    def free(self, rows: list[Row] | None = None) -> None:
        """End one of the rows."""
        if rows is None:
            rows = [*self.rows.values()]
        if not rows:
            return
        rng, each = self.rng, self.rng.choice(rows)
        if each.source is not None:
            self.leave(each)
            return
        is_out = self.state(each) is RequestState.SWAPPED_OUT
        if each.is_receiving:
            self.carry_out_before_load(each)
        elif self.connector is not None:
            self.carry_out_all()
        keep = not is_out and (each.is_receiving or rng.random() < 0.2)
        offers = not is_out and not each.is_receiving and self.connector is not None
        if offers and rng.random() < 0.6:
            self.publish(each)
            return
        if each.is_receiving:
            self.garble_received(each)
        elif not is_out:
            self.decide(each)
        _, options = walk.arguments_of(rng, self.manager.free, FREE_NAMES)
        options.pop("keep_blocks", None)
        self.end(each, keep, **options)

    def publish(self, each: Row) -> None:
        """End a request, and offer its blocks to the other engines."""
        self.decide(each)
        del self.rows[each.row]
        self.log(f"{self.name}: publish {each.name}")
        self.may_keep.add(each.name)
        offer = self.connector.publish(each.request, lease_s=self.rng.choice([0.5, 5.0, 50.0]))
        each.row = -1
        if offer is not None:
            self.wire.offers.append((self, each, offer))
            del self.wire.offers[:-6]

    def withdraw(self) -> None:
        """End a lease early."""
        if own := [row for of, row, _ in self.wire.offers if of is self]:
            each = self.rng.choice(own)
            self.log(f"{self.name}: withdraw {each.name}")
            self.connector.withdraw(each.request)
            self.take_from(self.sources[-1])

    def pages_of(self, each: Row) -> list[Cells]:
        """Return the transferred tokens of a row with their slots."""
        found = []
        if len(self.ranks) > 1:
            return found
        for g, (spec, kind) in enumerate(zip(self.manager.groups, self.kinds)):
            if not (
                spec.transferred
                and spec.cached
                and kind.pages.has_slots
                and kind.pages.is_transferable
            ):
                continue
            stop = min(each.num_valid, self.computed(each))
            first = max(kind.first_needed_token(stop), 0)
            if each.is_receiving or stop <= first or self.manager.cache.is_stale(each.request):
                continue
            size, places = self.manager.block_sizes[g], np.arange(first, stop)
            blocks = self.manager.block_ids(each.request, g)
            slots = blocks[places // size] * np.int64(size) + places % size
            found.append(Cells(g, each.contents[first:stop], [slots]))
        return found

    def hold_blocks(self) -> None:
        """Hold some blocks of a row, or release held blocks."""
        if self.held and self.rng.random() < 0.5:
            ids = self.held.pop(self.rng.randrange(len(self.held)))
            self.call(self.manager.release_blocks, ids)
            return
        rows = self.on_device()
        if not rows or len(self.held) > 2:
            return
        request = self.rng.choice(rows).request
        tables = [self.manager.block_ids(request, g).tolist() for g in range(len(self.kinds))]
        ids = [block for table in tables for block in table if block and self.rng.random() < 0.3]
        self.call(self.manager.hold_blocks, ids)
        self.held.append(ids)

    def release_blocks(self) -> None:
        if not self.kept:
            return
        self.carry_out_all()
        each, pages = self.kept.pop(self.rng.randrange(len(self.kept)))
        for cells in pages:
            self.check_slots(cells, None, f"in kept blocks of {each.name}")
        self.call(self.manager.release_blocks, each.request)
        self.put_back(each)

    def finish_receiving(self) -> None:
        rows = [each for each in self.rows.values() if each.is_receiving and each.source is None]
        if not rows:
            return
        rng, each = self.rng, self.rng.choice(rows)
        self.carry_out_before_load(each)
        first, stop = each.external
        count = rng.choice([stop - first, rng.randint(0, stop - first)])
        self.receive(each, first, stop, first + count, stop)
        before = [self.manager.block_ids(each.request, g).tolist() for g in range(len(self.kinds))]
        found = self.call(self.manager.finish_receiving, each.request, count)
        if found is None:
            raise Wrong(f"{each.name} cannot finish to receive")
        each.external, each.is_receiving = (0, 0), False
        same = all(
            self.manager.block_ids(each.request, g).tolist()
            == blocks[: len(self.manager.block_ids(each.request, g))]
            for g, blocks in enumerate(before)
        )
        each.begins = (each.begins[0] if same else found, found)
        self.goes_on_from(each, found)

    def fork(self) -> None:
        rows = self.on_device(by_step=True)
        if not rows:
            return
        rng, parent = self.rng, self.rng.choice(rows)
        self.decide(parent)
        shared = self.computed(parent)
        if not 0 < shared < LONGEST or parent.num_valid < shared:
            return
        self.count += 1
        other = 1000 * rng.randint(0, 2)
        tokens, units = (
            [*each[:shared], *(x + other for x in each[shared:])]
            for each in (parent.tokens, parent.units)
        )
        request = Request(
            f"{self.name}.{self.count}", tokens[: shared + 1], lora=parent.request.lora,
            cache_salt=parent.request.cache_salt, mm_items=parent.request.mm_items,
            num_encoder_tokens=parent.request.num_encoder_tokens,
            block_hashes=[] if self.hashing[0] else None,
        )  # fmt: skip
        child = Row(
            request,
            tokens,
            units,
            shared + 1,
            shared + rng.randint(1, 10),
            begins=parent.begins,
            encoder=parent.encoder,
            hashing=self.hashing,
        )
        child.add_hashes(shared + 1)
        row = self.call(self.manager.fork, parent.request, request)
        if row is None or row < 0:
            return
        child.row = row
        child.contents = parent.contents[:shared]
        child.last_start = child.start_before = shared
        self.rows[row] = child
        if rng.random() < 0.2:
            self.abort()

    def report(self) -> None:
        done = len(self.in_flight) - len(self.pending)
        if done > 0:
            n = self.rng.randint(1, done)
            step = self.in_flight[n - 1]
            del self.in_flight[:n]
            for _, cells, copied, copies in [each for each in self.reading if each[0] <= step]:
                for each in cells:
                    self.check_slots(each, each.read, "before its step is reported")
                if self.bytes_of(copied) != copies:
                    raise Wrong(f"one of {copied} is overwritten before it is copied to the host")
            self.reading = [each for each in self.reading if each[0] > step]
            self.returned(self.call(self.manager.report, StepReport(step, completed=True)))

    def returned(self, affected: dict[str, int]) -> None:
        """Note the positions from which rows continue after a fault."""
        for each in self.rows.values():
            if each.name in affected:
                at = affected[each.name]
                if self.computed(each) != at:
                    raise Wrong(
                        f"{each.name} continues from {at}, and has computed {self.computed(each)}"
                    )
                self.goes_on_from(each, at)
                each.num_rejected, each.begins = 0, (at, at)

    def goes_on_from(self, each: Row, at: int) -> None:
        """Note that a row continues from token `at`, with its own KV or with what a new hit provides."""
        if self.manager.cache.is_stale(each.request):
            del each.contents[at:]
        else:
            each.contents = extended([], each.units[:at], self.owner(each.request))

    def abort(self) -> None:
        """Abort a step, and all later ones."""
        if self.in_flight:
            n = self.rng.randrange(len(self.in_flight))
            step = self.in_flight[n]
            del self.in_flight[n:]
            self.pending = [each for each in self.pending if each[0].step_id < step]
            self.reading = [each for each in self.reading if each[0] < step]
            affected = self.call(self.manager.abort, step)
            self.returned(affected)
            self.after_abort()

    def after_abort(self) -> None:
        self.kept = [(each, []) for each, _ in self.kept]  # their content may have been aborted
        for each in [*self.rows.values()]:
            if each.source is not None:
                self.leave(each)
            elif each.is_receiving and self.state(each) is not RequestState.RECEIVING:
                each.is_receiving, each.external = False, (0, 0)

    def lose_plan(self) -> None:
        """Plan a step that no worker carries out, and abort it."""
        new = [self.new_admit(4)]
        rows = [
            each
            for each in self.on_device(by_step=True)
            if not each.num_rejected and each.num_sampled > self.computed(each)
        ]
        plan = self.call(
            self.manager.step,
            [each.row for each in rows],
            [1] * len(rows),
            new=[ask for _, ask in new],
            token_ids=[token for each in rows for token in each.late()],
            num_token_ids=[len(each.late()) for each in rows],
        )
        if plan is None:
            self.put_back(new[0][0])
            return
        (each, _), row = new[0], int(plan.answers.new.rows[0])
        if self.rng.random() < 0.5:
            self.report()  # of earlier steps
        affected = self.call(self.manager.abort, plan.step_id)
        if each.source is not None:
            each.source.cancel(each.request)
            each.source, each.is_receiving, row = None, False, -1
        if row >= 0:
            each.row, each.by_step = row, True
            self.rows[row] = each
            self.admitted_and_lost(each)
        else:
            self.put_back(each)
        self.returned(affected)

    def admitted_and_lost(self, each: Row) -> None:
        each.begins = (0, 0)
        each.contents = extended([], each.units[: self.computed(each)], self.owner(each.request))
        if self.state(each) is not RequestState.RECEIVING:
            each.is_receiving, each.external = False, (0, 0)
        self.end(each, keep=False) if not each.is_receiving else self.cancel(each)

    def cancel(self, each: Row) -> None:
        self.carry_out_before_load(each)
        self.garble_received(each)
        self.end(each, keep=True)

    def lose_page(self) -> None:
        """Lose the content of a page, and report it. Until then, only the own store may get it."""
        while self.kept:
            self.release_blocks()
        tables = [table.tolist() for each in self.on_device() for table in self.blocks(each)]
        leased = [offer["blocks"] for of, _, offer in self.wire.offers if of is self]
        if leased and self.rng.random() < 0.5:
            tables = [ids for offered in leased for ids in offered]
        blocks = [block for table in tables for block in table if block]
        if not blocks:
            return
        page = self.rng.choice(blocks)
        self.reading.clear()
        for rank in self.ranks:
            for layer in range(rank.pages.num_layers):
                rank.pages.layer(layer)[page] = 255
        if self.tier is not None and self.wire.num_tiers == 1 and not self.in_flight:
            if self.manager.last_step_id >= 0:
                self.tier.save(StepReport(self.manager.last_step_id, completed=True))
            if self.rng.random() < 0.5:
                self.wire.answer_all()
        if self.tier is None and self.in_flight and self.rng.random() < 0.5:
            self.carry_out_all()
            report = StepReport(self.in_flight[-1], True, failed_pages=[page])
            self.in_flight.clear()
            self.reading.clear()
            self.returned(self.call(self.manager.report, report))
        else:
            self.returned(self.call((self.tier or self.manager).invalidate, [page]))
        if self.connector is not None:
            self.take_from(self.connector)  # ends all leases

    def change(self) -> None:
        """Change the cache without computing anything."""
        cache, rng = self.manager.cache, self.rng
        what = rng.randrange(8)
        if what == 0:
            self.call(cache.reset, rng.choice([None, *range(len(self.kinds))]))
        elif what == 1:
            self.call(
                cache.evict,
                [rng.randint(1, self.manager.pool.num_total) for _ in range(rng.randint(0, 4))],
            )
        elif what in (2, 3) and self.idle:
            self.call(cache.pin, rng.choice(SESSIONS), rng.choice(self.idle).request)
        elif what == 4:
            self.call(cache.unpin, rng.choice(SESSIONS))
        elif what == 5 and self.rows:
            self.call(
                cache.access, rng.choice([*self.rows.values()]).request, rng.choice([0.0, 1.0, 5.0])
            )
        elif what == 6:
            self.call(cache.set_now, rng.choice([0.0, 1.0, 1e3]))
        elif what == 7:
            self.call(cache.clear_stats)

    def weights(self) -> None:
        """Change the weights of the model or of an adapter."""
        rng, cache = self.rng, self.manager.cache
        if rng.random() < 0.4:  # engines often get the same weights, at about the same time
            name = rng.choice([None, "a", "b", *(e.version for e in self.wire.engines.values())])
            for each in self.wire.engines.values():
                if each is self or (name and rng.random() < 0.7):
                    each.call(each.manager.cache.start_epoch, name)
                    each.version = each.manager.cache.model_version
        else:
            name = rng.choice(["alpha", "beta"])
            self.call(cache.forget_adapter, name)
            if not self.hashing[0]:  # an engine that computes hashes must change them instead
                self.generations[name] = self.generations.get(name, 0) + 1

    # Rows without plans ----------------------------------------------------------------------------

    def admit(self) -> None:
        rng, each = self.rng, self.new_row()
        each.external, each.is_receiving = (0, 0), False
        request = each.request
        whole, given = rng.random() < 0.5, rng.randrange(3)
        hit = self.manager.cache.find_prefix(request, whole_blocks=whole and given > 0)
        start = 0 if given == 1 else hit.num_tokens
        most = max(min(request.num_tokens - start, self.most_batched), 1)
        nothing = [] if len(self.kinds) == 1 else [[] for _ in self.kinds]
        computed = (None, nothing, hit)[given]  # None: what the manager finds itself
        found = self.call(self.manager.admit, Admit(request, rng.randint(1, most)), computed)
        if found is None:
            self.put_back(each)
            return
        each.row, each.by_step = self.manager.row(request), False
        self.rows[each.row] = each
        self.admitted(each, start)
        self.copy_hits()
        self.follow_tables(each)
        self.compute(self.spans_of([(each, start)]))

    def copy_hits(self) -> None:
        pairs = self.manager.take_copies()
        for rank in self.ranks if len(pairs) else ():
            rank.pages.copy(pairs)

    def follow_tables(self, each: Row) -> None:
        blocks = [self.manager.block_ids(each.request, g) for g in range(len(self.kinds))]
        for rank in self.ranks:
            rank.tables.add_row(blocks, each.row)
            rank.tables.commit_updates()

    def extend(self) -> None:
        rows = [
            each
            for each in self.on_device(by_step=False)
            if each.num_sampled > self.computed(each) - each.num_rejected
        ]
        if not rows:
            return
        rng, each = self.rng, self.rng.choice(rows)
        self.decide(each)
        start = self.computed(each)
        most = min(each.num_sampled, LONGEST) - start
        if most <= 0:
            return
        found = self.call(
            self.manager.extend,
            each.request,
            rng.randint(1, min(most, self.most_batched)),
            rng.choice([0, 0, 2]),
        )
        if found is not None:
            self.follow_tables(each)
            self.compute(self.spans_of([(each, start)]))

    def advance(self) -> None:
        rng = self.rng
        rows = [each for each in self.on_device(by_step=False) if rng.random() < 0.6]
        for each in rows:
            self.decide(each)
        rows = [each for each in rows if min(each.num_sampled, LONGEST) > self.computed(each)]
        starts = [self.computed(each) for each in rows]
        stops = [
            start + rng.randint(1, min(each.num_sampled, LONGEST) - start)
            for each, start in zip(rows, starts)
        ]
        if not rows or sum(stops) - sum(starts) > self.most_batched:
            return
        found = self.call(self.manager.advance, [each.row for each in rows], starts, stops)
        if found is None:
            return
        jobs = []
        for each, start, new in zip(rows, starts, found):
            if new is not None:
                self.follow_tables(each)
                jobs.append((each, start))
        self.compute(self.spans_of(jobs))

    # Events ----------------------------------------------------------------------------------------

    def take_events(self) -> list:
        return (self.tier or self.manager.cache).drain_events()

    def follow_events(self) -> None:
        """Events list exactly the blocks that can be found."""
        for event in self.take_events():
            if isinstance(event, AllBlocksCleared):
                self.view = {each for each in self.view if each[0] != event.medium}
                continue
            named = {(event.medium, event.group, h.tobytes()) for h in event.block_hashes}
            if isinstance(event, BlockRemoved):
                if not named <= self.view:
                    raise Wrong("an event removes a block that no event has stored")
                self.view -= named
            else:
                if named & self.view:
                    raise Wrong("an event stores a block twice")
                self.view |= named
        for medium, pool in (("gpu", self.manager.pool), ("cpu", self.manager.host_pool)):
            if sum(each[0] == medium for each in self.view) > (pool.num_cached if pool else 0):
                raise Wrong(f"events list more blocks of {medium} than are cached")

    # The end ---------------------------------------------------------------------------------------

    def close(self, rng: random.Random) -> None:
        """End all requests and loads, and check that nothing is held."""
        self.rng = rng
        self.carry_out_all()
        for each in [*self.rows.values()]:
            if each.source is not None:
                self.leave(each)
            elif each.is_receiving:
                self.cancel(each)
            else:
                self.end(each)
        while self.kept:
            self.release_blocks()
        while self.held:
            self.call(self.manager.release_blocks, self.held.pop())

    def check_end(self) -> None:
        """Check that nothing is held, once all loads and leases have ended."""
        for source in self.sources:
            source.poll()
            if source.num_loading_requests or source.num_quarantined_blocks:
                raise Wrong(f"{source.name} has loads at the end")
            if source is self.tier and not source.close(1.0):
                raise Wrong("the store does not close")
        if self.manager.last_step_id >= 0:
            self.manager.step()
            self.manager.report(StepReport(self.manager.last_step_id, completed=True))
        check_invariants(self.manager)
        for pool in (self.manager.pool, self.manager.host_pool):
            if pool is not None and pool.num_free != pool.num_total:
                raise Wrong(f"{pool.num_total - pool.num_free} blocks are held at the end")
        stats = self.manager.cache.stats
        if not 0 <= stats.host_hit_tokens <= stats.hit_tokens <= stats.query_tokens:
            raise Wrong(f"statistics do not add up: {stats}")
