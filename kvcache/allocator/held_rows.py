# SPDX-License-Identifier: Apache-2.0
"""Rows of a manager that belong to their caller: they fork, are swapped by direct calls, and are cached
when their tokens are marked as computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache.allocator.manager import KVCacheManager, check_invariants
from kvcache.allocator.request import Request
from kvcache.checks import instance
from kvcache.native.load import core


class HeldRow:
    """A row of a manager, with the tokens that have slots.

    Native code changes `row`, `num_tokens` and `table` together with the row, so that no interrupt
    separates them.

    Attributes:
        request: The tokens.
        row: The row, or -1 before its admission and after its release.
        num_tokens: Number of tokens with slots.
        table: The blocks on the device as a list, or None if they are not known or on the host.

    Args:
        request: The tokens that get slots at the admission. `append_slots` appends others.
    """

    __slots__ = ("_ids", "num_tokens", "request", "row", "table")

    def __init__(self, request: Request) -> None:
        self.request, self.row = request, -1
        self.num_tokens = request.num_tokens
        self.table: list[int] | None = None
        self._ids = request._tokens

    def ids_from(self, first: int) -> list[int]:
        """Return the ids of the tokens from position `first` on."""
        return self._ids.tail(first)


class HeldRows:
    """The rows of a manager with one group, by direct calls. The caller has checked the arguments.

    These calls are made for each row in each step, so they are the native ones:

    - `append_slots(held, row, num_tokens, num_lookahead, ids, table)`: append tokens, with ids or None,
      and slots for drafts; update the list `table`. Returns the pairs of blocks to copy, or None if
      they do not fit.
    - `mark_computed(row, num_tokens)`: the first `num_tokens` tokens can be hit.
    - `access(row, now)`: note an access for the eviction policy.
    - `num_free()`: number of free blocks on the device.
    - `check_reader()`, `check_caller()`: raise RuntimeError in a wrong thread or during another call.
    - `is_on_host(row)`, `num_unique_blocks(rows)`: the tier, and the number of blocks of rows.
    - `num_blocks_back(rows, num_slots)`: blocks for a swap-in with more slots, now and in all.
    - `swap_out(rows, held)`, `swap_in(rows)`: pairs of blocks to copy, or None if they do not fit.
    - `free(held)`: release a row.

    Args:
        manager: The manager. It has no other rows.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        instance(manager, KVCacheManager, "manager")
        self._manager, self._native = manager, manager._native
        native = self._native
        self.append_slots, self.mark_computed = native.append_slots, native.mark_computed
        self.access, self.num_free = native.access, native.num_free
        self.check_reader, self.check_caller = native.check_reader, native.check_caller
        self.is_on_host, self.num_unique_blocks = native.is_on_host, native.num_unique_blocks
        self.num_blocks_back = native.num_blocks_back
        self.swap_out, self.swap_in, self.free = native.swap_out, native.swap_in, native.free_held

    def admit(
        self, held: Sequence[HeldRow], hits: Sequence[np.ndarray], encoder: HeldRow | None = None
    ) -> bool:
        """Admit the first row after a hit, fork the others from it, and admit an encoder.

        Returns:
            False if the rows do not fit. Nothing has changed.
        """
        chains = [self._chain(each) for each in held]
        cross = None if encoder is None else self._chain(encoder)
        return self._native.admit_held(held, chains, hits, encoder, cross)

    def fork(self, parent: HeldRow, child: HeldRow) -> None:
        """Admit a row that shares all blocks of another one."""
        self._native.fork_held(parent.row, child, self._chain(child))

    def blocks(self, held: HeldRow) -> list[int]:
        """Return the blocks of a row on the device."""
        return self._native.blocks(held.row, 0).tolist()

    def reset(self, device: bool, host: bool) -> bool:
        """Clear the cache of one or both tiers. Returns False, and changes nothing, if one is in use."""
        self.check_caller()
        pools = [self._native.pool] if device else []
        if host and self._native.host is not None:
            pools.append(self._native.host)
        return core.reset_pools(pools)

    def check(self, held: Sequence[HeldRow]) -> None:
        """Raise RuntimeError unless these are all rows, and agree with the manager. For tests."""
        check_invariants(self._manager)
        rows = [each.row for each in held]
        if len({*rows}) != len(rows) or self._native.num_rows != len(rows):
            raise RuntimeError(f"{self._native.num_rows} rows are in use, but {rows} are known")
        for each in held:
            num_tokens, num_ids = (
                self._native.num_computed_tokens(each.row),
                each.request.num_tokens,
            )
            if not num_tokens == each.num_tokens == num_ids:
                raise RuntimeError(
                    f"row {each.row} has {num_tokens} tokens with slots, a recorded count of "
                    f"{each.num_tokens}, and {num_ids} known ids"
                )
            if not self.is_on_host(each.row) and each.table not in (None, self.blocks(each)):
                raise RuntimeError(
                    f"row {each.row} has blocks {self.blocks(each)}, but the returned table is "
                    f"{each.table} (did the caller change a returned list?)"
                )

    def _chain(self, held: HeldRow) -> core.TokenChain:
        return held.request.chain(self._manager._requests.chain_key)
