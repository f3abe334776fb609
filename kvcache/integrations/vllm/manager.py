"""vLLM's KVCacheManager, as its schedulers call it, over kvcache's.

A request is quiet up to a number of tokens: until then it needs no block and none of its blocks leaves
a window, so nothing is asked. In most steps that is so for most requests. Those of which it will not be
so are known by the number of the step: one native call serves them as the step begins, before the
scheduler asks for them one by one. Blocks that quiet requests fill become hits as soon as someone looks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec, KVCacheConfig
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request, RequestStatus

from kvcache import allocator
from kvcache.allocator import KVCacheManager
from kvcache.integrations.vllm.blocks import BlockIds, NewBlocks, NoBlocks
from kvcache.integrations.vllm.coordinator import BlockPoolView, Coordinator, KeptBlocks
from kvcache.integrations.vllm.events import EventTranslator
from kvcache.integrations.vllm.groups import group_specs
from kvcache.integrations.vllm.held import HeldRequest
from kvcache.integrations.vllm.states import StateGroups
from kvcache.step import Status

_Calls = tuple[list["HeldRequest"], list[int], list[int]]  # where they start, and where they stop
_NEW = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class VllmCacheManager:
    """What vLLM's `Scheduler` calls `kv_cache_manager`.

    `hash_bytes`: of vLLM's block hashes. `options`: fields of `CacheOptions`, the eviction policy for
    example. ValueError for what kvcache does not have: kinds of groups, states of drafts.

    Which blocks of windows and which states stay is the eviction policy's choice: a
    `prefix_cache_retention_interval` is refused, but for vLLM's default.
    """

    retained_hit_group_ids: tuple[int, ...] = ()
    mamba_shared_prefix_checkpoint = False

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: object | None = None,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
        *,
        hash_bytes: int = 32,
        options: dict[str, Any] | None = None,
    ) -> None:
        interval = kv_cache_config.prefix_cache_retention_interval
        _refuse(
            {
                f"prefix_cache_retention_interval {interval}": bool(interval),
                "MTP with several modules": num_prefill_lookahead > 1,
                "metrics of single blocks (kv_cache_metrics)": metrics_collector is not None,
            }
        )
        groups = group_specs(kv_cache_config, use_eagle, dcp_world_size)
        self._states = StateGroups(kv_cache_config, groups, enable_caching, hash_block_size)
        self.kv_cache_config = kv_cache_config
        self.num_kv_cache_groups = len(groups)
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.enable_kv_cache_events = enable_kv_cache_events
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.empty_kv_cache_blocks = NoBlocks(len(groups))
        hashes = {}
        if (
            enable_caching
        ):  # requests come with their hashes, by whichever algorithm vLLM has chosen
            hashes = {"hash_algorithm": "engine:vllm", "hash_bytes": hash_bytes}
            hashes["hash_block_size"] = hash_block_size
        self.native = KVCacheManager.for_groups(
            groups,
            kv_cache_config.num_blocks,
            max_model_len,
            enable_caching=enable_caching,
            num_preallocate_tokens=0,
            enable_events=enable_kv_cache_events,
            engine_copies_states=self._states.are_copied,
            **hashes,
            **(options or {}),
        )
        self.block_sizes = [group.block_size for group in groups]
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.coordinator = Coordinator(self, specs)
        self.block_pool = BlockPoolView(self)
        self._hold_tokens = [
            isinstance(each, AttentionSpec) and not isinstance(each, CrossAttentionSpec)
            for each in specs
        ]
        self._events = EventTranslator(kv_cache_config)
        self._hash_size = hash_block_size
        # Sizes of blocks that a request fills as it runs.
        filled = sorted({g.block_size for g in groups if g.kind != "cross_attention"})
        self._first_size, self._other_sizes = filled[0], filled[1:]
        self._chunks = {g.options["chunk_size"] for g in groups if g.kind == "chunked_local"}
        self._windows = {
            (g.options["window"], g.block_size) for g in groups if g.kind == "sliding_window"
        }
        self._has_windows = bool(self._windows or self._chunks)
        self._held: dict[str, HeldRequest] = {}
        self._step = 0
        self._due: defaultdict[int, list[HeldRequest]] = defaultdict(
            list
        )  # by the number of the step
        self._busy: dict[
            str, HeldRequest
        ] = {}  # those that were due, until the scheduler has asked
        self._num_lookahead = 0  # of the last call
        self._has_waiting = lambda: True
        self._may_look = True  # whether hits may be looked up in this step
        self._step_of_lookup = -1

    def held(self, request_id: str) -> HeldRequest | None:
        """What is known of a request; None where it has no blocks."""
        return self._held.get(request_id)

    @property
    def copies_states(self) -> bool:
        """Whether the model has states that workers copy from page to page."""
        return self._states.are_copied

    def ask_who_waits(self, has_waiting: Callable[[], bool]) -> None:
        """Before each step, whether requests wait: in steps without any nothing is looked up."""
        self._has_waiting = has_waiting

    # --- hits ---

    def prefix_cache_lookup_enabled(self, request: Request) -> bool:
        """Whether the request takes hits."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """The longest cached prefix: its blocks, its tokens, and the tokens that all groups but those of
        states have, where these are more."""
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        if self._step_of_lookup != self._step:  # those that run are asked for first
            self._step_of_lookup = self._step
            self._publish_filled(self._step)
        # A step of this engine copies no blocks for a hit that ends inside one.
        found = self.native.find_prefix(self._native_request(request), whole_blocks=True)
        ids, num_tokens = found.block_ids, found.num_tokens
        junction = found.num_shared_tokens if self._states.any else 0
        if junction <= num_tokens:
            junction = 0
        if num_tokens == 0:
            return self.empty_kv_cache_blocks, 0, junction
        return BlockIds(ids if self.num_kv_cache_groups > 1 else [ids]), num_tokens, junction

    def get_computed_blocks_for_connector(
        self, request: Request
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """The same; False: no group's hit differs from the others'."""
        return *self.get_computed_blocks(request), False

    def truncate_computed_blocks(
        self, blocks: KVCacheBlocks, num_computed_tokens: int
    ) -> KVCacheBlocks:
        """The blocks of the first tokens alone."""
        if num_computed_tokens == 0:
            return self.empty_kv_cache_blocks
        return BlockIds(
            [
                ids[: num_computed_tokens // size]
                for ids, size in zip(_ids(blocks), self.block_sizes)
            ]
        )

    # --- blocks of requests ---

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> KVCacheBlocks | None:
        """Slots for a request's next tokens; its new blocks, None where they do not fit."""
        request_id = request.request_id
        if (
            num_new_tokens == 1
            and new_computed_blocks is None  # it runs
            and request_id not in self._busy
            and num_lookahead_tokens <= self._num_lookahead
            and not self._may_look
        ):
            return self.empty_kv_cache_blocks
        held = self._held.get(request_id)
        if held is not None:
            held.stop = stop = request.num_computed_tokens + num_new_tokens
            held.step = self._step
            if stop + num_lookahead_tokens > held.quiet_until:
                return self._extend(held, stop, num_lookahead_tokens)
            if num_new_tokens > 1 or request_id in self._busy:
                self._wait(held, stop + num_lookahead_tokens)  # for other steps than was thought
            return self._take_ready(held)
        reserved = reserved_blocks
        if has_scheduled_reqs and request.status in _NEW:
            reserved += self.watermark_blocks
        return self._admit(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            _ids(new_computed_blocks) if num_new_computed_tokens else None,
            num_lookahead_tokens,
            num_external_computed_tokens,
            delay_cache_blocks,
            reserved,
            full_sequence_must_fit,
            num_encoder_tokens,
            skip_zeroing_group_ids,
        )

    def new_step_starts(self) -> None:
        """Serves the requests that are known to need something in this step, in one native call."""
        self._step += 1
        self._states.begin_step(self.native)
        self._may_look = self._has_waiting()
        due = self._due.pop(self._step, None)
        if due is None:
            return
        # A state takes back no token that the scheduler does not compute.
        if self._states.are_copied:
            for held in due:
                if held.due == self._step:
                    self._busy[held.request.request_id] = held
            return
        most = (
            len(due) * self.num_kv_cache_groups * (2 + self._num_lookahead // min(self.block_sizes))
        )
        calls = self._next_calls(due)
        if self.native.pool.num_free >= most:  # else the scheduler says who gets the last blocks
            self._advance(*calls, self._num_lookahead, is_ahead=True)

    def _next_calls(self, due: list[HeldRequest]) -> _Calls:
        """What the step will most likely ask for these requests.

        Without those for which nothing will change, and those that the scheduler may cut.
        """
        calls: _Calls = [], [], []
        rows, starts, stops = calls
        step, lookahead, most = self._step, self._num_lookahead, self.block_sizes[0]
        busy, has_windows = self._busy, self._has_windows
        for held in due:
            if held.due != step or held.is_receiving:
                continue
            held.due = 0  # it may be named twice
            request = held.engine_request
            busy[request.request_id] = held
            if request.status is not RequestStatus.RUNNING:
                continue  # a session that waits for input: its last token may be dropped
            start, num_pending = request.num_computed_tokens, request.num_output_placeholders
            stop = len(request._all_token_ids) + len(request.spec_token_ids) + num_pending
            if stop + lookahead <= held.quiet_until:  # it sat out a step
                self._wait(held, stop + lookahead)
            elif len(request._all_token_ids) > start + 1:
                pass  # a prompt: the scheduler may cut it, and what it does not compute is no hit
            elif not start < stop <= start + most or stop + lookahead >= self.max_model_len:
                pass  # many drafts, or the end
            elif (
                num_pending
                and start + 2 - num_pending >= request.num_prompt_tokens + request.max_tokens
            ):
                pass  # its last token is computed
            else:
                rows.append(held)
                starts.append(self._start_of(request, held) if has_windows else start)
                stops.append(stop)
        return calls

    def _extend(
        self, held: HeldRequest, stop: int, num_lookahead_tokens: int
    ) -> KVCacheBlocks | None:
        self._num_lookahead = num_lookahead_tokens
        lookahead = max(min(num_lookahead_tokens, self.max_model_len - stop), 0)
        start = self._start_of(held.engine_request, held)
        if start < stop and not self._advance([held], [start], [stop], lookahead):
            return None
        return self._take_ready(held)

    def _take_ready(self, held: HeldRequest) -> KVCacheBlocks:
        """New blocks that the scheduler has not been told of."""
        self._busy.pop(held.request.request_id, None)
        ready, held.ready = held.ready, None
        return self.empty_kv_cache_blocks if ready is None else ready

    def _advance(
        self,
        rows: list[HeldRequest],
        starts: list[int],
        stops: list[int],
        lookahead: int,
        *,
        is_ahead: bool = False,
        are_past: Sequence[bool] = (),
    ) -> bool:
        """Asks for slots, in one native call; whether all of them fit.

        Tokens that are not computed then are not told: a session may drop its last one. `is_ahead`: the
        scheduler may come to another decision, so that no block becomes a hit whose last token is not
        computed yet: that token is not told. `are_past`: of each, whether an earlier step has computed
        the tokens; empty: of none.
        """
        if not rows:
            return True
        token_ids: list[int] = []
        counts = []
        for held, stop in zip(rows, stops):
            request, num_known = held.engine_request, held.num_known
            last = min(request.num_computed_tokens, stop) if is_ahead else stop
            told = request._all_token_ids[num_known : max(last, num_known)]
            counts.append(len(told))
            token_ids += told
        answers = self.native.advance(
            [held.row for held in rows],
            starts,
            stops,
            lookahead,
            token_ids=token_ids,
            num_token_ids=counts,
        )
        fits, next_step, due_in, quiet_until = True, self._step + 1, self._due, self._quiet_until
        for held, start, stop, count, ids in zip(rows, starts, stops, counts, answers):
            if ids is None:
                fits = False
                continue
            held.start, held.num_computed = start, stop
            held.num_known += count
            num_slots = stop + lookahead
            held.quiet_until = last = quiet_until(start, num_slots)
            held.due = due = next_step + last - num_slots if last > num_slots else next_step
            due_in[due].append(held)
            if ids:
                held.ready = NewBlocks(ids) if held.ready is None else held.ready + NewBlocks(ids)
        if self._states.any:
            are_fresh = [not past for past in are_past] or [True] * len(rows)
            for held, start, stop, ids, is_fresh in zip(rows, starts, stops, answers, are_fresh):
                if ids is not None:
                    self._states.note_new(ids)
                    if is_fresh:
                        self._states.note_filled(self.native, held.request, start, stop)
        return fits

    def _start_of(self, request: Request, held: HeldRequest) -> int:
        """Where a call begins: windows end there. Steps under way may lose their drafts, so that
        windows stay where those begin; but not behind what is a hit. Nor does a request whose load has
        failed: what it computes again stays a hit."""
        start = request.num_computed_tokens
        if start < held.num_computed and not self._states.are_copied:
            start = max(start, held.num_published(self._hash_size) * self._hash_size)
        if (
            not self._has_windows
            or not request.num_in_flight_tokens
            or self._states.are_copied  # without drafts
        ):
            return start
        num_hits = held.num_published(self._hash_size) * self._hash_size
        return max(start - request.num_in_flight_tokens, num_hits, held.start)

    def _wait(self, held: HeldRequest, num_slots: int) -> None:
        """Until the request is not quiet any more, if each step computes one token."""
        held.due = self._step + 1 + max(held.quiet_until - num_slots, 0)
        self._due[held.due].append(held)

    def _publish_filled(self, step: int | None) -> None:
        """Makes blocks hits that quiet requests have filled, and those that they fill in this step.

        `step`: the one that the scheduler is about to plan; None behind one.
        """
        size = self._hash_size
        calls: _Calls = [], [], []
        are_past = []
        for held in self._held.values():
            if held.is_receiving:
                continue
            request = held.engine_request
            if held.step == step:
                start, stop = self._start_of(request, held), held.stop
            else:  # it is not asked for in this step, or not noted
                stop = request.num_computed_tokens - request.num_output_placeholders
                start = min(held.num_computed, stop - 1)
            if self._states.are_copied:
                start = max(start, held.num_computed)
                if start >= stop:
                    continue
            num_full = min(stop, len(request._all_token_ids)) // size
            if num_full > held.num_published(size) and stop > held.start:
                calls[0].append(held)
                calls[1].append(start)
                calls[2].append(stop)
                are_past.append(held.step != step)
        self._advance(*calls, 0, are_past=are_past)

    def _admit(
        self,
        request: Request,
        num_new_tokens: int,
        num_hit_tokens: int,
        hits: Sequence[np.ndarray] | None,
        num_lookahead_tokens: int,
        num_external: int,
        is_delayed: bool,
        num_reserved: int,
        must_fit: bool,
        num_encoder_tokens: int,
        skip_zeroing: tuple[int, ...],
    ) -> KVCacheBlocks | None:
        if hits and self._states.are_fresh(hits):
            return None  # this step computes them: they are hits of the next one
        native, ours = self.native, self._native_request(request, num_encoder_tokens)
        start = num_hit_tokens + num_external
        lookahead = max(min(num_lookahead_tokens, self.max_model_len - start - num_new_tokens), 0)
        external = {
            "num_external_computed_tokens": num_external,
            "delay_cache_blocks": is_delayed,
            "read_cache": bool(hits),
        }
        if must_fit and not is_delayed:
            fits = native.would_fit(
                ours, num_new_tokens, whole=True, num_reserved_blocks=num_reserved, **external
            )
            if fits is not Status.SERVED and start + num_new_tokens < request.num_tokens:
                return None
        if num_reserved:
            fits = native.would_fit(
                ours,
                num_new_tokens,
                num_lookahead_tokens=lookahead,
                num_reserved_blocks=num_reserved,
                **external,
            )
            if fits is not Status.SERVED:
                return None
        if self.num_kv_cache_groups == 1:
            computed = hits[0] if hits else ()
        else:
            computed = hits or ()
        ids = native.allocate_slots(
            ours,
            num_new_tokens,
            computed,
            lookahead,
            num_external,
            is_delayed,
            read_cache=bool(hits) if self.enable_caching else None,
        )
        if ids is None:
            return None
        held = self._held[request.request_id] = HeldRequest(request, ours)
        held.row = native.row(ours)
        held.start, held.num_computed = start, start + num_new_tokens
        held.stop, held.num_known = held.num_computed, ours.num_tokens
        held.num_external, held.is_receiving = num_external, is_delayed
        new_ids = [ids] if self.num_kv_cache_groups == 1 else ids
        if self._states.any:
            self._states.note_new([each.tolist() for each in new_ids], skip_zeroing)
            self._states.note_filled(native, ours, start, held.num_computed)
            held.copied_states, held.step = self._states.last_of(hits), self._step
        if not is_delayed:
            held.quiet_until = self._quiet_until(start, held.num_computed + lookahead)
            self._wait(held, held.num_computed + lookahead)
        return BlockIds(new_ids)

    def _quiet_until(self, start: int, num_slots: int) -> int:
        """Up to so many slots nothing changes for a request that has these from its last call on, which
        began at `start`."""
        size = self._first_size
        last = -(-num_slots // size) * size
        for size in self._other_sizes:
            last = min(last, -(-num_slots // size) * size)
        for window, size in self._windows:  # until a start whose window begins in a later block
            first = (max(start - window + 1, 0) // size + 1) * size + window - 1
            if first < last:
                last = first
        for chunk in self._chunks:
            last = min(last, (start // chunk + 1) * chunk)
        return last

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Ends the wait of a request whose external tokens have arrived, `num_computed_tokens` in all.

        Blocks whose tokens became known become hits with the next call that asks for slots.
        """
        held = self._held.get(request.request_id)
        if held is None or not held.is_receiving:
            return
        held.is_receiving = False
        self._append_known(request, held.request)
        num_missing = held.num_computed - num_computed_tokens
        num_arrived = None if num_missing <= 0 else max(held.num_external - num_missing, 0)
        held.num_computed = self.native.finish_receiving(held.request, num_arrived)
        held.start = held.stop = held.num_computed
        held.num_known = held.request.num_tokens
        self._busy[request.request_id] = held

    def free(self, request: Request) -> None:
        """Releases the request's blocks; nothing for one that has none."""
        held = self._taken(request)
        if held is not None:
            self.native.free(held.request)

    def pop_blocks_for_free(self, request: Request) -> list[KeptBlocks]:
        """Takes the request's blocks from it; `block_pool.free_blocks` of the answer releases them."""
        held = self._taken(request)
        if held is None:
            return []
        self.native.free(held.request, keep_blocks=True)
        return [KeptBlocks(held.request)]

    def _taken(self, request: Request) -> HeldRequest | None:
        """What is known of a request that ends, its tokens brought up to date."""
        self._busy.pop(request.request_id, None)
        held = self._held.pop(request.request_id, None)
        if not self._held:  # nothing is computed any more
            self._states.release_left(self.native)
        if held is None:
            return None
        if held.is_receiving:  # its load failed, or it was aborted: no one writes to its blocks now
            self.native.finish_receiving(held.request, 0)
            return held
        held.due = -1
        # Drafts, and what steps under way compute, are no hits yet, but for what was made one before.
        num_computed = min(
            request.num_computed_tokens - request.num_output_placeholders, request.num_tokens
        )
        num_cached = held.num_published(self._hash_size) * self._hash_size
        num_computed = max(num_computed, num_cached, held.start)
        self._append_known(request, held.request)
        # A state takes no token back: its last step is computed.
        if held.num_computed > num_computed and not self._states.are_copied:
            self.native.reject_tokens(held.request, held.num_computed - num_computed)
        elif held.num_computed < num_computed:
            self.native.append_slots(held.request, num_computed - held.num_computed)
        return held

    # --- what it tells ---

    @property
    def usage(self) -> float:
        """The share of blocks that are held."""
        pool = self.native.pool
        return 1.0 - pool.num_free / pool.num_total

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The blocks of a request, in all groups."""
        held = self._held.get(request_id)
        if held is None:
            return self.empty_kv_cache_blocks
        groups = range(self.num_kv_cache_groups)
        ids = [self.native.block_ids(held.request, group).tolist() for group in groups]
        if held.copied_states and held.step == self._step:
            for group, column, block_id in held.copied_states:  # the worker copies from them
                ids[group][column] = block_id
        num_cached = held.num_published(self._hash_size) * self._hash_size
        if held.is_receiving:
            num_cached = held.start - held.num_external
        return BlockIds(ids, [num_cached // size for size in self.block_sizes])

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Their ids."""
        return self.get_blocks(request_id).get_block_ids()

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """The ids of the blocks of the first tokens; of states and of an encoder, all."""
        ids = self.get_block_ids(request_id)
        return tuple(
            own[: -(-num_computed_tokens // size)] if holds_tokens else own
            for own, size, holds_tokens in zip(ids, self.block_sizes, self._hold_tokens)
        )

    def estimate_cached_tokens(self, request: Request) -> int:
        """How many of the request's tokens are hits for others."""
        if not self.enable_caching or request.request_id not in self._held:
            return 0
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        return num_tokens // self._hash_size * self._hash_size

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Counts one lookup."""
        if self.log_stats and self.prefix_cache_lookup_enabled(request):
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens,
                num_hits=num_hits,
                preempted=request.num_preemptions > 0,
            )

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """The counts since the last call."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call, as vLLM's own."""
        if not self.enable_kv_cache_events:
            return []
        self._publish_filled(None)
        return [self._events.translate(event) for event in self.native.drain_events()]

    # --- the cache as a whole ---

    def reset_prefix_cache(self) -> bool:
        """Forgets what is cached; False while a request holds blocks."""
        if not self.native.reset_prefix_cache():
            return False
        if self.log_stats:
            self.prefix_cache_stats.reset = True
        return True

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Makes these blocks no hits any more."""
        self.native.evict(sorted(block_ids))

    # --- what groups of other kinds and their connectors need ---

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Nothing: blocks leave their windows with the calls that give slots."""

    def take_new_block_ids(self) -> list[int]:
        """Blocks of attention that were given out since the last call, where these must be cleared."""
        return self._states.take_new()

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """The request's blocks from this token on are given out anew, for clearing."""
        self._states.note_new(self._blocks_of_tokens(request_id, start_token))

    def take_kv_cache_block_copies(self) -> tuple[list, list]:
        """None: hits end with blocks."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """None: no group keeps states."""
        return {}

    def finalize_partial_tail_offloads(self, request: Request) -> list[tuple[int, int, int]]:
        """None: no group keeps states."""
        return []

    def get_zeroing_block_ids_in_range(
        self, request_id: str, start_token: int, end_token: int
    ) -> list[int]:
        """The request's blocks of these tokens, in the groups whose new blocks are cleared."""
        return self._states.zeroed_of(self._blocks_of_tokens(request_id, start_token, end_token))

    def _blocks_of_tokens(
        self, request_id: str, first: int, end: int | None = None
    ) -> list[list[int]]:
        """Of each group, the request's blocks of tokens from `first` to `end - 1`; None: to its last."""
        request = self._held[request_id].request
        found = []
        for group, size in enumerate(self.block_sizes):
            last = None if end is None else -(-end // size)
            found.append(self.native.block_ids(request, group)[first // size : last].tolist())
        return found

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """0 for each group, as vLLM's own: 0.32 has no cascade attention any more."""
        return [0] * self.num_kv_cache_groups

    # --- requests ---

    def _native_request(self, request: Request, num_encoder_tokens: int = 0) -> allocator.Request:
        """kvcache's request of a request of vLLM, its tokens brought up to date."""
        ours = request.__dict__.get("_kvcache_request")
        if request.streaming_queue is not None and request.request_id not in self._held:
            ours = None  # a session that was preempted has other tokens now
        if ours is None:
            ours = request._kvcache_request = allocator.Request(
                request.request_id,
                request._all_token_ids,
                block_hashes=request.block_hashes if self.enable_caching else None,
                read_cache=not request.skip_reading_prefix_cache,
                num_encoder_tokens=num_encoder_tokens,
                **(self._events.labels_of(request) if self.enable_kv_cache_events else {}),
            )
        else:
            self._append_known(request, ours)
        return ours

    @staticmethod
    def _append_known(request: Request, ours: allocator.Request) -> None:
        num_known = ours.num_tokens
        if num_known < request.num_tokens:
            ours.append_tokens(request._all_token_ids[num_known:])


def _ids(blocks: KVCacheBlocks) -> Sequence[np.ndarray]:
    if isinstance(blocks, BlockIds):
        return blocks.ids
    return [np.array(ids, np.int32) for ids in blocks.get_block_ids()]


def _refuse(unsupported: dict[str, bool]) -> None:
    found = [name for name, is_there in unsupported.items() if is_there]
    if found:
        raise ValueError(
            f"{', '.join(found)}: kvcache's scheduler for vLLM does not support this; leave it out, or "
            "serve with vLLM's own scheduler"
        )
