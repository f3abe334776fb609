# SPDX-License-Identifier: Apache-2.0
"""The request-level manager, which handles prefix caching and allocation and creates a plan for
each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from kvcache.allocator.admit import Admit
from kvcache.allocator.hashing import hash_key
from kvcache.allocator.options import CacheArguments, CacheOptions, checked_retention
from kvcache.allocator.pool_view import DevicePoolView, PoolView
from kvcache.allocator.prefix_cache import CachedPrefix, PrefixCache, by_group
from kvcache.allocator.request import Request, RequestState
from kvcache.checks import (
    MAX_INT32,
    MAX_INT64,
    flag,
    instance,
    integer,
    listed,
    refuse_pickle,
)
from kvcache.kinds import make_kind
from kvcache.native.load import core
from kvcache.specs import ContextParallel, GroupSpec, checked_context_parallel, checked_groups
from kvcache.step import NO_IDS, NO_PAIRS, NO_REPLACE, NO_SPLITS, Status, StepPlan, StepReport

if TYPE_CHECKING:
    from typing_extensions import Unpack

core.use_plan_type(StepPlan, NO_IDS, NO_SPLITS, NO_PAIRS, NO_REPLACE)

Ids = np.ndarray | Sequence[int]

# Managers of `kvcache.compat` whose methods users of other engines look for here.
_IN_COMPAT = {"kv_cache_manager": "KVCacheManager", "block_space_manager": "BlockSpaceManager"}


def _fail_name(owner: type, name: str) -> NoReturn:
    message = f"{owner.__name__} has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(message, name=name)
    if hasattr(PrefixCache, name):
        message += f": expected manager.cache.{name}"
    elif name == "check_invariants":
        message += ": expected kvcache.allocator.check_invariants(manager)"
    else:
        for module, manager in _IN_COMPAT.items():
            found = import_module(f"kvcache.compat.{module}")
            if callable(getattr(getattr(found, manager), name, None)):
                message += f": expected {manager} of {found.__name__}, which has {name}"
                break
    raise AttributeError(message, name=name)


class _Names(type):
    """Says where names are that other engines' managers have."""

    def __getattr__(cls, name: str) -> NoReturn:
        _fail_name(cls, name)


class KVCacheManager(metaclass=_Names):
    """Allocates the blocks of each request from one pool, with prefix caching.

    The constructor creates a manager with one group, which uses full attention or a sliding window
    of `sliding_window` tokens. `for_groups` creates a manager with several groups.

    A request is served through one of two interfaces, which share the same native code and pool.
    `step` serves a whole batch and returns a `StepPlan` that a worker applies. `admit` and `extend`
    serve one request and return block IDs, for a caller that keeps its own block tables. A request can
    use only the interface that admitted it, because plans do not contain the blocks that `admit`
    and `extend` return: `extend` rejects requests admitted by `step`, and `step` rejects requests
    admitted by `admit`. All other methods accept both. `block_ids` contains the null block in place
    of blocks that have left a window. Plans list these replacements; `admit` and `extend` do not
    report them.

    Invalid arguments raise ValueError or TypeError. The message names the argument, and the manager
    is unchanged. MemoryError also leaves the manager unchanged, unless memory runs out while a call
    modifies the manager. In that case, the manager can no longer be used: `free` does nothing, every
    other call raises RuntimeError, and the engine must create a new manager.

    If a signal handler raises an exception during a call, no request is partially admitted.
    docs/order.md lists the return values that are lost in this case.

    A manager belongs to the thread that first calls one of its methods (except `cache.stats`, `pool`,
    `block_ids` and `num_computed_tokens`). A call from another thread, or a call made during another
    call (by a signal handler or an attention kind written in Python), raises RuntimeError and changes
    nothing. Tokens must be appended to requests by the same thread.

    Args:
        block_size: Tokens per block.
        num_gpu_blocks: Number of blocks, including the null block 0.
        max_model_len: Maximum number of tokens of a request, at most 2**31 - 1.
        sliding_window: Window size in tokens. None: full attention.
        enable_caching: Whether later requests can hit full blocks. See `CacheOptions`.
        num_preallocate_tokens: Number of tokens to preallocate. See `CacheOptions`.
        **options: Other fields of `CacheOptions`.

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
        given = CacheOptions.from_arguments(
            "KVCacheManager",
            enable_caching=enable_caching,
            num_preallocate_tokens=num_preallocate_tokens,
            **options,
        )
        self._build([group], num_gpu_blocks, max_model_len, None, None, given)

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
        """Create a manager with several cache groups over one pool.

        `plan_cache` computes groups and pages from layers. A hit is the longest prefix for which
        the required blocks of every group are cached. Groups with `cached=False` do not affect hits.
        In the block tables of these groups, the tokens of a hit are assigned null blocks, and the
        layers of these groups attend only to tokens that the request has computed after the hit.
        (If a hit ends inside a block, the K and V of the block's earlier tokens are zeros.) Blocks
        of these groups are never hit, reported in events, or kept on the host for other requests.

        Args:
            groups: The groups. For allocation, hashing, hits and events, a block of a group covers
                `block_size * context_parallel.world_size` tokens, or `block_size` tokens in groups
                with `replicated=True`.
            num_gpu_blocks: Number of blocks of the pool, including the null block.
            max_model_len: Maximum number of tokens of a request.
            context_parallel: Context-parallel sizes. None: one rank.
            max_encoder_tokens: Requests with more encoder tokens are rejected. None: no limit.
            enable_caching: Whether later requests can hit full blocks. See `CacheOptions`.
            num_preallocate_tokens: Number of tokens to preallocate. See `CacheOptions`.
            **options: Other fields of `CacheOptions`.

        Returns:
            The manager.

        >>> groups = [GroupSpec("full_attention", 16), GroupSpec("sliding_window", 16, {"window": 32})]
        >>> manager = KVCacheManager.for_groups(groups, 100, 1024, num_preallocate_tokens=0)
        >>> plan = manager.step(new=[Request("r1", range(40))])
        >>> plan.append_ids
        [array([1, 2, 3], dtype=int32), array([4, 5, 6], dtype=int32)]
        """
        self = cls.__new__(cls)
        given = CacheOptions.from_arguments(
            "KVCacheManager.for_groups",
            enable_caching=enable_caching,
            num_preallocate_tokens=num_preallocate_tokens,
            **options,
        )
        sizes = num_gpu_blocks, max_model_len
        self._build(groups, *sizes, context_parallel, max_encoder_tokens, given)
        return self

    def _build(
        self,
        groups: Sequence[GroupSpec],
        num_gpu_blocks: int,
        max_model_len: int,
        context_parallel: ContextParallel | None,
        max_encoder_tokens: int | None,
        options: CacheOptions,
    ) -> None:
        self._groups = checked_groups(groups)
        cp = checked_context_parallel(context_parallel)
        num_gpu_blocks = integer(num_gpu_blocks, "num_gpu_blocks", -MAX_INT64, MAX_INT64)
        self._max_model_len = integer(max_model_len, "max_model_len", -MAX_INT64, MAX_INT64)
        if max_encoder_tokens is None:
            max_encoder_tokens = MAX_INT32
        max_encoder_tokens = integer(max_encoder_tokens, "max_encoder_tokens")
        self._options = options
        self._block_sizes = tuple(group.tokens_per_block(cp) for group in self.groups)
        self._kinds = [make_kind(group.kind, group.options) for group in self.groups]
        described = [
            (kind, size, group.drafts, group.cached, group.transferred)
            for kind, size, group in zip(self._kinds, self.block_sizes, self.groups)
        ]
        native_options = options.native_of(described, num_gpu_blocks, self.max_model_len)
        try:
            self._native = core.Manager(native_options)
        except MemoryError:
            raise MemoryError(
                f"num_gpu_blocks is {num_gpu_blocks}, num_host_blocks is {options.num_host_blocks}: "
                "expected fewer blocks, because the system lacks memory for them (about 100 bytes per "
                "block)"
            ) from None
        self._pool = DevicePoolView(self._native)
        self._host_pool = None
        if options.num_host_blocks:
            self._host_pool = PoolView(self._native.host, self._native.check_reader)
        key = hash_key(
            self._native.hash_block_size,
            options.hash_seed,
            options.hash_algorithm,
            options.hash_bytes,
            options.num_hash_lookahead_tokens,
        )
        # Maps requests to rows. Native code updates this mapping together with the manager.
        self._requests = core.RequestRows(key, max_encoder_tokens)
        self._no_computed = [NO_IDS] * len(self.groups)
        self._cache = PrefixCache(
            self._native,
            self._requests,
            self.groups,
            self.block_sizes,
            cp,
            (options.eviction, options.host_eviction),
        )

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "its plans and reports, which pass between processes")

    if not TYPE_CHECKING:  # type checkers would take every name as known

        def __getattr__(self, name: str) -> NoReturn:
            _fail_name(type(self), name)

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The cache groups, in order of their indices."""
        return self._groups

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens per block of each group, over all context-parallel ranks."""
        return self._block_sizes

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a request."""
        return self._max_model_len

    @property
    def options(self) -> CacheOptions:
        """The manager's options."""
        return self._options

    @property
    def pool(self) -> DevicePoolView:
        """Block counts of the device pool (`num_free`, `num_cached`, `num_evicted`, ...)."""
        return self._pool

    @property
    def host_pool(self) -> PoolView | None:
        """Block counts of the host pool, or None without a host tier."""
        return self._host_pool

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache, with lookups, eviction, statistics and events."""
        return self._cache

    @property
    def last_step_id(self) -> int:
        """The ID of the last step that was not aborted, or -1.

        If an interrupt arrives while `step` returns, the plan of the step is lost. In that case, abort
        the step with this ID.
        """
        return self._native.last_step_id

    def block_ids(self, request: Request, group: int = 0) -> np.ndarray:
        """Return the blocks of an admitted request in the order of its tokens, int32[k].

        Args:
            request: An admitted request.
            group: The cache group.
        """
        return self._native.blocks(self.row(request), group)

    def num_computed_tokens(self, request: Request) -> int:
        """Return the number of an admitted request's tokens that have slots.

        This is also the position of the next token to compute.

        Args:
            request: An admitted request.
        """
        self._native.check_reader()
        return self._native.num_computed_tokens(self.row(request))

    @property
    def quiet_until(self) -> np.ndarray:
        """For each row, the number of tokens up to which its blocks do not change, int64[n].

        A call that computes the row's tokens up to this number, including lookahead tokens, neither
        allocates nor releases blocks, and no block leaves a window. An engine that keeps its own
        tables may skip such calls and pass their tokens in the next call. Full blocks then become
        available for hits only in this later call. 0: any call may change the blocks, because the row
        shares blocks, is receiving, or is swapped out. 2**63 - 1: no later call changes the blocks,
        because all blocks for `max_model_len` have been allocated to the row.

        >>> manager = KVCacheManager(16, 9, 128, num_preallocate_tokens=0)
        >>> manager.admit(Request("r1", range(40)))
        array([1, 2, 3], dtype=int32)
        >>> manager.quiet_until
        array([48])
        """
        return self._native.quiet_until()

    def row(self, request: Request) -> int:
        """Return the row of an admitted request. Raises ValueError for any other request."""
        return self._requests.at(request)

    def step(
        self,
        rows: Ids = (),
        num_tokens: Ids = (),
        *,
        new: Sequence[Request | Admit] = (),
        token_ids: Ids | None = None,
        num_token_ids: Ids | None = None,
        num_rejected_tokens: Ids | None = None,
        num_lookahead_tokens: int | Ids = 0,
        swap_out: Ids | None = None,
    ) -> StepPlan:
        """Allocate slots to running rows, then admit new requests.

        Rows and requests that fit are served in the given order. The status of a row or request
        that does not fit is `WAIT` (does not fit now) or `NEVER` (does not fit even into an empty
        pool). Such a row or request does not change, so pass its tokens and rejections again in a
        later step. The row of a new request that does not fit is -1. A new request may fit even if an
        earlier row did not. To prevent this, do not pass new requests while a row waits. Once a block
        is filled with known tokens, later plans can hit it.

        Args:
            rows: int[n]. The running rows. A swapped-out row is swapped in when it is listed in `rows`
                again. Like the admission of a new request, a swap-in leaves the watermark free. Blocks
                shared by several rows are copied only once.
            num_tokens: int[n]. Number of slots to allocate for each row. For a row with 0 tokens,
                only `token_ids` and rejections are processed.
            new: Requests to admit. Each request uses its longest cached prefix, and slots are allocated
                for its remaining tokens. If a request can never fit together with that prefix, it is
                admitted without it. See `Admit`.
            token_ids: Tokens of the running rows that became known since the last step,
                concatenated in row order. For rows that are served, these tokens are appended to the
                row's request.
            num_token_ids: int[n]. Number of `token_ids` of each row. Default: one per row.
            num_rejected_tokens: int[n]. Number of rejected drafts at the end of each row's tokens.
                Their slots are reused for the next tokens. Drafts are the tokens that were not known when
                the row was last served. See docs/order.md for two steps with drafts in flight.
            num_lookahead_tokens: Additional slots for drafts of the running rows, as one number for
                all rows or int[n]. Drafts are never cached, and later tokens reuse their slots. No
                slots are allocated beyond `max_model_len`.
            swap_out: Rows to swap out before all other changes. If a row does not fit on the host, its
                status is `WAIT`, and it stays on the device. As an alternative to a swap, free a
                preempted request and admit it again later. The request then hits those of its blocks
                that are still cached on the device or the host.

        Returns:
            The plan. `plan.answers` has separate results for `rows`, `swap_out` and `new`.

        Raises:
            ValueError: A row is unknown, was admitted by `admit`, or is receiving; a row or request
                is listed twice; a request has no tokens; tokens exceed `max_model_len` (`token_ids`
                may contain one more token, the last sampled one); a rejected token is not a draft; a
                recurrent group lacks the result of the last drafts; or external tokens leave no token to
                compute or are given with `read_cache=False`. Nothing has changed.
        """
        return self._native.step(
            rows,
            num_tokens,
            self._requests,
            new,
            token_ids,
            num_token_ids,
            num_rejected_tokens,
            num_lookahead_tokens,
            swap_out,
        )

    def would_fit(self, request: Request | Admit, *, whole: bool = False) -> Status:
        """Return the status that `step` would return now, without changing anything.

        Args:
            request: A new or admitted request. For an admitted request, the status applies to
                `Admit.num_tokens` more tokens (None: its known tokens that are not computed yet, at
                least one). The only other field that may be given is `num_lookahead_tokens`.
            whole: Whether the status applies to all known tokens of a new request, computed in chunks
                of `Admit.num_tokens`. `SERVED`: the free blocks suffice, unless some are allocated to
                other requests in the meantime. `WAIT`: the free blocks do not suffice, but the whole
                pool would. `NEVER`: even the whole pool does not suffice. `step` serves a first chunk
                that fits regardless of this status. For a recurrent group, one page is counted per
                lookahead token, up to the group's `num_speculative_blocks`.

        Returns:
            The status. `NEVER` means that this number of tokens never fits; fewer tokens may fit.
            `admit` returns None for both `WAIT` and `NEVER`.

        Raises:
            ValueError: Fields that apply only to a new request are given for an admitted request, or
                `whole` is combined with `External.delayed`.
        """
        whole = flag(whole, "whole")
        ask = request if isinstance(request, Admit) else Admit(request)
        row = self._requests.find(ask.request)
        if row < 0:
            return Status(self._native.would_fit(self._requests, ask, whole))
        count, lookahead = ask.num_tokens, ask.num_lookahead_tokens
        if whole or ask != Admit(ask.request, count, num_lookahead_tokens=lookahead):
            raise ValueError(
                f"request {ask.request.request_id!r} is already admitted: expected only num_tokens "
                "and num_lookahead_tokens"
            )
        if count is None:
            count = max(ask.request.num_tokens - self._native.num_computed_tokens(row), 1)
        return Status(self._native.would_extend(row, count, lookahead))

    def checkpoint_tokens(self, request: Request, num_tokens: int | None = None) -> int:
        """Return the number of tokens to compute in the next step so that the request's states can
        be hit.

        A recurrent state can be hit only at a position where a step ended. The step should end at
        the first of the following positions within the next `num_tokens` tokens or, if there is
        none, at the last multiple of the recurrent group's block size. The manager is not changed.

        - The end of the prefix that the other groups share with earlier requests.
        - The end of the longest hit that an identical prompt could use. This hit excludes the last
          token, the last full block of a drafting group, and blocks whose hashes cover later tokens
          than the prompt has (`CacheOptions.num_hash_lookahead_tokens`).
        - For a resumed request, the end of this hit for all of its known tokens.

        Args:
            request: An admitted or new request. The next tokens of a new request are the tokens
                after its hit.
            num_tokens: Maximum number of tokens. None: all known tokens.

        Returns:
            The number of tokens, at most `num_tokens`. Equal to `num_tokens` for a manager without
            a recurrent group. 0 if all known tokens are computed.

        Raises:
            ValueError: `num_tokens` is below 1.

        >>> groups = [GroupSpec("full_attention", 16), GroupSpec("recurrent", 64)]
        >>> manager = KVCacheManager.for_groups(groups, 100, 1024)
        >>> manager.checkpoint_tokens(Request("r1", range(300)), 200)
        192
        """
        instance(request, Request, "request")
        chain, row = request.chain(self._requests.chain_key), self._requests.find(request)
        return self._native.checkpoint_tokens(
            chain, row, MAX_INT32 if num_tokens is None else num_tokens
        )

    def fork(self, parent: Request, child: Request) -> int:
        """Admit `child` with the blocks of `parent`. The parent must have been admitted by `step`.

        The child starts with the parent's computed tokens and must have the same extra keys. All blocks
        are shared, with copy-on-write: the first row that writes to a shared block gets a private
        copy, and the plan contains the copy operation. The next plan contains the child's block table.

        Args:
            parent: An admitted request.
            child: A new request that starts with the parent's computed tokens.

        Returns:
            The child's row. If no row is free (`max_num_reqs`), returns -1 and changes nothing.

        Raises:
            ValueError: The child's tokens differ from the parent's, the parent has computed tokens whose
                IDs are not known, the parent is swapped out, or the child is already admitted.
        """
        return self._native.fork(self._requests, parent, child)

    def state(self, request: Request) -> RequestState:
        """Return whether an admitted request is running, receiving, or swapped out.

        Args:
            request: An admitted request.
        """
        self._native.check_reader()
        row = self.row(request)
        if self._native.is_receiving(row):
            return RequestState.RECEIVING
        return RequestState.SWAPPED_OUT if self._native.is_on_host(row) else RequestState.RUNNING

    def take_copies(self) -> np.ndarray:
        """Return the page copies (source, destination) required since the last call, int32[n, 2].

        If a request's cached prefix ends inside a block, `admit` allocates a new block at this
        position, and the prefix's last tokens must be copied from the cached block. Copy the returned
        pages in all layers (`Pages.copy`) before the next forward pass. Source and destination
        blocks cannot be reused until this call. While copies are pending, `extend` and `advance`
        raise ValueError.

        >>> manager = KVCacheManager(16, 9, 128, hash_block_size=4, num_preallocate_tokens=0)
        >>> plan = manager.step(new=[Request("r1", range(30))])
        >>> manager.admit(Request("r2", range(30)))
        array([3], dtype=int32)
        >>> manager.take_copies()
        array([[2, 3]], dtype=int32)
        """
        return np.array(self._native.take_copies(), np.int32).reshape(-1, 2)

    def admit(
        self,
        request: Request | Admit,
        computed_blocks: CachedPrefix | Ids | Sequence[Ids] | None = None,
    ) -> np.ndarray | list[np.ndarray] | None:
        """Admit a request, for an engine that keeps its own block tables.

        In a cross-attention group, blocks are allocated for the request's `num_encoder_tokens`.
        Computed blocks that no request holds do not count as free. In window groups, blocks that the
        next token does not attend to are replaced by null blocks, including computed blocks.
        `block_ids` returns the whole table.

        Args:
            request: A new request. It may have no tokens yet.
            computed_blocks: The request's cached prefix from `cache.find_prefix`, or the IDs of some
                of its first whole blocks. If there are several groups, one array per group. `()`: no
                prefix. None: the longest cached prefix. If the prefix ends inside a block, the
                first new block must be filled by a copy of that block. See `take_copies`.

        Returns:
            The new blocks, int32[k], without the computed blocks, or a list of arrays if there are
            several groups. If the request does not fit, returns None and changes nothing.

        Raises:
            ValueError: `computed_blocks` is given with `read_cache=False` or without caching;
                external tokens are given with `read_cache=False`, follow a prefix that ends inside a
                block, or leave no token to compute; `max_host_blocks` is given; or the manager has a
                recurrent group and `engine_copies_states` is False.

        >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128, num_preallocate_tokens=0)
        >>> manager.admit(Admit(Request("r1", range(40)), num_lookahead_tokens=16))
        array([1, 2, 3, 4], dtype=int32)
        """
        if isinstance(computed_blocks, CachedPrefix):
            computed_blocks = computed_blocks.block_ids
        if computed_blocks is None:
            computed = None
        elif len(self.groups) == 1:
            computed = [computed_blocks]
        else:
            computed = listed(computed_blocks, "computed_blocks") or self._no_computed
        ids = self._native.admit(self._requests, request, computed)
        return None if ids is None else by_group(ids)

    def finish_receiving(self, request: Request, num_tokens: int | None = None) -> int:
        """Resume a request that was admitted with `External.delayed`.

        After this call, the transfer must no longer write to the blocks. Blocks that the arrived tokens
        fill completely become available for hits. The request continues after its hit and the
        arrived tokens, with three exceptions:

        - If another request has cached a longer prefix in the meantime, the request uses that
          prefix. For example, the method may return 8 although no tokens arrived and the request
          had no hit when it was admitted.
        - If an abort or an invalidation removed tokens that precede the arrived tokens, the request
          continues at the first removed token.
        - If the request's blocks do not contain the window or state that the next token needs, the
          request continues after its cached prefix.

        Args:
            request: The request.
            num_tokens: Number of external tokens that have arrived, counted from the first. None:
                all. For a failed load, pass the number of tokens that arrived before the failure,
                or 0.

        Returns:
            The number of computed tokens, which is the position at which the request continues.

        Raises:
            ValueError: The request is not receiving, or `num_tokens` exceeds its external tokens.

        >>> from kvcache.allocator import External
        >>> manager = KVCacheManager(4, 33, 256, num_preallocate_tokens=0)
        >>> late = Request("late", range(20))
        >>> _ = manager.admit(Admit(late, external=External(8, delayed=True)), ())  # 8 tokens expected
        >>> _ = manager.admit(Admit(Request("other", range(20)), 8), ())
        >>> manager.finish_receiving(late, 0)  # none arrived, but two blocks were cached meanwhile
        8
        """
        return self._native.finish_receiving(self.row(request), num_tokens)

    def extend(
        self, request: Request, num_tokens: int, num_lookahead_tokens: int = 0
    ) -> np.ndarray | list[np.ndarray] | None:
        """Allocate slots for `num_tokens` more tokens of a request admitted by `admit`.

        Args:
            request: A request that `admit` admitted.
            num_tokens: Number of tokens to compute, after the computed tokens, at least 1.
            num_lookahead_tokens: Additional slots for drafts. Never cached.

        Returns:
            The new blocks, int32[k] (one array per group if there are several groups). Empty if no
            block is needed. None if the tokens do not fit.

        Raises:
            ValueError: The request was admitted by `step`, or a number is out of range.
        """
        ids = self._native.extend(self.row(request), num_tokens, num_lookahead_tokens)
        return None if ids is None else by_group(ids)

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
        """Run `reject_tokens` and `extend` for many requests in one call, given ranges of token
        positions.

        The engine computes the tokens [`starts[i]`, `stops[i]`) of the request in `rows[i]`, which
        must have been admitted by `admit`. Tokens before `starts[i]` are treated as computed: pass the
        position that is certain if a step is in flight. Tokens from `starts[i]` onward that already
        have slots are computed again. Drafts among them are rejected, and known tokens stay known.
        Windows are moved forward to `starts[i]`. Requests that do not fit stay unchanged, and their
        `token_ids` are not appended.
        All other requests are served.

        Args:
            rows: int[n]. Rows of the requests.
            starts: int[n]. Position of the first token to compute.
            stops: int[n]. Position after the last token to compute.
            num_lookahead_tokens: Additional slots for drafts, per request.
            token_ids: Tokens that became known, concatenated in row order.
            num_token_ids: int[n]. Number of `token_ids` of each row.

        Returns:
            The new blocks of each request, as one list of IDs per group, or `()` if no group has
            new blocks. None for a request that does not fit.

        Raises:
            ValueError: A start is beyond the request's slots, before its last call or within its cached
                tokens, or before a known token although `token_ids` of the row are given; a stop is not
                greater than its start; or a row is listed twice. Nothing has changed.
        """
        return self._native.advance(
            rows, starts, stops, num_lookahead_tokens, token_ids, num_token_ids
        )

    def reject_tokens(self, request: Request, num_tokens: int) -> None:
        """Remove the last `num_tokens` tokens, which are rejected drafts. Later tokens reuse their
        slots. Drafts are the tokens that were not known when the last call allocated their slots.

        For the rows of `step`, pass `num_rejected_tokens` to the next `step` instead.

        Args:
            request: A request that `admit` admitted.
            num_tokens: Number of rejected drafts, at least 0.

        Raises:
            ValueError: `num_tokens` exceeds the number of drafts of the last call or the number of drafts
                for which a recurrent group keeps states, or the tokens are cached.
        """
        self._native.reject(self.row(request), num_tokens)

    def free(
        self,
        *requests: Request,
        num_output_tokens: int | None = None,
        ends_turn: bool | None = None,
        retention: Sequence[tuple[int, int, int, float | None]] = (),
        keep_blocks: bool = False,
    ) -> None:
        """Release the blocks of the given requests, in order. The last block of each request is
        released first.

        Unknown requests and requests that are already freed are ignored. Blocks that were filled by
        tokens appended since the last call are cached before they are released, so remove rejected
        drafts first (`reject_tokens`). Blocks keep their content and hash until they are allocated
        again. If a request was admitted by `step`, the next plan clears its row.

        Args:
            *requests: The requests. The options apply to all of them.
            num_output_tokens: Number of tokens in the answer, for eviction policies. None: the
                number of tokens appended to the prompt.
            ends_turn: Whether the conversation pauses or ends here, for eviction policies. False:
                another request continues it soon, for example after a tool call. None: unknown.
            retention: Eviction priorities of token ranges, as tuples (first token, end, priority
                from 0 to 100, duration in seconds or None for no limit).
            keep_blocks: Whether to keep the blocks for a connector until `release_blocks` is called.
                The connector may read these blocks, and may still write to the blocks of a receiving
                request. The row is freed immediately, and cached blocks can be hit. Blocks of groups
                with `transferred=False` are released immediately.

        Raises:
            ValueError: A receiving request is freed without `keep_blocks`, a swapped-out request is
                freed with `keep_blocks`, or blocks are already kept under a request's ID.
        """
        keep_blocks = flag(keep_blocks, "keep_blocks")
        is_plain = type(retention) is tuple and not retention
        if not is_plain or keep_blocks or num_output_tokens is not None or ends_turn is not None:
            self._native.free_requests(
                self._requests,
                requests,
                num_output_tokens,
                None if ends_turn is None else flag(ends_turn, "ends_turn"),
                checked_retention(retention),
                keep_blocks,
            )
        else:
            self._native.free_requests(self._requests, requests)

    def hold_blocks(self, ids: Ids) -> None:
        """Add a reference to each of these blocks, for a connector that reads or writes blocks of
        requests that may be freed in the meantime.

        The blocks are neither reused nor evicted until `release_blocks`. Cached blocks can be hit.

        Args:
            ids: int32[n]. Device blocks that are held or cached. Each occurrence of an ID adds one
                reference.

        Raises:
            ValueError: An ID is out of range, or a block is free and not cached. Nothing has changed.

        >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128)
        >>> request = Request("r1", range(40))
        >>> plan = manager.step(new=[request])
        >>> manager.hold_blocks([1])
        >>> manager.free(request)
        >>> manager.pool.num_free
        7
        >>> manager.release_blocks([1])
        """
        self._native.hold(ids)

    def release_blocks(self, blocks: Request | Ids) -> None:
        """Release the blocks of a request that was freed with `keep_blocks`, or blocks that
        `hold_blocks` holds.

        With `fence_frees`, the blocks can be reused only after the steps in flight are reported.

        Args:
            blocks: The freed request, or int32[n]: one reference of `hold_blocks` is removed from each
                block, in the given order, which is also the order of eviction.

        Raises:
            ValueError: No blocks are kept for this request, or an ID occurs more often than
                `hold_blocks` holds its block. Nothing has changed.
        """
        if isinstance(blocks, Request):
            self._native.release_kept(blocks.request_id)
        else:
            self._native.release_held(blocks)

    def report(self, report: StepReport) -> dict[str, int]:
        """Process a worker's report of a step.

        A completed report covers its step and all earlier steps, so blocks released before or in these
        steps can be reused. A step that was not completed is aborted, unless it has already been
        aborted. Failed pages are invalidated.

        Args:
            report: The report returned by `Worker.apply` or `PendingStep`.

        Returns:
            A mapping from the ID of each affected request to the token position from which it
            continues. See `invalidate`.

        Raises:
            ValueError: The step is unknown, a page is out of range, or a failure is reported for a
                step that was already reported as completed. Nothing has changed.
        """
        instance(report, StepReport, "report")
        completed = flag(report.completed, "report.completed")
        failed = report.failed_pages, report.failed_host_pages
        return self._native.report(self._requests, report.step_id, completed, *failed)

    def abort(self, step_id: int) -> dict[str, int]:
        """Abort a step and all later steps, for example because a plan was not applied or failed.

        Blocks that these steps filled are removed from the cache. Requests stay admitted and keep
        their known tokens. The next plan contains the complete tables of these requests. Aborting a
        step twice has no further effect.

        Args:
            step_id: The `StepPlan.step_id` of the first step to abort.

        Returns:
            A mapping from the ID of each affected request to the token position from which it
            continues.

        Raises:
            ValueError: The step was reported as completed, or is not among the last 64 steps.
        """
        return self._native.abort(self._requests, step_id)

    def invalidate(self, ids: Ids) -> dict[str, int]:
        """Mark the content of blocks as invalid, for example because a load failed.

        The given blocks, all blocks with the same hashes, and all blocks computed from any of these are
        removed from the cache. (If the block sizes of groups differ, all sequences that start with the
        same first hash block are removed.) A request is affected if it holds a removed block, held a
        removed block in a step that may be in flight, or has tokens that were computed from a removed
        block. Drafts from the last step of an affected request are dropped, so do not reject them.
        The next plan contains the request's complete block table.

        IDs refer to the current content of the blocks. Callers that plan further steps before a
        failure is detected need `fence_frees`. Without it, the block may already belong to another
        request.

        Args:
            ids: int[n]. Blocks on the device.

        Returns:
            A mapping from the ID of each affected request to the token position from which it must
            recompute. All blocks before this position are valid or cached.
        """
        return self._native.invalidate(self._requests, ids)


def check_invariants(manager: KVCacheManager) -> None:
    """Check all invariants of a manager's state, for tests. Raises RuntimeError if one is violated."""
    instance(manager, KVCacheManager, "manager")
    manager._native.check_invariants()
