# SPDX-License-Identifier: Apache-2.0
"""Implements vLLM's KVCacheManager with kvcache's manager.

In most calls, the request's blocks do not change, and the call returns immediately (see
`kvcache_vllm.ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import numpy as np
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec, KVCacheConfig
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request, RequestStatus

from kvcache import allocator
from kvcache.allocator import Admit, External, KVCacheManager
from kvcache.step import Status
from kvcache_vllm import private
from kvcache_vllm.ahead import Ahead
from kvcache_vllm.blocks import BlockIds, NoBlocks
from kvcache_vllm.coordinator import BlockPoolView, Coordinator, KeptBlocks
from kvcache_vllm.events import VllmEventTranslator
from kvcache_vllm.groups import group_specs
from kvcache_vllm.held import HashSpan, HeldRequest
from kvcache_vllm.refusals import refused
from kvcache_vllm.states import StateGroups

_NEW = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class VllmCacheManager:
    """The `kv_cache_manager` of vLLM's `Scheduler`.

    Args:
        hash_bytes: Size of vLLM's block hashes in bytes.
        options: Fields of `CacheOptions`, for example the eviction policy.

    Raises:
        ValueError: The model or the configuration is not supported.
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
        num_hash_lookahead_tokens: int = 0,
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
        if num_prefill_lookahead > 1:
            raise refused("modules of MTP", f"num_prefill_lookahead is {num_prefill_lookahead}")
        if metrics_collector is not None:
            raise refused("metrics of blocks", "kv_cache_metrics is True")
        if enable_mamba_shared_prefix_checkpoint:
            raise refused("shared checkpoints", "enable_mamba_shared_prefix_checkpoint is True")
        groups = group_specs(
            kv_cache_config,
            use_eagle,
            dcp_world_size,
            max_model_len=max_model_len,
            hash_block_size=hash_block_size,
        )
        self._states = StateGroups(kv_cache_config, groups, enable_caching, hash_block_size)
        self.kv_cache_config = kv_cache_config
        self.num_kv_cache_groups = len(groups)
        self.max_model_len = max_model_len
        self._max_in_flight_tokens = max_in_flight_tokens or max_model_len
        self.enable_caching = enable_caching
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.enable_kv_cache_events = enable_kv_cache_events
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.empty_kv_cache_blocks = NoBlocks(len(groups))
        hashes = {}
        if enable_caching:  # requests arrive with block hashes from vLLM's algorithm
            hashes = {"hash_algorithm": "engine:vllm", "hash_bytes": hash_bytes}
            hashes["hash_block_size"] = hash_block_size
            hashes["num_hash_lookahead_tokens"] = num_hash_lookahead_tokens
        retention = kv_cache_config.prefix_cache_retention_interval
        if not any(group.kind in ("sliding_window", "recurrent") for group in groups):
            retention = retention or None  # 0 is vLLM's default and has no effect without them
        self.native = KVCacheManager.for_groups(
            groups,
            kv_cache_config.num_blocks,
            max_model_len,
            enable_caching=enable_caching,
            retention_interval=retention,
            num_preallocate_tokens=0,
            enable_events=enable_kv_cache_events,
            engine_copies_states=self._states.are_copied or self._states.has_drafts,
            **hashes,
            **(options or {}),
        )
        self.block_sizes = [group.block_size for group in groups]
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.block_pool = BlockPoolView(self)
        self.coordinator = Coordinator(self, specs, self._max_in_flight_tokens, self.block_pool)
        self._hold_tokens = [
            isinstance(each, AttentionSpec) and not isinstance(each, CrossAttentionSpec)
            for each in specs
        ]
        self._events = VllmEventTranslator(kv_cache_config)
        self._hashed = HashSpan(hash_block_size, num_hash_lookahead_tokens)
        self._held: dict[str, HeldRequest] = {}
        self._ahead = Ahead(self.native, self._states, self._held)
        self._num_admit_calls = self._num_loads = self._num_failed_loads = 0
        self._ended = "", 0  # the request whose end is told to a connector, and its computed tokens
        self._has_waiting = lambda: True
        self._may_look = True  # whether prefix lookups may occur in this step
        self._step_of_lookup = -1
        # Whether `begin_decode_step` has already begun the step that vLLM's scheduler will begin
        # next.
        self._has_begun = False

    def described(self) -> str:
        """Return a one-line description: eviction policy, number of blocks, groups and prefix caching."""
        groups = ", ".join(
            f"{group.kind} of {group.block_size} tokens"
            + "".join(f" ({name} {value})" for name, value in group.options.items())
            for group in self.native.groups
        )
        return (
            f"eviction {self.native.options.eviction}, {self.native.pool.num_total} blocks, "
            f"{len(self.native.groups)} group{'s' * (len(self.native.groups) > 1)} ({groups}), "
            + ("prefix caching" if self.enable_caching else "no prefix caching")
        )

    def held(self, request_id: str) -> HeldRequest | None:
        """Return the record of a request, or None if it has no blocks."""
        return self._held.get(request_id)

    @property
    def copies_states(self) -> bool:
        """Whether workers copy the model's recurrent states between pages."""
        return self._states.are_copied

    def ask_who_waits(self, has_waiting: Callable[[], bool]) -> None:
        """Set a function that returns whether requests are waiting.

        If none are, steps skip lookups.
        """
        self._has_waiting = has_waiting

    # --- prefix hits ---

    def prefix_cache_lookup_enabled(self, request: Request) -> bool:
        """Return whether the request may use prefix hits."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """Return the blocks and the length of the cached prefix.

        The third value is the end of a longer prefix that only full attention has cached, or 0.
        """
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        if self._step_of_lookup != self._ahead.step:  # running requests are scheduled first
            self._step_of_lookup = self._ahead.step
            self._ahead.publish_filled(self._ahead.step)
        # Steps in vLLM do not copy blocks, so a hit must not end inside a block.
        found = self.native.cache.find_prefix(
            self._native_request(request), whole_blocks=True, max_tokens=max_cache_hit_length
        )
        ids, num_tokens = found.block_ids, found.num_tokens
        junction = found.num_shared_tokens if found.num_shared_tokens > num_tokens else 0
        if num_tokens == 0:
            return self.empty_kv_cache_blocks, 0, junction
        return BlockIds(ids if self.num_kv_cache_groups > 1 else [ids]), num_tokens, junction

    def get_computed_blocks_for_connector(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """Return the result of `get_computed_blocks`, and False: all groups have the same hit."""
        return *self.get_computed_blocks(request, max_cache_hit_length), False

    def truncate_computed_blocks(
        self, blocks: KVCacheBlocks, num_computed_tokens: int
    ) -> KVCacheBlocks:
        """Return only the blocks that hold the first `num_computed_tokens` tokens."""
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
        """Allocate slots for a request's next tokens.

        Return the request's new blocks, or None if they do not fit.
        """
        request_id = request.request_id
        if (
            num_new_tokens == 1
            and new_computed_blocks is None  # only for running requests
            and not self._may_look
            and request_id not in self._ahead.busy
            and num_lookahead_tokens <= self._ahead.num_lookahead
        ):
            return self.empty_kv_cache_blocks
        held = self._held.get(request_id)
        has_watermark = has_scheduled_reqs and request.status in _NEW
        watermark = self.watermark_blocks if has_watermark else 0
        if held is not None:
            if full_sequence_must_fit:  # after a load, or when a session continues
                num_needed = self.coordinator.get_num_blocks_to_allocate(
                    request_id,
                    min(request.num_tokens, self.max_model_len),
                    apply_admission_cap=True,
                )
                if num_needed + watermark > self.native.pool.num_free:
                    return None
            held.stop = stop = request.num_computed_tokens + num_new_tokens
            held.step = self._ahead.step
            if self._states.are_copied and request.status is not RequestStatus.RUNNING:
                # When a session continues, all of its blocks are sent to the worker again.
                held.copied_states = self._states.last_held(
                    self.native, held.request, request.num_computed_tokens
                )
            if stop + num_lookahead_tokens > held.quiet_until:
                blocks = self._extend(held, stop, num_lookahead_tokens)
            else:
                if num_new_tokens > 1 or request_id in self._ahead.busy:
                    # The request was not scheduled as predicted, so register it for another step.
                    self._ahead.wait(held, stop + num_lookahead_tokens)
                blocks = self._take_ready(held)
            if self._states.has_drafts and blocks is not None:
                self._note_filled(held)
            return blocks
        return self._admit(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            _ids(new_computed_blocks) if num_new_computed_tokens else None,
            num_lookahead_tokens,
            num_external_computed_tokens,
            delay_cache_blocks,
            reserved_blocks,
            watermark,
            full_sequence_must_fit,
            num_encoder_tokens,
            skip_zeroing_group_ids,
        )

    def new_step_starts(self) -> None:
        """Begin a step: serve the requests that need a block in this step with one native call."""
        self.block_pool.expire()
        if self._has_begun:
            self._has_begun = False
            return
        # With states of drafts, `allocate_slots` must see every call.
        self._may_look = self._has_waiting() or self._states.has_drafts
        self._ahead.begin_step()

    def begin_decode_step(self, request_ids: Container[str]) -> dict[str, KVCacheBlocks] | None:
        """Begin a step that computes one token of each of these running requests.

        Return the new blocks, keyed by request. None: a request needs a separate native call, which
        may fail. Even then, the step has begun: the next `new_step_starts` does nothing, and
        `allocate_slots` serves the requests.
        """
        self.new_step_starts()
        ahead, found = self._ahead, {}
        due = [each for request_id, each in ahead.busy.items() if request_id in request_ids]
        if self._may_look or any(
            each.engine_request.num_computed_tokens >= each.quiet_until for each in due
        ):
            self._has_begun = True
            return None
        for held in due:
            held.stop, held.step = held.engine_request.num_computed_tokens + 1, ahead.step
            if held.due != ahead.next_due(held, held.stop):  # not registered, or too late
                ahead.wait(held, held.stop)
            found[held.engine_request.request_id] = self._take_ready(held)
        return found

    def _extend(
        self, held: HeldRequest, stop: int, num_lookahead_tokens: int
    ) -> KVCacheBlocks | None:
        self._ahead.num_lookahead = num_lookahead_tokens
        lookahead = max(min(num_lookahead_tokens, self.max_model_len - stop), 0)
        start = self._ahead.start_of(held.engine_request, held)
        if start < stop and not self._ahead.advance([held], [start], [stop], lookahead):
            return None
        return self._take_ready(held)

    def _note_filled(self, held: HeldRequest) -> None:
        """Record the states at block ends that become known with the scheduler's last call."""
        size = self._hashed.block_size
        stop = min(held.stop, self._hashed.num_blocks(held.engine_request.num_tokens) * size)
        if stop > held.num_filled:
            self._states.note_filled(self.native, held.request, held.num_filled, stop)
            held.num_filled = stop

    def _take_ready(self, held: HeldRequest) -> KVCacheBlocks:
        """Return the new blocks that the scheduler has not received yet."""
        self._ahead.busy.pop(held.engine_request.request_id, None)
        ready, held.ready = held.ready, None
        return self.empty_kv_cache_blocks if ready is None else ready

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
        watermark: int,
        must_fit: bool,
        num_encoder_tokens: int,
        skip_zeroing: tuple[int, ...],
    ) -> KVCacheBlocks | None:
        if hits and self._states.are_fresh(hits):
            return None  # this step computes the states; the next step can hit them
        native, ours = self.native, self._native_request(request, num_encoder_tokens)
        start = num_hit_tokens + num_external
        stop = min(start + num_new_tokens, ours.num_tokens)  # later tokens are drafts
        slots_end = min(start + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        lookahead = max(slots_end - stop, 0)
        self._ahead.num_lookahead = max(self._ahead.num_lookahead, num_lookahead_tokens)
        ask = Admit(
            ours,
            num_new_tokens,
            External(num_external, is_delayed) if num_external or is_delayed else None,
            lookahead,
            num_reserved + watermark,
            read_cache=True if num_external else bool(hits) if self.enable_caching else None,
            num_prompt_tokens=request.num_prompt_tokens,
            num_shared_tokens=request.shared_prefix_boundary,
        )
        num_left = request.num_tokens - start - num_new_tokens
        if must_fit and num_left > 0:
            whole = ask._replace(num_lookahead_tokens=0)
            if is_delayed:  # the tokens after the load are computed in later steps
                whole = whole._replace(
                    num_tokens=min(num_left, self._max_in_flight_tokens),
                    external=External(num_external),
                    num_reserved_blocks=watermark,
                )
            if not hits:  # must find no hits of its own
                whole = whole._replace(
                    num_tokens=start + whole.num_tokens, external=None, read_cache=False
                )
            if native.would_fit(whole, whole=True) is not Status.SERVED:
                return None
        if self.num_kv_cache_groups == 1:
            computed = hits[0] if hits else ()
        else:
            computed = hits or ()
        self._num_admit_calls += 1
        loads_state = self._states.are_copied and num_external > 0 and not is_delayed
        copied = [] if num_external else self._states.last_of(hits)
        if loads_state:
            ids, copied = self._admit_loaded(ask, computed)
        else:
            ids = native.admit(ask, computed)
        if ids is None:
            return None
        held = self._held[request.request_id] = HeldRequest(request, ours, self._hashed)
        self._ahead.has_sessions |= request.resumable
        held.row = native.row(ours)
        held.start, held.num_computed = start, stop
        held.stop, held.num_known = held.num_computed, ours.num_tokens
        held.num_filled = held.num_computed
        held.num_external, held.is_receiving = num_external, is_delayed
        new_ids = [ids] if self.num_kv_cache_groups == 1 else ids
        if self._states.any:
            self._states.note_new([each.tolist() for each in new_ids], skip_zeroing)
            first = num_hit_tokens if loads_state else start
            self._states.note_filled(native, ours, first, held.num_computed)
            held.copied_states, held.step = copied, self._ahead.step
        if not is_delayed:
            (held.quiet_until,) = self._ahead.quiet_until([held.row])
            self._ahead.wait(held, held.num_computed + lookahead)
        return BlockIds(new_ids)

    def _admit_loaded(self, ask: Admit, computed: Any) -> tuple[Any, list[tuple[int, int, int]]]:
        """Admit a request whose external tokens, and the states after them, are loaded in this step.

        Return the ids of the new blocks, as `admit` does, and the (group, column, block) of each loaded
        state. The worker copies the states from these blocks.
        """
        native, external = self.native, ask.external
        num_copied = sum(group.kind == "recurrent" for group in native.groups)
        fits = native.would_fit(
            ask._replace(num_reserved_blocks=ask.num_reserved_blocks + num_copied)
        )
        if fits is not Status.SERVED:
            return None, []
        first = native.admit(
            ask._replace(
                num_tokens=0, num_lookahead_tokens=0, external=external._replace(delayed=True)
            ),
            computed,
        )
        if first is None:
            return None, []
        start = native.finish_receiving(ask.request)
        states = self._states.last_held(native, ask.request, start)
        stop = min(start + ask.num_tokens, ask.request.num_tokens)
        row = native.row(ask.request)
        (more,) = native.advance([row], [start], [stop], ask.num_lookahead_tokens)
        if more is None:
            native.free(ask.request)
            return None, []
        if self.num_kv_cache_groups == 1:
            return np.append(first, more[0] if more else ()).astype(np.int32), states
        more = more or [()] * len(first)
        return [np.append(ids, new).astype(np.int32) for ids, new in zip(first, more)], states

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Finish loading a request's external tokens, which `num_computed_tokens` already includes.

        Blocks whose tokens are known can be hit from the next call that allocates slots or, with
        states of drafts, at once.
        """
        held = self._held.get(request.request_id)
        if held is None or not held.is_receiving:
            if held is not None and self._states.has_drafts and self.enable_caching:
                self._ahead.publish_accepted(held, num_computed_tokens)
            return
        held.is_receiving = False
        self._append_known(request, held.request)
        num_missing = held.num_computed - num_computed_tokens
        num_arrived = None if num_missing <= 0 else max(held.num_external - num_missing, 0)
        first = held.start - held.num_external
        held.num_computed = self.native.finish_receiving(held.request, num_arrived)
        if self._states.any:
            self._states.note_filled(self.native, held.request, first, held.num_computed)
        self._num_loads += 1
        self._num_failed_loads += num_missing > 0
        held.start = held.stop = held.num_computed
        held.num_known = held.request.num_tokens
        self._ahead.busy[request.request_id] = held

    def free(self, request: Request) -> None:
        """Release the request's blocks, if any."""
        held = self._taken(request)
        if held is not None:
            self.native.free(held.request)

    def pop_blocks_for_free(self, request: Request) -> list[KeptBlocks]:
        """Detach and return the request's blocks, to be released with `block_pool.free_blocks`."""
        held = self._taken(request)
        if held is None:
            return []
        self.native.free(held.request, keep_blocks=True)
        return [KeptBlocks(held.request)]

    def _taken(self, request: Request) -> HeldRequest | None:
        """Remove and return the record of a finished request, with up-to-date tokens."""
        self._ahead.busy.pop(request.request_id, None)
        held = self._held.pop(request.request_id, None)
        if not self._held:  # no request is being computed
            self._states.release_left(self.native)
        if held is None:
            return None
        if held.is_receiving:  # the load failed or was aborted, and no longer writes to its blocks
            self._num_failed_loads += 1
            self.native.finish_receiving(held.request, 0)
            return held
        held.due = -1
        # Drafts and tokens of steps in flight cannot be hit yet, unless they were already
        # published.
        num_computed = min(
            request.num_computed_tokens - request.num_output_placeholders, request.num_tokens
        )
        # The native row cannot be rolled back past the start of its last step. This start may
        # include drafts that have since been rejected. Blocks with unknown tokens are not cached.
        self._append_known(request, held.request, num_computed + self._hashed.num_lookahead)
        num_computed = max(num_computed, held.num_published, held.start)
        # A state cannot be rolled back, so the request's last step counts as computed.
        if held.num_computed > num_computed and not self._states.are_final:
            if num_computed >= held.num_known:
                self.native.reject_tokens(held.request, held.num_computed - num_computed)
            else:  # known tokens that were not computed, e.g. because a load failed
                stop = max(num_computed, held.start + 1, held.num_published + 1)
                self.native.advance([held.row], [stop - 1], [stop])
        elif held.num_computed < num_computed:
            self.native.extend(held.request, num_computed - held.num_computed)
        return held

    # --- state and statistics ---

    @property
    def usage(self) -> float:
        """Fraction of blocks that are held."""
        pool = self.native.pool
        return 1.0 - pool.num_free / pool.num_total

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return a request's blocks in all groups."""
        held = self._held.get(request_id)
        if held is None:
            return self.empty_kv_cache_blocks
        groups = range(self.num_kv_cache_groups)
        ids = [self.native.block_ids(held.request, group).tolist() for group in groups]
        if held.copied_states and held.step == self._ahead.step:
            for group, column, block_id in held.copied_states:  # the worker copies from them
                ids[group][column] = block_id
        num_cached = held.num_published
        if held.is_receiving:
            num_cached = held.start - held.num_external
        return BlockIds(ids, [num_cached // size for size in self.block_sizes])

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return a request's block ids in all groups."""
        return self.get_blocks(request_id).get_block_ids()

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """Return the block ids of the first tokens; for states and encoders, all block ids."""
        ids = self.get_block_ids(request_id)
        if self._ended[0] == request_id:
            for own, group in zip(ids, self.coordinator.single_type_managers):
                num_skipped = min(group.num_skipped_blocks(self._ended[1]), len(own))
                own[:num_skipped] = [0] * num_skipped
        return tuple(
            own[: -(-num_computed_tokens // size)] if holds_tokens else own
            for own, size, holds_tokens in zip(ids, self.block_sizes, self._hold_tokens)
        )

    def estimate_cached_tokens(self, request: Request) -> int:
        """Return how many of the request's tokens can be prefix hits for other requests."""
        if not self.enable_caching or request.request_id not in self._held:
            return 0
        # Tokens of steps in flight are not computed yet.
        num_computed = request.num_computed_tokens - request.num_in_flight_tokens
        size = self._hashed.block_size
        num_hashed = self._hashed.num_blocks(request.num_tokens)
        return min(num_computed // size, num_hashed) * size

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Record a request's prefix-cache lookup and its number of hit tokens."""
        if self.log_stats and self.prefix_cache_lookup_enabled(request):
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens,
                num_hits=num_hits,
                preempted=request.num_preemptions > 0,
            )

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Return the prefix-cache statistics since the last call."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def counts(self) -> dict[str, int]:
        """Return the counts for `kvcache_vllm.metrics`, by key."""
        stats, pool = self.native.cache.stats, self.native.pool
        found = {
            "native_calls": self._ahead.num_native_calls + self._num_admit_calls,
            "loads": self._num_loads,
            "failed_loads": self._num_failed_loads,
            "broken_pins": stats.num_pins_broken,
            "cached_blocks": pool.num_cached,
            "free_blocks": pool.num_free,
        }
        for group, counts in enumerate(stats.groups):
            found[f"stored_blocks {group}"] = counts.stored_blocks
            found[f"evicted_blocks {group}"] = counts.evicted_blocks
        return found

    def publish_computed(self) -> None:
        """Cache the blocks that requests have filled with computed tokens."""
        if self.enable_caching:
            self._ahead.publish_filled(None)

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events since the last call, as vLLM's classes."""
        if not self.enable_kv_cache_events:
            return []
        self._ahead.publish_filled(None)
        return [self._events.translate(event) for event in self.native.cache.drain_events()]

    # --- cache reset and eviction ---

    def reset_prefix_cache(self) -> bool:
        """Clear the cache, or return False if a request holds blocks."""
        if not self.native.cache.reset():
            return False
        if self.log_stats:
            self.prefix_cache_stats.reset = True
        return True

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Remove these blocks from the cache."""
        self.native.cache.evict(sorted(block_ids))

    # --- methods for other kinds of groups and their connectors ---

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Called before a connector is told about the end of a request.

        No block is released, because calls that allocate slots also release the blocks that left a
        window. `get_block_ids_for_computed_tokens` replaces blocks that have left it since then by the
        null block.
        """
        self._ended = request_id, processed_computed_tokens
        self.block_pool.expire()

    def take_new_block_ids(self) -> list[int]:
        """Return the attention blocks allocated since the last call, if they must be cleared."""
        return self._states.take_new()

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """Record the request's blocks that start at or after this token as new, so that they are
        cleared.
        """
        self._states.note_new(self._blocks_of_tokens(request_id, start_token))

    def take_kv_cache_block_copies(self) -> tuple[list, list]:
        """Return two empty lists, because hits end at block boundaries."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return an empty dictionary, because boundary states are not offloaded."""
        return {}

    def finalize_partial_tail_offloads(self, request: Request) -> list[tuple[int, int, int]]:
        """Return an empty list, because boundary states are not offloaded."""
        return []

    def get_zeroing_block_ids_in_range(
        self, request_id: str, start_token: int, end_token: int
    ) -> list[int]:
        """Return the request's blocks that hold these tokens, in groups whose new blocks are cleared."""
        return self._states.zeroed_of(self._blocks_of_tokens(request_id, start_token, end_token))

    def _blocks_of_tokens(
        self, request_id: str, first: int, end: int | None = None
    ) -> list[list[int]]:
        """Return, per group, the request's blocks that hold tokens [`first`, `end`).

        If `end` is None, return all blocks from token `first` on.
        """
        request = self._held[request_id].request
        found = []
        for group, size in enumerate(self.block_sizes):
            last = None if end is None else -(-end // size)
            found.append(self.native.block_ids(request, group)[first // size : last].tolist())
        return found

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return 0 for each group, because cascade attention is not used.

        vLLM 0.32's own manager also returns 0.
        """
        return [0] * self.num_kv_cache_groups

    # --- requests ---

    def _native_request(self, request: Request, num_encoder_tokens: int = 0) -> allocator.Request:
        """Return kvcache's request for a vLLM request, with its tokens updated."""
        ours = request.__dict__.get("_kvcache_request")
        if request.streaming_queue is not None and request.request_id not in self._held:
            ours = None  # a preempted session whose tokens have changed
        if ours is None:
            ours = request._kvcache_request = allocator.Request(
                request.request_id,
                private.token_ids(request),
                block_hashes=request.block_hashes if self.enable_caching else None,
                read_cache=not request.skip_reading_prefix_cache,
                num_encoder_tokens=num_encoder_tokens,
                **(self._events.labels_of(request) if self.enable_kv_cache_events else {}),
            )
            if self._hashed.num_lookahead and request.resumable and self.enable_kv_cache_events:
                self._events.follow(request.block_hashes)
        else:
            self._append_known(request, ours)
        return ours

    @staticmethod
    def _append_known(request: Request, ours: allocator.Request, end: int | None = None) -> None:
        """Append the tokens before `end` (None: all tokens) that the native request lacks."""
        if tokens := request.all_token_ids[ours.num_tokens : end]:
            ours.append_tokens(tokens)


def _ids(blocks: KVCacheBlocks) -> Sequence[np.ndarray]:
    if isinstance(blocks, BlockIds):
        return blocks.ids
    return [np.array(ids, np.int32) for ids in blocks.get_block_ids()]
