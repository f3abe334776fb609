"""The request-level manager: prefix caching, allocation, and the plan of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, NoReturn, Unpack

import numpy as np

from kvcache.allocator.event_stream import events_of
from kvcache.allocator.hashing import hash_key
from kvcache.allocator.learned import LearnedReuse
from kvcache.allocator.options import (
    CacheArguments,
    CacheOptions,
    checked_retention,
    checked_seconds,
    checked_session,
)
from kvcache.allocator.pool_view import PoolView
from kvcache.allocator.request import Request
from kvcache.allocator.stats import PrefixCacheStats, stats_of
from kvcache.checks import (
    MAX_INT32,
    MAX_INT64,
    flag,
    instance,
    integer,
    listed,
    num_entries,
    refuse_pickle,
    shown,
)
from kvcache.events import CacheEvent
from kvcache.kinds import make_kind
from kvcache.native.load import core
from kvcache.specs import ContextParallel, GroupSpec, checked_context_parallel, checked_groups
from kvcache.step import NO_IDS, NO_PAIRS, NO_REPLACE, NO_SPLITS, Status, StepPlan, StepReport

_IN_STEP_HITS = ("none", "wait", "share")

core.use_plan_type(StepPlan, NO_IDS, NO_SPLITS, NO_PAIRS, NO_REPLACE)

Ids = np.ndarray | Sequence[int]


class CachedTokens(NamedTuple):
    """The cached part of a request: tokens on the device, tokens with the host tier, and the load."""

    on_device: int
    with_host: int
    num_host_blocks: int
    num_host_bytes: int  # 0 where the manager has no `page_bytes`


class FoundBlocks(NamedTuple):
    """Where hashes are cached: int32[n] blocks of the device and pages of the host; -1 where not."""

    device: np.ndarray
    host: np.ndarray


class BlockHashes(NamedTuple):
    """What blocks are cached as: hashes, uint8[n, hash_bytes], and int32[n] groups; -1 for uncached."""

    hashes: np.ndarray
    groups: np.ndarray


class CachedPrefix(NamedTuple):
    """The cached prefix of a request."""

    block_ids: np.ndarray | list[np.ndarray]  # int32[k], of several groups one array each
    num_tokens: int
    num_shared_tokens: int  # tokens that all groups but those of recurrent states have


class KVCacheManager:
    """Which blocks each request has, over one pool with prefix caching.

    The constructor makes a manager of one group: full attention, or a sliding window of
    `sliding_window` tokens. `for_groups` makes one of several. `num_gpu_blocks` counts the null block
    0. `max_model_len`: tokens, at most 2**31 - 1. `enable_caching`, `num_preallocate_tokens` and the
    further keyword arguments are the fields of `CacheOptions`, which says what each means; `options`
    has them all.

    A request is served in one of two ways, with the same native code: `step`, which takes a whole batch
    and returns a `StepPlan` that a worker applies; or `get_computed_blocks`, `allocate_slots` and
    `append_slots`, which return block ids to a caller that keeps its own tables. Both share the pool. A
    request stays with the way that admitted it, because no plan contains the blocks of `allocate_slots`
    and `append_slots`: `append_slots` on a request that `step` admitted is a ValueError, and so is
    passing a request that `allocate_slots` admitted to `step`. All other methods serve both. Blocks
    behind a window become the null block in `block_ids`; only plans list them.

    Every error is a ValueError or TypeError that names the argument, and changes nothing. So does
    MemoryError, unless memory runs out in the midst of a change: then the manager is broken. Every later
    call but `free`, which does nothing then, raises RuntimeError and says so; make a new manager.

    A signal handler that raises within a call leaves each request admitted or not there; docs/order.md
    says what is lost with an answer.

    A manager belongs to the thread that first calls one of its methods (except `stats`, `pool`,
    `block_ids` and `num_computed_tokens`). Calls from another thread, and calls from within another call
    (a SHA-256 in Python could make one), raise RuntimeError and change nothing. The same thread appends
    a request's tokens.

    >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128)
    >>> plan = manager.step(new=[Request("r1", range(40))])
    >>> plan.rows, plan.append_ids[0]
    (array([0], dtype=int32), array([1, 2, 3, 4, 5, 6, 7], dtype=int32))
    """

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        max_model_len: int,
        sliding_window: int | None = None,
        enable_caching: bool = True,
        num_preallocate_tokens: int = 64,
        **options: Unpack[CacheArguments],
    ) -> None:
        group = (
            GroupSpec("full_attention", block_size)
            if sliding_window is None
            else GroupSpec("sliding_window", block_size, {"window": sliding_window})
        )
        self._build(
            [group],
            num_gpu_blocks,
            max_model_len,
            context_parallel=None,
            max_encoder_tokens=None,
            options=CacheOptions.from_arguments(
                "KVCacheManager",
                enable_caching=enable_caching,
                num_preallocate_tokens=num_preallocate_tokens,
                **options,
            ),
        )

    @classmethod
    def for_groups(
        cls,
        groups: Sequence[GroupSpec],
        num_gpu_blocks: int,
        max_model_len: int,
        *,
        context_parallel: ContextParallel | None = None,
        max_encoder_tokens: int | None = None,
        enable_caching: bool = True,
        num_preallocate_tokens: int = 64,
        **options: Unpack[CacheArguments],
    ) -> KVCacheManager:
        """A manager of several cache groups over one pool; `plan_cache` gives groups and pages.

        A group's block holds `block_size * context_parallel.world_size` tokens (in `replicated` groups
        `block_size`), for allocation, hashing, hits and events. A hit is the longest prefix of which
        every group has the blocks that it needs. A group with `cached=False` takes no part in that: its
        table has null blocks for the tokens of a hit, and its layers read only what the request has
        computed behind them (where a hit ends inside a block, the block's tokens before are zeros).
        Nothing of it is ever a hit, an event, or on the host for others. `max_encoder_tokens`: a
        request with more encoder tokens is refused (None: one with any). Options as for the constructor.

        >>> groups = [GroupSpec("full_attention", 16), GroupSpec("sliding_window", 16, {"window": 32})]
        >>> manager = KVCacheManager.for_groups(groups, 100, 1024, num_preallocate_tokens=0)
        >>> plan = manager.step(new=[Request("r1", range(40))])
        >>> plan.append_ids
        [array([1, 2, 3], dtype=int32), array([4, 5, 6], dtype=int32)]
        """
        self = cls.__new__(cls)
        self._build(
            groups,
            num_gpu_blocks,
            max_model_len,
            context_parallel=context_parallel,
            max_encoder_tokens=max_encoder_tokens,
            options=CacheOptions.from_arguments(
                "KVCacheManager.for_groups",
                enable_caching=enable_caching,
                num_preallocate_tokens=num_preallocate_tokens,
                **options,
            ),
        )
        return self

    def _build(
        self,
        groups: Sequence[GroupSpec],
        num_gpu_blocks: int,
        max_model_len: int,
        *,
        context_parallel: ContextParallel | None,
        max_encoder_tokens: int | None,
        options: CacheOptions,
    ) -> None:
        self._groups = checked_groups(groups)
        self._context_parallel = cp = checked_context_parallel(context_parallel)
        num_gpu_blocks = integer(num_gpu_blocks, "num_gpu_blocks", -MAX_INT64, MAX_INT64)
        self._max_model_len = integer(max_model_len, "max_model_len", -MAX_INT64, MAX_INT64)
        if max_encoder_tokens is None:
            max_encoder_tokens = MAX_INT32
        max_encoder_tokens = integer(max_encoder_tokens, "max_encoder_tokens")
        self._options = options
        self._block_sizes = tuple(group.tokens_per_block(cp) for group in self.groups)
        self._kinds = [make_kind(group.kind, group.options) for group in self.groups]
        native_options = options.native_of(
            [
                (kind, size, group.drafts, group.cached, group.transferred)
                for kind, size, group in zip(self._kinds, self.block_sizes, self.groups)
            ],
            num_gpu_blocks,
            self.max_model_len,
        )
        try:
            self._native = core.Manager(native_options)
        except MemoryError:
            raise MemoryError(
                f"num_gpu_blocks is {num_gpu_blocks}, num_host_blocks is {options.num_host_blocks}: "
                "expected no more blocks than the system gives memory for, about 100 bytes each"
            ) from None
        self._pool = PoolView(self._native.pool, self._native.check_reader)
        self._host_pool = None
        if options.num_host_blocks:
            self._host_pool = PoolView(self._native.host, self._native.check_reader)
        self._page_bytes = options.page_bytes
        self._chain_key = hash_key(
            self._native.hash_block_size,
            options.hash_seed,
            options.hash_algorithm,
            options.hash_bytes,
        )
        # Which row each request has: changed natively, together with the manager.
        self._requests = core.RequestRows(self._chain_key, max_encoder_tokens)
        self._no_computed = [NO_IDS] * len(self.groups)

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "its plans and reports, which pass between processes")

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The cache groups, in the order of their numbers."""
        return self._groups

    @property
    def context_parallel(self) -> ContextParallel:
        """The parallel sizes and ranks over which blocks are distributed."""
        return self._context_parallel

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of a block of each group, over all context-parallel ranks."""
        return self._block_sizes

    @property
    def max_model_len(self) -> int:
        """Tokens that a request may have."""
        return self._max_model_len

    @property
    def options(self) -> CacheOptions:
        """The options that the manager was made with."""
        return self._options

    @property
    def block_size(self) -> int:
        """Tokens of a block of the first group, over all context-parallel ranks."""
        return self.block_sizes[0]

    @property
    def hash_block_size(self) -> int:
        """Tokens per hash."""
        return self._native.hash_block_size

    @property
    def pool(self) -> PoolView:
        """The counts of the block pool (`num_free`, `num_cached`, `num_evicted`, ...)."""
        return self._pool

    @property
    def host_pool(self) -> PoolView | None:
        """The counts of the host tier's pool; None without a host tier."""
        return self._host_pool

    @property
    def num_loading_blocks(self) -> int:
        """Blocks that plans load from the host, in steps that were not reported yet."""
        return self._native.num_loading

    @property
    def num_kept_blocks(self) -> int:
        """References of blocks that wait for `release_blocks`."""
        return self._native.num_kept

    @property
    def num_fenced_blocks(self) -> int:
        """References of blocks that wait for a report; see `fence_frees`."""
        return self._native.num_fenced

    @property
    def last_step_id(self) -> int:
        """The last step that was not aborted; -1: none. Its plan is lost where an interrupt came as
        `step` returned: abort the step then."""
        return self._native.last_step_id

    @property
    def stats(self) -> PrefixCacheStats:
        """Hit rates, stored and evicted blocks, residency times, and what was learned of reuse."""
        self._native.check_reader()
        native = self._native
        return stats_of(native.stats(), native.pool.num_pins_broken, native.learned())

    def learn_from(self, learned: LearnedReuse | None) -> None:
        """Replaces what the eviction policy `learned` has learned by what an earlier one had.

        Of `stats.learned`, or of a file by `LearnedReuse.load`, whose None is nothing to learn from.
        TypeError for anything else, ValueError with another policy.

        >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128, eviction="learned")
        >>> manager.learn_from(manager.stats.learned)
        """
        if learned is None:
            return
        if not isinstance(learned, LearnedReuse):
            raise TypeError(
                f"learned has type {type(learned).__name__}: expected LearnedReuse or None"
            )
        if not self._native.learned():
            raise ValueError("learn_from: the eviction policy does not learn: expected 'learned'")
        self._native.learn(np.concatenate([learned.reached, learned.used]).ravel())

    def clear_stats(self) -> None:
        """Resets the counts of `stats`."""
        self._native.clear_stats()

    def drain_events(self) -> list[CacheEvent]:
        """The events since the last call, in order: blocks that entered or left the cache."""
        events = events_of(
            self._native.waiting_events(), self.groups, self.block_sizes, self._chain_key
        )
        self._native.drop_events()  # an interrupt before leaves them waiting
        return events

    def set_now(self, seconds: float) -> None:
        """Sets the clock of residency times and of priorities that expire, for replays.

        By default the system's clock is used, from when the manager was made. ValueError for a time
        before the current one.
        """
        self._native.set_now(int(checked_seconds(seconds, "seconds") * 1000))

    def block_hashes(self, request: Request) -> np.ndarray:
        """uint8[n, hash_bytes]: the hashes of the request's full blocks; missing ones are computed."""
        return self._native.hashes(self._chain(request))

    @property
    def hash_bytes(self) -> int:
        """Bytes of every hash."""
        return len(self._chain_key.parent)

    @property
    def hash_algorithm(self) -> str:
        """How blocks are hashed, as events name it."""
        return self._chain_key.algorithm

    def find_hashes(self, hashes: np.ndarray | Sequence[bytes], group: int = 0) -> FoundBlocks:
        """The blocks under which these hashes are cached for a group, on each tier; changes nothing.

        `hashes`: uint8[n, hash_bytes], or n bytes objects. Each hash is looked up by itself: a block is
        found whether or not those before it are. Blocks that are filled in part are not found. TypeError
        or ValueError for hashes of another length and an unknown group.

        >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128)
        >>> request = Request("r1", range(40))
        >>> plan = manager.step(new=[request])
        >>> manager.find_hashes(manager.block_hashes(request)).device
        array([1, 2], dtype=int32)
        """
        if not isinstance(hashes, np.ndarray):
            hashes = self._stacked(hashes)
        num_entries(hashes, "hashes")
        return FoundBlocks(*self._native.find_hashes(np.ascontiguousarray(hashes), group))

    def hashes_of_blocks(self, ids: Ids, medium: str = "gpu") -> BlockHashes:
        """What these blocks ("gpu") or pages of the host ("cpu") are cached as, held or free.

        Zeros and group -1 for one that is found under no hash. ValueError for an id out of range, another
        medium, and pages without a host tier.
        """
        if not isinstance(medium, str) or medium not in ("gpu", "cpu"):
            raise ValueError(f"medium is {shown(medium)}: expected gpu or cpu")
        return BlockHashes(*self._native.hashes_of_blocks(ids, medium == "cpu"))

    def _stacked(self, hashes: Sequence[bytes]) -> np.ndarray:
        if not isinstance(hashes, list | tuple):
            raise TypeError(f"hashes is {shown(hashes)}: expected an array or a list of bytes")
        for i, each in enumerate(hashes):
            if not isinstance(each, bytes):
                raise TypeError(f"hashes[{i}] is {shown(each)}: expected bytes")
            if len(each) != self.hash_bytes:
                raise ValueError(
                    f"hashes[{i}] has {len(each)} bytes: expected {self.hash_bytes}, the hash_bytes "
                    "of the manager"
                )
        return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, self.hash_bytes)

    def block_ids(self, request: Request, group: int = 0) -> np.ndarray:
        """int32[k]: the blocks of an admitted request, in the order of its tokens."""
        return self._native.blocks(self.row(request), group)

    def num_computed_tokens(self, request: Request) -> int:
        """The number of an admitted request's tokens that have a slot. The next tokens follow them."""
        self._native.check_reader()
        return self._native.num_computed_tokens(self.row(request))

    def row(self, request: Request) -> int:
        """The row of an admitted request; ValueError for any other."""
        return self._requests.at(request)

    def step(
        self,
        rows: Ids = (),
        num_tokens: Ids = (),
        *,
        new: Sequence[Request] = (),
        new_num_tokens: Ids | None = None,
        token_ids: Ids | None = None,
        num_token_ids: Ids | None = None,
        num_rejected_tokens: Ids | None = None,
        num_lookahead_tokens: int | Ids = 0,
        num_reserved_blocks: int = 0,
        swap_out: Ids | None = None,
        max_host_blocks: Ids | None = None,
        num_external_computed_tokens: Ids | None = None,
        delay_cache_blocks: Sequence[bool] | None = None,
        in_step_hits: Literal["none", "wait", "share"] = "none",
        read_cache: bool | Sequence[bool | None] | None = None,
    ) -> StepPlan:
        """Gives `num_tokens[i]` more slots to each of `rows`, then admits the `new` requests.

        A new request gets its longest cached prefix (none where it never fits with it) and slots for at
        most `new_num_tokens[j]` tokens after it (default: all its tokens). Rows and requests are served
        in the order given, each if it fits. A new request may fit where an earlier row did not: do not
        pass new requests while a row waits, if that is not wanted. A row or request that does not fit is
        answered `WAIT` (not now) or `NEVER` (not even alone; row -1 for a new request) and is not
        changed: pass its tokens and rejections again. Blocks that fill with known tokens become hits for
        later plans.

        For the running rows, `token_ids` are the tokens that became known since the last step, row after
        row, `num_token_ids[i]` per row (default: one per row). They are appended to the requests of rows
        that are served. `num_rejected_tokens[i]`: how many of the row's last tokens were drafts that were
        not accepted; their slots are used first.

        `num_lookahead_tokens`: extra slots for drafts; they are never cached, and the next tokens use
        them. One number, or one for each of `rows` and `new`. A row has none beyond `max_model_len`: near
        it a row has fewer. `num_reserved_blocks`: blocks that new requests leave free in addition to the
        watermark.

        `swap_out`: rows that are swapped out before anything else, each if it fits on the host (`WAIT`:
        it does not, and stays). A swapped-out row comes back when it is in `rows` again; like a new
        request it leaves the watermark free. Blocks that rows share move once. A preempted request can
        also be freed and passed as a new one: its blocks that are still cached, on either tier, are hits.

        `max_host_blocks[j]`: a new request whose hit needs more blocks from the host than this uses only
        the device's hit. `cached_tokens` gives the numbers in advance, so that a load can be refused
        which would take longer than computing.

        The plan's `answers` has the answers to `rows`, `swap_out` and `new` apart; `StepPlan` says what
        each field means. A row with 0 tokens gets nothing, and stays where it is; its `token_ids` and
        rejections are taken.

        `num_external_computed_tokens[j]`: the KV of so many tokens of a new request, behind its hit (as
        `cached_tokens` counts it), comes from elsewhere: they get slots, are computed tokens of the plan,
        and the request's own tokens follow. Without `delay_cache_blocks[j]` they are loaded within this
        step, and their blocks are hits for later plans like all that it fills. With it, they come some
        time later: the request gets no further slots (`new_num_tokens[j]` is 0), is not served, and none
        of its blocks is a hit, until `finish_receiving`. In window groups only what the next token reads
        has slots; of a circular buffer the last tokens come, as many as it has places for. The KV comes
        for all groups that are transferred; a cached one that is not is a ValueError. Where other rows of
        the step change the hit, the request waits (`WAIT`).

        `in_step_hits`: what a new request does where an earlier row of this step fills blocks of its
        prefix. "none": it computes these tokens, too. "wait": it is answered `WAIT`, and hits them in the
        next step. "share": it reads them in this step, and the plan's `depends_on` names the two rows, so
        the worker must fill them by then; not with recurrent groups. Only whole blocks are shared.

        `read_cache`: whether new requests take hits in this call, whatever their own `read_cache` says;
        one for all, or one for each of `new`, in which None leaves it to the request. A request with
        encoder tokens takes none.

        Raises ValueError, with nothing changed, for an unknown row, a row that `allocate_slots` admitted,
        a row or request named twice, a request without tokens, tokens beyond `max_model_len` (`token_ids`
        may have one more: the last sampled token), a row that is receiving, or external tokens that leave
        none of the request to be computed.
        """
        plan = self._native.step(
            rows,
            num_tokens,
            self._requests,
            new,
            new_num_tokens,
            token_ids,
            num_token_ids,
            num_rejected_tokens,
            num_lookahead_tokens,
            num_reserved_blocks,
            swap_out,
            max_host_blocks,
            num_external_computed_tokens,
            None if delay_cache_blocks is None else _flags(delay_cache_blocks),
            _in_step_hits(in_step_hits),
            None if read_cache is None else _choices(read_cache, num_entries(new, "new")),
        )
        plan.page_bytes = self._page_bytes
        return plan

    def would_fit(
        self,
        request: Request,
        num_tokens: int | None = None,
        *,
        whole: bool = False,
        num_lookahead_tokens: int = 0,
        num_reserved_blocks: int = 0,
        max_host_blocks: int | None = None,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        read_cache: bool | None = None,
    ) -> Status:
        """The status that `step` would give a new request now; changes nothing.

        `num_tokens`: as `new_num_tokens` of `step`; None for all known tokens. The further arguments are
        those of `step`, too. `NEVER` holds for this number of tokens. `allocate_slots` answers None for
        both `WAIT` and `NEVER`.

        With `whole`, the answer is for all known tokens, computed in chunks of `num_tokens`: `SERVED` if
        the blocks that are free now suffice to the end, if no other takes any, `WAIT` if those of the
        pool do, `NEVER` if not even these. A first chunk that fits is served in any case. A recurrent
        group counts a page for each of the `num_lookahead_tokens`, up to its `num_speculative_blocks`.

        Of a request that is admitted: the status that `num_tokens` more tokens would get (None: its known
        tokens that are not computed, at least one). Only `num_lookahead_tokens` may be given besides.
        """
        whole = flag(whole, "whole")
        delay_cache_blocks = flag(delay_cache_blocks, "delay_cache_blocks")
        row = self._requests.find(request)
        count = MAX_INT32 if num_tokens is None else num_tokens
        if row < 0:
            if num_tokens is None and delay_cache_blocks and not whole:
                count = 0
            answer = self._native.would_fit(
                self._requests,
                request,
                count,
                whole,
                num_lookahead_tokens,
                num_reserved_blocks,
                max_host_blocks,
                num_external_computed_tokens,
                delay_cache_blocks,
                _choice(read_cache, "read_cache"),
            )
            return Status(answer)
        of_new = whole, num_reserved_blocks, max_host_blocks, num_external_computed_tokens
        if of_new != (False, 0, None, 0) or delay_cache_blocks or read_cache is not None:
            raise ValueError(
                f"request {request.request_id!r} is admitted already: expected num_tokens and "
                "num_lookahead_tokens alone"
            )
        if num_tokens is None:
            count = max(request.num_tokens - self._native.num_computed_tokens(row), 1)
        return Status(self._native.would_extend(row, count, num_lookahead_tokens))

    def checkpoint_tokens(self, request: Request, num_tokens: int | None = None) -> int:
        """How many of a request's next `num_tokens` tokens to compute in one step, for its states.

        At most `num_tokens` (None: all that are known), 0 where all known tokens are computed. A
        recurrent state can be hit only where a step ended. In this order, as far as the tokens reach:
        the end of the prefix that the other groups share with earlier requests; the end of the longest
        hit of an equal prompt (at most all its tokens but the last, and one block less than a drafting
        group has filled); the last multiple of the states' block size; else, and for a manager without a
        recurrent group, `num_tokens`. The request is admitted, or is to be: then the tokens come behind
        its hit. Changes nothing. ValueError for `num_tokens` below 1.

        >>> groups = [GroupSpec("full_attention", 16), GroupSpec("recurrent", 64)]
        >>> manager = KVCacheManager.for_groups(groups, 100, 1024)
        >>> manager.checkpoint_tokens(Request("r1", range(300)), 200)
        192
        """
        chain, row = self._chain(request), self._requests.find(request)
        return self._native.checkpoint_tokens(
            chain, row, MAX_INT32 if num_tokens is None else num_tokens
        )

    def fork(self, parent: Request, child: Request) -> int:
        """Admits `child` with the blocks of `parent`, which `step` admitted; returns its row, or -1.

        -1: no row is free (`max_num_reqs`), and nothing changed. The child begins with the parent's
        computed tokens and has the same extra keys. All blocks are shared. The first row that writes to
        a shared block gets its own: the plan copies and replaces it. The next plan sends the child's
        table. ValueError where the child's tokens differ, where computed tokens of the parent are not
        known or the parent is swapped out, and where the child is admitted already.
        """
        return self._native.fork(self._requests, parent, child)

    def is_swapped_out(self, request: Request) -> bool:
        """Whether an admitted request's blocks are on the host."""
        self._native.check_reader()
        return self._native.is_on_host(self.row(request))

    def cached_tokens(self, request: Request, *, read_cache: bool | None = None) -> CachedTokens:
        """The cached tokens of a request on each tier, in whole blocks; changes nothing.

        External tokens of `step` are counted from their end. `read_cache`: as for `get_computed_blocks`.
        """
        reads = _choice(read_cache, "read_cache")
        on_device, with_host, num_blocks = self._native.lookup_tiers(self._chain(request), reads)
        return CachedTokens(on_device, with_host, num_blocks, num_blocks * self._page_bytes)

    def access(self, request: Request, now: float) -> None:
        """Notifies the eviction policy of an access to the request's blocks, at the caller's time."""
        self._native.access(self.row(request), checked_seconds(now, "now"))

    def pin(self, session: str, request: Request) -> int:
        """Pins the request's cached blocks on the device for a session; returns how many.

        The session's earlier pins end. Pinned blocks are evicted only when no other cached block is
        left; `stats.num_pins_broken` counts these.
        """
        return self._native.pin(checked_session(session), self._chain(request))

    def unpin(self, session: str) -> int:
        """Ends the pins of a session; returns how many of its pinned blocks were evicted."""
        return self._native.unpin(checked_session(session))

    def find_prefix(
        self, request: Request, *, read_cache: bool | None = None, whole_blocks: bool = False
    ) -> CachedPrefix:
        """The longest cached prefix on the device; changes nothing.

        At most `num_tokens - 1` tokens, because the last one must be computed. Nothing with
        `read_cache=False`, be it this call's or, where that is None, the request's. For several groups
        the ids are a list with one array per group; in window groups, blocks that are not read any more
        are null.

        With a `hash_block_size` finer than a group's blocks, the prefix may end inside a block, as it may
        in `step`. The last id is then the block that holds the tokens of that part: never the request's
        own, but the source of a copy (`take_copies`). `whole_blocks=True` finds whole blocks only, and so
        does a manager with recurrent groups or with groups of `cached=False`: their hits inside blocks
        exist in `step` alone.

        >>> manager = KVCacheManager(16, 9, 128, hash_block_size=4, num_preallocate_tokens=0)
        >>> plan = manager.step(new=[Request("r1", range(30))])
        >>> manager.find_prefix(Request("r2", range(30)))[:2]
        (array([1, 2], dtype=int32), 28)
        >>> manager.find_prefix(Request("r2", range(30)), whole_blocks=True)[:2]
        (array([1], dtype=int32), 16)
        """
        ids, num_tokens, num_shared_tokens = self._native.lookup(
            self._chain(request),
            _choice(read_cache, "read_cache"),
            not flag(whole_blocks, "whole_blocks"),
        )
        return CachedPrefix(self._by_group(ids), num_tokens, num_shared_tokens)

    def get_computed_blocks(
        self, request: Request, *, read_cache: bool | None = None, whole_blocks: bool = False
    ) -> tuple[np.ndarray | list[np.ndarray], int]:
        """The block ids and the number of tokens of `find_prefix`, for `allocate_slots`."""
        found = self.find_prefix(request, read_cache=read_cache, whole_blocks=whole_blocks)
        return found.block_ids, found.num_tokens

    def take_copies(self) -> np.ndarray:
        """The copies that hits inside blocks need, since the last call: int32[n, 2].

        `allocate_slots` with a prefix that ends inside a block gives the request a block of its own
        there, and the hit's tokens are in the source. Copy these pages (source, destination) over all
        layers (`Pages.copy`) before the next forward pass, then go on: until this is called, sources and
        destinations are held, and `append_slots` and `advance` raise ValueError.

        >>> manager = KVCacheManager(16, 9, 128, hash_block_size=4, num_preallocate_tokens=0)
        >>> plan = manager.step(new=[Request("r1", range(30))])
        >>> request = Request("r2", range(30))
        >>> blocks, num_computed = manager.get_computed_blocks(request)
        >>> manager.allocate_slots(request, 30 - num_computed, blocks)
        array([3], dtype=int32)
        >>> manager.take_copies()
        array([[2, 3]], dtype=int32)
        """
        return np.array(self._native.take_copies(), np.int32).reshape(-1, 2)

    def allocate_slots(
        self,
        request: Request,
        num_tokens: int,
        computed_blocks: Ids | Sequence[Ids] = NO_IDS,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        *,
        read_cache: bool | None = None,
    ) -> np.ndarray | list[np.ndarray] | None:
        """Admits a request with these computed blocks and slots for `num_tokens` more tokens.

        Returns its new blocks (int32[k], without the computed ones; for several groups a list), or None
        where they do not fit, with nothing changed. `computed_blocks`: of `get_computed_blocks`, or fewer
        whole blocks from the first on. Where the prefix ends inside a block, the first new block is the
        request's own for it: take the copy by `take_copies`. Computed blocks without references do not
        count as free. A cross-attention group gets the blocks of the request's `num_encoder_tokens`.

        `num_external_computed_tokens`: the KV of so many tokens behind the computed blocks comes from
        elsewhere; they get slots besides. With `delay_cache_blocks` it comes later: `num_tokens` is 0,
        and nothing is cached nor appended until `finish_receiving`. In window groups what the next token
        does not read is null, computed blocks included: `block_ids` has the whole table.

        `read_cache`: as `get_computed_blocks` was called. ValueError for computed blocks with
        `read_cache=False` or without caching, for external tokens behind a prefix that ends inside a
        block, for those that leave none of the request to be computed, and for a manager with a recurrent
        group without `engine_copies_states`.
        """
        if len(self.groups) == 1:
            computed = [computed_blocks]
        else:
            computed = listed(computed_blocks, "computed_blocks") or self._no_computed
        ids = self._native.allocate(
            self._requests,
            request,
            num_tokens,
            computed,
            num_lookahead_tokens,
            num_external_computed_tokens,
            flag(delay_cache_blocks, "delay_cache_blocks"),
            _choice(read_cache, "read_cache"),
        )
        return None if ids is None else self._by_group(ids)

    def finish_receiving(self, request: Request, num_tokens: int | None = None) -> int:
        """Ends the wait of a request that was admitted with `delay_cache_blocks`.

        `num_tokens`: how many of its external tokens have arrived, from the first on; None for all. A
        load that failed is one of 0 or a few tokens. It is over: no one writes to the blocks any more.
        Blocks that the arrived tokens fill become hits.

        The request continues after its hit and the tokens that arrived, with three exceptions:

        - More: where a longer prefix of the request was cached by another request meanwhile, the
          request takes it. So 0 arrived tokens of a request without a hit may return 8.
        - Less: where an abort or an invalidation took away what came before the arrived tokens.
        - What the cache has: where the request's blocks do not hold what its next token reads (a
          window, a state).

        Returns:
            The number of the request's computed tokens, after which it continues.

        Raises:
            ValueError: For a request that is not receiving, and for more tokens than it was to receive.

        >>> manager = KVCacheManager(4, 33, 256, num_preallocate_tokens=0)
        >>> late = Request("late", range(20))
        >>> _ = manager.allocate_slots(late, 0, (), 0, 8, True)  # 8 tokens are to come
        >>> _ = manager.allocate_slots(Request("other", range(20)), 8)
        >>> manager.finish_receiving(late, 0)  # none came, and two blocks were cached meanwhile
        8
        """
        return self._native.finish_receiving(self.row(request), num_tokens)

    def is_receiving(self, request: Request) -> bool:
        """Whether an admitted request waits for `finish_receiving`."""
        self._native.check_reader()
        return self._native.is_receiving(self.row(request))

    def append_slots(
        self, request: Request, num_tokens: int, num_lookahead_tokens: int = 0
    ) -> np.ndarray | list[np.ndarray] | None:
        """Allocates slots for `num_tokens` more tokens of a request that `allocate_slots` admitted.

        Returns the new blocks (empty where none is needed), or None where they do not fit.
        """
        ids = self._native.append(self.row(request), num_tokens, num_lookahead_tokens)
        return None if ids is None else self._by_group(ids)

    def advance(
        self,
        rows: Ids,
        starts: Ids,
        stops: Ids,
        num_lookahead_tokens: int = 0,
        *,
        token_ids: Ids = NO_IDS,
        num_token_ids: Ids = NO_IDS,
    ) -> list[tuple[list[int], ...] | None]:
        """`reject_tokens` and `append_slots` of many requests in one call, by token positions.

        A call of the engine computes the tokens [`starts[i]`, `stops[i]`) of the request in `rows[i]`,
        which `allocate_slots` admitted: what it has behind the start is rejected, what is before it is
        computed, and windows end there. Returns for each its new blocks, a list of ids per group, `()`
        where none has any; None where they do not fit: that request stays as it is, and the others are
        served. `token_ids` are the tokens that have become known, `num_token_ids[i]` of row i, one after
        the other; a request that does not fit does not take its own. ValueError, before anything
        changes, for a start beyond the request's slots, a stop not behind it, a row that is named twice,
        and as `reject_tokens`.
        """
        return self._native.advance(
            rows, starts, stops, num_lookahead_tokens, token_ids, num_token_ids
        )

    def reject_tokens(self, request: Request, num_tokens: int) -> None:
        """Removes the last `num_tokens` tokens, drafts that were not accepted.

        The next tokens use their slots. ValueError for more tokens than the last call served, for cached
        tokens, and for more than the drafts that a recurrent group keeps states of.
        """
        self._native.reject(self.row(request), num_tokens)

    def free(
        self,
        *requests: Request,
        turn: int = 0,
        request_class: int = -1,
        num_output_tokens: int | None = None,
        retention: Sequence[tuple[int, int, int, float | None]] = (),
        after_step: int | None = None,
        keep_blocks: bool = False,
    ) -> None:
        """Releases the blocks of requests, one request after the other, each tail first.

        Does nothing for an unknown or freed request. Blocks that filled with tokens appended since the
        last call are cached first; remove rejected drafts before (`reject_tokens`). The blocks keep
        content and hash until they are allocated again. If `step` admitted a request, the next plan
        clears its row.

        For eviction policies, and the same for all `requests`: `turn` of the conversation,
        `request_class` (a number of the caller's), `num_output_tokens` of the answer (default: the tokens
        that were appended to the prompt), and `retention`, tuples (first token, stop, priority 0 to 100,
        seconds or None for ever).

        `after_step`: the blocks are released when a report says that this step is done, with or without
        `fence_frees`. `keep_blocks`: they are handed to a connector, which may read them, or still write
        to those of a request that is receiving, until `release_blocks`; the row is free at once. Cached
        ones are hits meanwhile. Blocks of groups with `transferred=False` are released at once.

        ValueError for both together, for a step that there was not, for a request that is receiving
        without `keep_blocks`, for one that is swapped out with it, and while blocks of an earlier request
        with this id are kept.
        """
        keep_blocks = flag(keep_blocks, "keep_blocks")
        if keep_blocks and after_step is not None:
            raise ValueError(f"after_step is {after_step} with keep_blocks: expected one of them")
        has_types = type(turn) is type(request_class) is int and type(retention) is tuple
        is_plain = has_types and turn == 0 and request_class == -1 and not retention
        is_plain = is_plain and num_output_tokens is None
        if not is_plain or keep_blocks or after_step is not None:
            self._native.free_requests(
                self._requests,
                requests,
                integer(turn, "turn"),
                integer(request_class, "request_class", least=-1),
                num_output_tokens,
                checked_retention(retention),
                after_step,
                keep_blocks,
            )
        else:
            self._native.free_requests(self._requests, requests)

    def release_blocks(self, request: Request) -> None:
        """Releases the blocks of a request that was freed with `keep_blocks`: the connector is done.

        With `fence_frees` they wait for the steps in flight. ValueError for any other request.
        """
        self._native.release_kept(_id_of(request))

    def report(self, report: StepReport) -> dict[str, int]:
        """Processes a worker's report of a step; returns the result of `abort` and `invalidate`.

        A completed step, and all steps before it, are done: blocks released until then can be used
        again. A step that did not complete is aborted, unless it was already. Failed pages are
        invalidated. ValueError, with nothing changed, for an unknown step, a page out of range, and an
        incomplete report of a step that was reported as completed before.
        """
        if not isinstance(report, StepReport):
            raise TypeError(f"report is {shown(report)}: expected a StepReport")
        if not isinstance(report.completed, bool | np.bool_):
            raise TypeError(
                f"report.completed is {shown(report.completed)}: expected True or False"
            )
        return self._native.report(
            self._requests,
            report.step_id,
            bool(report.completed),
            report.failed_pages,
            report.failed_host_pages,
        )

    def abort(self, step_id: int) -> dict[str, int]:
        """Withdraws a step and all later ones, whose plans were not carried out or failed.

        What they computed leaves the cache. Returns, by id of each affected request, the token from which
        it goes on; requests stay admitted, and the next plan sends their whole tables again. Known tokens
        stay known. Aborting a step again does nothing. ValueError for a step that was reported as
        completed, or is not among the last 64.
        """
        return self._native.abort(self._requests, step_id)

    def invalidate(self, ids: Ids) -> dict[str, int]:
        """Marks the content of these blocks as invalid, for example because a load failed.

        These blocks, all blocks with the same hashes, and all that was computed from them leave the
        cache (in groups of unequal block sizes: everything that begins with the same first hash block).
        Returns, by id of each affected request, the token from which it must recompute: as far as its own
        blocks are valid, or the cache has them. A request is affected where it holds such a block, held
        one in a step that may be in flight, or has tokens that run through the content of one. Drafts of
        its last step are dropped: do not reject them. The next plan sends its whole table again.

        Ids refer to the current content of the blocks. A caller that learns of a failure after it has
        planned further steps needs `fence_frees`: without it, the block may belong to another request by
        then.
        """
        return self._native.invalidate(self._requests, ids)

    def take_cached(self, request: Request) -> int:
        """Lets an admitted request go on from what the device's cache has of its tokens by now.

        Returns its number of computed tokens. Where the cache has no more than the request has computed,
        nothing changes; else its own blocks are released, and the next plan sends its whole table. For
        requests that shared a block which turned out to be invalid (`report`, `invalidate`): one of them
        computes it anew, and the others take it from the cache when the step that does so is planned.
        Whole blocks only. ValueError for a request that is not admitted, is swapped out or receives.
        """
        return self._native.take_cached(self.row(request))

    def get_num_common_prefix_blocks(
        self, request: Request, num_running_requests: int, group: int = 0
    ) -> int:
        """How many leading blocks of a running request `num_running_requests` (all) requests hold."""
        return self._native.num_common_prefix_blocks(self.row(request), num_running_requests, group)

    def evict(self, ids: Ids) -> None:
        """Removes these blocks from the cache, held or free; blocks that are not cached do not change."""
        self._native.evict(ids)

    def reset_prefix_cache(self, group: int | None = None) -> bool:
        """Removes every block from the cache; False, with nothing changed, while any block is held.

        `group`: only the blocks of this group, on both tiers; False while a request holds blocks of it,
        or while blocks are being loaded from the host. What all groups must have is then no hit.
        """
        if group is None:
            return self._native.reset_prefix_cache()
        return self._native.reset_group(group)

    def start_epoch(self) -> None:
        """Makes all current hashes unreachable at once, because the weights changed.

        Running requests keep their blocks, and do not publish what was computed before.
        """
        self._native.start_epoch()

    def check_invariants(self) -> None:
        """Checks all state and raises RuntimeError where an invariant fails; for tests."""
        self._native.check_invariants()

    def _chain(self, request: Request) -> core.TokenChain:
        instance(request, Request, "request")
        return request.chain(self._chain_key)

    def _by_group(self, ids: list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
        return ids[0] if len(ids) == 1 else ids


def _in_step_hits(value: str) -> int:
    if isinstance(value, str) and value in _IN_STEP_HITS:
        return _IN_STEP_HITS.index(value)
    raise ValueError(f"in_step_hits is {shown(value)}: expected one of {', '.join(_IN_STEP_HITS)}")


def _choice(value: bool | None, name: str) -> bool | None:
    """True or False of a call, or None where it leaves it to the request."""
    return None if value is None else flag(value, name)


def _choices(values: bool | Sequence[bool | None], n: int) -> list[bool | None]:
    if not isinstance(values, list | tuple):
        return [_choice(values, "read_cache")] * n
    return [_choice(value, f"read_cache[{i}]") for i, value in enumerate(values)]


def _flags(values: Sequence[bool]) -> list[int]:
    flags = listed(values, "delay_cache_blocks", "a list of True and False")
    return [int(flag(value, f"delay_cache_blocks[{i}]")) for i, value in enumerate(flags)]


def _id_of(request: Request) -> str:
    instance(request, Request, "request")
    return request.request_id
