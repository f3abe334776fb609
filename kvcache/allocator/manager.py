"""The request-level manager: prefix caching, allocation, and the plan of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcache._native import core
from kvcache.allocator.hashing import DEFAULT_SEED
from kvcache.allocator.hashing import hash_seed as first_parent
from kvcache.allocator.request import Request
from kvcache.plan import NO_IDS, NO_PAIRS, NO_REPLACE, Status, StepPlan

_SERVED = int(Status.SERVED)
_ALL = 2**31 - 1  # tokens: as many as the request has


@dataclass(frozen=True)
class PrefixCacheStats:
    """Since the start or the last `clear_stats()`; requests that opted out of reading not counted."""

    num_requests: int
    query_tokens: int  # tokens of the requests that were admitted
    hit_tokens: int  # of those, found in the cache

    @property
    def hit_rate(self) -> float:
        """Hit tokens per queried token, 0.0 before the first query."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


class KVCacheManager:
    """Which blocks each request has, over one pool with prefix caching; one full-attention group.

    `num_gpu_blocks` counts the null block 0. `max_model_len`: tokens. `num_preallocate_tokens`: when
    a request needs a block, `ceil(num_preallocate_tokens / block_size)` more are taken with it, never
    beyond `max_model_len` or what is free. `max_num_reqs`: rows, that is requests admitted at a time;
    None for as many as come. All sizes are at most 2**31 - 1. `hash_seed` gives the parent of first
    blocks.

    Two ways to drive a request, the same code below: `step`, a whole batch per call, answered by a
    `StepPlan` that a worker applies; or `get_computed_blocks`, `allocate_slots` and `append_slots`,
    which answer block ids to a caller that keeps its own tables. They share the pool, but a request
    stays with the way that admitted it, because the blocks of `allocate_slots` and `append_slots`
    stand in no plan: `append_slots` on a request that `step` admitted is a ValueError, and so is the
    row of one that `allocate_slots` admitted among the rows of `step`. `free` serves both.

    Every error is a ValueError or TypeError that names the argument, and changes nothing.

    A manager belongs to the thread that first calls one of `step`, `get_computed_blocks`,
    `allocate_slots`, `append_slots`, `free`, `reset_prefix_cache` and `block_hashes`. Called from
    another thread, or from within one another (a SHA-256 in Python could), they raise RuntimeError
    and change nothing. A request's tokens are appended by that thread too.

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
        *,
        max_num_reqs: int | None = None,
        hash_seed: str = DEFAULT_SEED,
    ) -> None:
        if sliding_window is not None:
            raise ValueError(
                f"sliding_window is {sliding_window}: only None (full attention) so far"
            )
        self._native = core.Manager(
            block_size=block_size,
            num_gpu_blocks=num_gpu_blocks,
            max_model_len=max_model_len,
            enable_caching=enable_caching,
            num_preallocate_tokens=num_preallocate_tokens,
            max_num_reqs=max_num_reqs,
        )
        self.block_size = int(block_size)
        self.max_model_len = int(max_model_len)
        self.enable_caching = enable_caching
        self._chain_key = (self.block_size, first_parent(hash_seed, "hash_seed"))
        self._rows: dict[str, int] = {}
        self._num_steps = 0

    @property
    def pool(self) -> core.BlockPool:
        """The block pool, for its counts (`num_free`, `num_cached`, `num_evicted`, ...)."""
        return self._native.pool

    @property
    def stats(self) -> PrefixCacheStats:
        """How much of what was asked for was found in the cache."""
        return PrefixCacheStats(*self._native.stats)

    def clear_stats(self) -> None:
        """Starts the counts of `stats` anew."""
        self._native.clear_stats()

    def block_hashes(self, request: Request) -> np.ndarray:
        """uint8[n, 32] of the request's full blocks, computed now where they are not yet."""
        return self._native.hashes(self._chain(request))

    def block_ids(self, request: Request) -> np.ndarray:
        """int32[k]: the blocks of an admitted request, in the order of its tokens."""
        return self._native.blocks(self.row(request))

    def row(self, request: Request) -> int:
        """The row of an admitted request; ValueError for any other."""
        row = self._rows.get(request.request_id)
        if row is None:
            raise ValueError(f"request {request.request_id!r} is not admitted: it has no blocks")
        return row

    def step(
        self,
        rows: np.ndarray | Sequence[int] = (),
        num_tokens: np.ndarray | Sequence[int] = (),
        *,
        new: Sequence[Request] = (),
        new_num_tokens: Sequence[int] | None = None,
        num_lookahead_tokens: int = 0,
    ) -> StepPlan:
        """Gives `num_tokens[i]` more slots to each of `rows`, then admits the `new` requests.

        A new request takes its longest cached prefix and slots for at most `new_num_tokens[j]` tokens
        behind it (default: all it has). Served in the order given; what does not fit is answered
        `WAIT` or `NEVER` (row -1 if new) and left exactly as it was. Blocks that fill with known
        tokens become hits for later plans; lookahead slots are allocated and never cached.

        Raises ValueError, with nothing changed, on an unknown row, one that `allocate_slots` admitted,
        a row or request named twice, no tokens, or tokens beyond `max_model_len`.
        """
        chains = [self._new_chain(request) for request in new]
        if len(new) > 1 and len({request.request_id for request in new}) < len(new):
            raise ValueError("new names a request twice")
        limits = [_ALL] * len(chains) if new_num_tokens is None else new_num_tokens
        plan = self._plan(self._native.step(rows, num_tokens, chains, limits, num_lookahead_tokens))
        for request, row in zip(reversed(new), reversed(plan.rows.tolist())):
            if row >= 0:
                self._rows[request.request_id] = row
        return plan

    def get_computed_blocks(self, request: Request) -> tuple[np.ndarray, int]:
        """(block ids int32[k], number of their tokens) of the longest cached prefix; changes nothing.

        At most `num_tokens - 1` tokens: the last one must run. None for `read_cache=False`.
        """
        ids = self._native.lookup(self._chain(request))
        return ids, len(ids) * self.block_size

    def allocate_slots(
        self,
        request: Request,
        num_tokens: int,
        computed_blocks: np.ndarray | Sequence[int] = NO_IDS,
        num_lookahead_tokens: int = 0,
    ) -> np.ndarray | None:
        """Admits a request with these computed blocks and slots for `num_tokens` tokens behind them.

        Returns its new blocks (int32[k], without the computed ones), or None when they do not fit,
        with nothing changed. Computed blocks that are free do not count as free. ValueError for
        computed blocks that a request with `read_cache=False`, or caching off, cannot have.
        """
        answer = self._native.allocate(
            self._new_chain(request), num_tokens, computed_blocks, num_lookahead_tokens
        )
        if answer is None:
            return None
        self._rows[request.request_id], ids = answer
        return ids

    def append_slots(
        self, request: Request, num_tokens: int, num_lookahead_tokens: int = 0
    ) -> np.ndarray | None:
        """Slots for `num_tokens` more tokens: new blocks, empty when none is needed, None when full.

        The request is one that `allocate_slots` admitted.
        """
        answer = self._native.append(self.row(request), num_tokens, num_lookahead_tokens)
        return None if answer is None else answer[1]

    def free(self, request: Request) -> None:
        """Gives a request's blocks back, tail first; unknown or already freed is a no-op.

        Blocks that filled with tokens appended since the last call are cached first. The blocks keep
        content and hash until taken; the next plan clears the row, if `step` admitted it.
        """
        row = self._rows.get(request.request_id)
        if row is None:
            self._native.check_caller()
            return
        self._native.free(row)
        del self._rows[request.request_id]

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached block; False, and nothing changed, while any block is in use."""
        return self._native.reset_prefix_cache()

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
        return chain

    def _plan(self, delta: tuple) -> StepPlan:
        rows, status, computed, clear_rows, append_rows, append_splits, append_ids = delta
        plan = StepPlan(
            self._num_steps,
            rows,
            status,
            computed,
            clear_rows,
            append_rows,
            [append_splits],
            [append_ids],
            [NO_REPLACE],
            NO_PAIRS,
            NO_PAIRS,
            NO_IDS,
            NO_PAIRS,
        )
        self._num_steps += 1
        return plan
