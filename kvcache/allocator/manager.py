"""The request-level manager: prefix caching, allocation, and the plan of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import numpy as np

from kvcache.allocator.event_stream import events_of
from kvcache.allocator.hashing import hash_seed as first_parent
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
from kvcache.checks import MAX_INT32, MAX_INT64, integer
from kvcache.events import CacheEvent
from kvcache.kinds import make_kind
from kvcache.native.load import core
from kvcache.specs import ContextParallel, GroupSpec, checked_context_parallel, checked_groups
from kvcache.step import NO_IDS, NO_PAIRS, NO_REPLACE, Status, StepPlan, StepReport

_ALL = 2**31 - 1  # tokens: as many as the request has

core.use_plan_type(StepPlan, NO_IDS, NO_PAIRS, NO_REPLACE)

Ids = np.ndarray | Sequence[int]


class CachedTokens(NamedTuple):
    """The cached part of a request: tokens on the device, with the host, and what that would load."""

    on_device: int
    with_host: int
    num_host_blocks: int
    num_host_bytes: int  # 0 where the manager has no `page_bytes`


class KVCacheManager:
    """Which blocks each request has, over one pool with prefix caching.

    The constructor makes a manager of one group: full attention, or a sliding window of
    `sliding_window` tokens. `for_groups` makes one of several. `num_gpu_blocks` counts the null block
    0. `max_model_len`: tokens, at most 2**31 - 1. `enable_caching`, `num_preallocate_tokens` and the
    further keyword arguments are the fields of `CacheOptions`, which says what each means; `options`
    has them all.

    Two ways to drive a request, the same code below: `step`, a whole batch per call, answered by a
    `StepPlan` that a worker applies; or `get_computed_blocks`, `allocate_slots` and `append_slots`,
    which answer block ids to a caller that keeps its own tables. They share the pool, but a request
    stays with the way that admitted it, because the blocks of `allocate_slots` and `append_slots`
    stand in no plan: `append_slots` on a request that `step` admitted is a ValueError, and so is the
    row of one that `allocate_slots` admitted among the rows of `step`. Everything else serves both.
    Blocks that leave a window become the null block in `block_ids`; only plans say which.

    Every error is a ValueError or TypeError that names the argument, and changes nothing.

    A manager belongs to the thread that first calls one of its methods (but `stats`, `pool`,
    `block_ids` and `num_computed_tokens`); called from another thread, or from within one another (a
    SHA-256 in Python could), all raise RuntimeError and change nothing. A request's tokens are
    appended by that thread too.

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

        A group's block stands for `block_size * context_parallel.world_size` tokens (`replicated`
        ones: `block_size`), in allocation, hashing, hits and events alike. A hit is the longest
        prefix that all groups have what they need of. `max_encoder_tokens`: a request with more
        encoder tokens is refused (None: none is). Options as of the constructor.

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
        self.groups = checked_groups(groups)
        cp = checked_context_parallel(context_parallel)
        num_gpu_blocks = integer(num_gpu_blocks, "num_gpu_blocks", -MAX_INT64, MAX_INT64)
        self.max_model_len = integer(max_model_len, "max_model_len", -MAX_INT64, MAX_INT64)
        self._max_encoder_tokens = MAX_INT32
        if max_encoder_tokens is not None:
            self._max_encoder_tokens = integer(max_encoder_tokens, "max_encoder_tokens")
        self.options = options
        self.block_sizes = tuple(group.tokens_per_block(cp) for group in self.groups)
        self._kinds = [make_kind(group.kind, group.options) for group in self.groups]
        self._native = core.Manager(
            options.native_of(
                list(zip(self._kinds, self.block_sizes)), num_gpu_blocks, self.max_model_len
            )
        )
        self._pool = PoolView(self._native.pool, self._native.check_reader)
        self._host_pool = None
        if options.num_host_blocks:
            self._host_pool = PoolView(self._native.host, self._native.check_reader)
        self._page_bytes = options.page_bytes
        self._chain_key = (
            self._native.hash_block_size,
            first_parent(options.hash_seed, "hash_seed"),
        )
        self._rows: dict[str, int] = {}
        self._no_computed = [NO_IDS] * len(self.groups)

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
        """The same of the host tier; None where there is none."""
        return self._host_pool

    @property
    def num_loading_blocks(self) -> int:
        """Blocks that plans load from the host, of steps that were not reported yet."""
        return self._native.num_loading

    @property
    def num_fenced_blocks(self) -> int:
        """References of blocks that wait for a report; see `fence_frees`."""
        return self._native.num_fenced

    @property
    def stats(self) -> PrefixCacheStats:
        """How much of what was asked for was found in the cache, and how long blocks stayed."""
        self._native.check_reader()
        return stats_of(self._native.stats(), self._native.pool.num_pins_broken)

    def clear_stats(self) -> None:
        """Starts the counts of `stats` anew."""
        self._native.clear_stats()

    def drain_events(self) -> list[CacheEvent]:
        """Events of what entered and left the cache since the last call, in order."""
        return events_of(self._native.drain_events(), self.block_sizes)

    def set_now(self, seconds: float) -> None:
        """Sets the clock of residency times and of priorities that end, for replays.

        Without it the system's is read, counted from when the manager was made. It does not go back:
        ValueError.
        """
        self._native.set_now(int(checked_seconds(seconds, "seconds") * 1000))

    def block_hashes(self, request: Request) -> np.ndarray:
        """uint8[n, 32] of the request's full hash blocks, computed now where they are not yet."""
        return self._native.hashes(self._chain(request))

    def block_ids(self, request: Request, group: int = 0) -> np.ndarray:
        """int32[k]: the blocks of an admitted request, in the order of its tokens."""
        return self._native.blocks(self.row(request), group)

    def num_computed_tokens(self, request: Request) -> int:
        """Tokens of an admitted request that have a slot: the next ones go behind them."""
        self._native.check_reader()
        return self._native.num_computed_tokens(self.row(request))

    def row(self, request: Request) -> int:
        """The row of an admitted request; ValueError for any other."""
        row = self._rows.get(_id_of(request))
        if row is None:
            raise ValueError(f"request {request.request_id!r} is not admitted: it has no blocks")
        return row

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
    ) -> StepPlan:
        """Gives `num_tokens[i]` more slots to each of `rows`, then admits the `new` requests.

        A new request takes its longest cached prefix and slots for at most `new_num_tokens[j]` tokens
        behind it (default: all it has). Each is served or not, in the order given: a new request may
        get what a running row before it was too large for, so do not pass new ones while a row waits,
        if that is not wanted. What does not fit is answered `WAIT` (not now) or `NEVER` (not even
        alone; row -1 if new) and left exactly as it was: its tokens and rejections are to be passed
        again. Blocks that fill with known tokens become hits for later plans.

        For the running rows: `token_ids`, those that became known since the last step, row after row,
        `num_token_ids[i]` of each (default: one of each); they are appended to the request unless its
        row is not served. `num_rejected_tokens[i]`: of the row's last tokens so many were drafts that
        were not accepted; their slots are the first to be given now.

        `num_lookahead_tokens`: slots beyond the tokens, for drafts, never cached and given again to
        the next tokens; one number, or one for each of rows and new. `num_reserved_blocks`: that new
        requests leave free besides the watermark.

        `swap_out`: rows that leave for the host first of all, each if it fits there (`WAIT`: it does
        not, and stays). A row that is there comes back when it is among `rows` again, behind the
        watermark like a new request; blocks that rows share move once. A preempted request can also be
        freed, and come again as a new one: what of it is still cached, on either tier, is a hit.

        `max_host_blocks[j]`: a new request whose hit needs more blocks from the host than that takes
        what the device has; ask `cached_tokens` before, and refuse what would arrive later than it is
        computed. The plan answers `rows`, then `swap_out`, then `new`.

        Raises ValueError, with nothing changed, on an unknown row, one that `allocate_slots` admitted,
        a row or request named twice, no tokens, or tokens beyond `max_model_len` (of `token_ids` one
        more: the last that was sampled).
        """
        chains = [self._new_chain(request) for request in new]
        if len(new) > 1 and len({request.request_id for request in new}) < len(new):
            raise ValueError("new names a request twice")
        plan = self._native.step(
            rows,
            num_tokens,
            chains,
            [_ALL] * len(chains) if new_num_tokens is None else new_num_tokens,
            token_ids,
            num_token_ids,
            num_rejected_tokens,
            num_lookahead_tokens,
            num_reserved_blocks,
            swap_out,
            max_host_blocks,
        )
        plan.page_bytes = self._page_bytes
        if chains:
            for request, row in zip(new, plan.rows[-len(chains) :].tolist()):
                if row >= 0:
                    self._rows[request.request_id] = row
        return plan

    def would_fit(self, request: Request, num_tokens: int | None = None) -> Status:
        """The answer that admitting a request with its first tokens would get now; changes nothing.

        `num_tokens`: as of `new_num_tokens` of `step`; None for all that are known. `NEVER` is said of
        what was asked: in smaller chunks a request may fit whose window groups hold less at a time.
        """
        count = _ALL if num_tokens is None else num_tokens
        return Status(self._native.would_fit(self._new_chain(request), count))

    def fork(self, parent: Request, child: Request) -> int:
        """Admits `child` with the blocks of `parent`, which `step` admitted; returns its row, or -1.

        -1: no row is free (`max_num_reqs`), nothing changed. The child has the parent's tokens as far
        as they are computed, and the same extra keys; it goes on from there. All blocks are shared.
        Who writes to a shared block first gets its own: the plan copies and replaces it. The next
        plan sends the child's table. ValueError for other tokens, a parent whose computed tokens are
        not all known or that is swapped out, and a child that is admitted already.
        """
        row = self.row(parent)
        chain = self._new_chain(child)
        if not self._native.by_step(row):
            raise ValueError(
                f"request {parent.request_id!r} was admitted by allocate_slots: expected one that "
                "step admitted, whose plans can say what is copied"
            )
        child_row = self._native.fork(row, chain)
        if child_row >= 0:
            self._rows[child.request_id] = child_row
        return child_row

    def is_swapped_out(self, request: Request) -> bool:
        """Whether an admitted request's blocks are on the host."""
        self._native.check_reader()
        return self._native.is_on_host(self.row(request))

    def cached_tokens(self, request: Request) -> CachedTokens:
        """How much of a request each tier has in whole blocks; changes nothing."""
        on_device, with_host, num_blocks = self._native.lookup_tiers(self._chain(request))
        return CachedTokens(on_device, with_host, num_blocks, num_blocks * self._page_bytes)

    def access(self, request: Request, now: float) -> None:
        """Notifies the eviction policy that the request's blocks are used now, by the caller's clock."""
        self._native.access(self.row(request), checked_seconds(now, "now"))

    def pin(self, session: str, request: Request) -> int:
        """Pins, for a session, what the device's cache has of the request; returns how many blocks.

        Whatever the session had pinned before is not any more. A pin is a wish: a pinned block is
        evicted when no other cached block is left; `stats.num_pins_broken` says how often.
        """
        return self._native.pin(checked_session(session), self._chain(request))

    def unpin(self, session: str) -> int:
        """Ends the pins of a session; returns how many of its blocks were evicted all the same."""
        return self._native.unpin(checked_session(session))

    def get_computed_blocks(self, request: Request) -> tuple[np.ndarray | list[np.ndarray], int]:
        """(block ids int32[k], number of their tokens) of the longest cached prefix; changes nothing.

        At most `num_tokens - 1` tokens: the last one must run. None for `read_cache=False`. Of a
        manager of several groups, a list of ids with one array per group; in a window's, blocks that
        are not read any more are null.
        """
        ids, num_tokens = self._native.lookup(self._chain(request))
        return self._by_group(ids), num_tokens

    def allocate_slots(
        self,
        request: Request,
        num_tokens: int,
        computed_blocks: Ids | Sequence[Ids] = NO_IDS,
        num_lookahead_tokens: int = 0,
    ) -> np.ndarray | list[np.ndarray] | None:
        """Admits a request with these computed blocks and slots for `num_tokens` tokens behind them.

        Returns its new blocks (int32[k], without the computed ones; of several groups a list), or
        None when they do not fit, with nothing changed. Computed blocks that are free do not count as
        free. ValueError for computed blocks that a request with `read_cache=False`, or caching off,
        cannot have, and for a manager with a recurrent group.
        """
        if len(self.groups) == 1:
            computed = [computed_blocks]
        else:
            computed = list(computed_blocks) if len(computed_blocks) else self._no_computed
        answer = self._native.allocate(
            self._new_chain(request), num_tokens, computed, num_lookahead_tokens
        )
        if answer is None:
            return None
        self._rows[request.request_id], ids = answer
        return self._by_group(ids)

    def append_slots(
        self, request: Request, num_tokens: int, num_lookahead_tokens: int = 0
    ) -> np.ndarray | list[np.ndarray] | None:
        """Slots for `num_tokens` more tokens: new blocks, empty when none is needed, None when full.

        The request is one that `allocate_slots` admitted.
        """
        answer = self._native.append(self.row(request), num_tokens, num_lookahead_tokens)
        return None if answer is None else self._by_group(answer[1])

    def reject_tokens(self, request: Request, num_tokens: int) -> None:
        """Takes back the last `num_tokens` tokens, drafts that were not accepted.

        Their slots go to the next tokens. ValueError where more are taken back than the last call
        served, tokens that are cached, or any from a recurrent state.
        """
        self._native.reject(self.row(request), num_tokens)

    def free(
        self,
        request: Request,
        *,
        turn: int = 0,
        request_class: int = -1,
        retention: Sequence[tuple[int, int, int, float | None]] = (),
    ) -> None:
        """Releases a request's blocks, tail first; unknown or already freed is a no-op.

        Blocks that filled with tokens appended since the last call are cached first; drafts that were
        rejected since are to be taken back before (`reject_tokens`). The blocks keep content and hash
        until taken; the next plan clears the row, if `step` admitted it.

        For eviction policies: `turn` of the conversation, a `request_class` of the caller's, and
        `retention`, tuples (first token, stop, priority 0 to 100, seconds or None for ever).
        """
        row = self._rows.get(_id_of(request))
        if row is None:
            self._native.check_caller()
            return
        if turn != 0 or request_class != -1 or retention != ():
            self._native.free(
                row,
                integer(turn, "turn"),
                integer(request_class, "request_class", least=-1),
                checked_retention(retention),
            )
        else:
            self._native.free(row)
        del self._rows[request.request_id]

    def report(self, report: StepReport) -> dict[str, int]:
        """Takes in what a worker says of a step; returns what `abort` and `invalidate` return.

        A completed step, and all before it, are done: what was released until then can be used
        again. A step that did not complete is aborted, unless it was already. Failed pages are
        invalidated. ValueError, with nothing changed, for a step that never was or a page that is
        none, and for a step that did not complete but was reported done before.
        """
        if not isinstance(report, StepReport):
            raise TypeError(f"report is {report!r}: expected a StepReport")
        if not isinstance(report.completed, bool | np.bool_):
            raise TypeError(f"report.completed is {report.completed!r}: expected True or False")
        return self._by_request(
            self._native.report(
                report.step_id,
                bool(report.completed),
                report.failed_pages,
                report.failed_host_pages,
            )
        )

    def abort(self, step_id: int) -> dict[str, int]:
        """Withdraws a step and all later ones: their plans are not carried out, or came to nothing.

        What they computed leaves the cache. Returns per affected request (its id) the token from which
        it goes on; requests stay admitted, and the next plan sends their tables anew. Tokens that
        became known stay known. A step that was aborted before is none any more: nothing happens.
        ValueError for a step that was reported done, or is not one of the last 64.
        """
        return self._by_request(self._native.abort(step_id))

    def invalidate(self, ids: Ids) -> dict[str, int]:
        """These blocks do not hold what they should, for example because a load failed.

        They, all blocks under the same hashes, and all that was computed from them leave the cache
        (groups of unequal block sizes: everything that begins with the same first hash block).
        Returns per affected request (its id) the token from which it must recompute: as far as its
        own blocks are right, or the cache has them. Affected is who has such a block, who had one in
        a step that may be in flight, and whose tokens run through the content of one. Drafts of its
        last step are lost: none is to be rejected any more. The next plan sends its table anew.

        Ids name what is in the blocks now. Who learns of a failure after further steps were planned
        needs `fence_frees`: without it, the block may by then be another request's.
        """
        return self._by_request(self._native.invalidate(ids))

    def get_num_common_prefix_blocks(
        self, request: Request, num_running_requests: int, group: int = 0
    ) -> int:
        """Leading blocks of a running request that `num_running_requests` requests hold, so all."""
        return self._native.num_common_prefix_blocks(self.row(request), num_running_requests, group)

    def evict(self, ids: Ids) -> None:
        """Forgets what these blocks hold, be they held or free; uncached ones stay as they are."""
        self._native.evict(ids)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached block; False, and nothing changed, while any block is in use."""
        return self._native.reset_prefix_cache()

    def start_epoch(self) -> None:
        """Makes all hashes of before unreachable at once: the weights changed.

        Running requests keep their blocks, and leave nothing behind that was computed before.
        """
        self._native.start_epoch()

    def check_invariants(self) -> None:
        """Walks all state and raises RuntimeError where an invariant fails; for tests."""
        self._native.check_invariants()

    def _chain(self, request: Request) -> core.TokenChain:
        try:
            chain = request.chain
        except AttributeError:
            raise TypeError(f"request is {request!r}: expected a Request") from None
        return chain(self._chain_key)

    def _new_chain(self, request: Request) -> core.TokenChain:
        chain = self._chain(request)
        if request.request_id in self._rows:
            raise ValueError(f"request {request.request_id!r} is admitted already")
        if request.num_encoder_tokens > self._max_encoder_tokens:
            raise ValueError(
                f"num_encoder_tokens of request {request.request_id!r} is "
                f"{request.num_encoder_tokens}: expected at most max_encoder_tokens, which is "
                f"{self._max_encoder_tokens}"
            )
        return chain

    def _by_group(self, ids: list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
        return ids[0] if len(ids) == 1 else ids

    def _by_request(self, recompute: tuple[list[int], list[int]]) -> dict[str, int]:
        names = {row: request_id for request_id, row in self._rows.items()}
        return {names[row]: num_tokens for row, num_tokens in zip(*recompute)}


def _id_of(request: Request) -> str:
    try:
        return request.request_id
    except AttributeError:
        raise TypeError(f"request is {request!r}: expected a Request") from None
