"""Cross-attention tables: the blocks of encoders, by the group they belong to."""

from __future__ import annotations

from kvcache.allocator.sequences.tokens import TokenSource
from kvcache.native.load import core


class CrossTables:
    """Each is a row of the native manager. Its tokens are never read: they are never hits."""

    def __init__(self, native: core.Manager, tokens: TokenSource) -> None:
        self._native = native
        self._tokens = tokens
        self.by_request: dict[object, int] = {}  # rows; changed natively

    def rows(self) -> list[int]:
        """All of them."""
        return [*self.by_request.values()]

    def row_on(self, request_id: object, on_host: bool) -> int | None:
        """The row of a group that has one on this tier."""
        row = self.by_request.get(request_id)
        return row if row is not None and self._native.is_on_host(row) == on_host else None

    def blocks(self, request_id: object) -> list[int]:
        """Those of a table on the device."""
        row = self.by_request.get(request_id)
        if row is None:
            raise ValueError(
                f"group {request_id!r} has no cross-attention table: expected one that was "
                "allocated as an encoder-decoder group"
            )
        core.check_tier(self._native, row, "the encoder of group", request_id, on_host=False)
        return self._native.blocks(row, 0).tolist()

    def check_new(self, request_id: object) -> None:
        """That the group has none."""
        if request_id in self.by_request:
            raise ValueError(
                f"seq_group {request_id!r} has a cross-attention table already: expected "
                "free_cross first"
            )

    def new_row(self, request_id: object, num_tokens: int) -> tuple:
        """A table for so many tokens, as `_take_rows` takes it."""
        return self.by_request, request_id, self._tokens.unread(1), num_tokens
