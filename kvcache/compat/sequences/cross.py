# SPDX-License-Identifier: Apache-2.0
"""Cross-attention tables: the encoder blocks of each group."""

from __future__ import annotations

from kvcache.compat.sequences.tokens import TokenSource
from kvcache.native.load import core


class CrossTables:
    """Cross-attention tables. Each table is a row of the native manager and never uses cached blocks."""

    def __init__(self, native: core.Manager, tokens: TokenSource) -> None:
        self._native = native
        self._tokens = tokens
        self.by_request: dict[object, int] = {}  # rows keyed by request id; updated by native code

    def rows(self) -> list[int]:
        """Return all rows."""
        return [*self.by_request.values()]

    def row_on(self, request_id: object, on_host: bool) -> int | None:
        """Return the row of a group's table if the table is on the given tier, else None."""
        row = self.by_request.get(request_id)
        return row if row is not None and self._native.is_on_host(row) == on_host else None

    def blocks(self, request_id: object) -> list[int]:
        """Return the blocks of a group's table, which must be on the device."""
        row = self.by_request.get(request_id)
        if row is None:
            raise ValueError(
                f"group {request_id!r} has no cross-attention table: expected a group that "
                "was allocated with an encoder"
            )
        core.check_tier(self._native, row, "the encoder of group", request_id, on_host=False)
        return self._native.blocks(row, 0).tolist()

    def check_new(self, request_id: object) -> None:
        """Check that the group has no table."""
        if request_id in self.by_request:
            raise ValueError(
                f"seq_group {request_id!r} already has a cross-attention table: expected "
                "free_cross first"
            )

    def new_row(self, request_id: object, num_tokens: int) -> tuple:
        """Return a new table for `num_tokens` tokens, in the format that `_take_rows` expects."""
        return self.by_request, request_id, self._tokens.unread(1), num_tokens
