# SPDX-License-Identifier: Apache-2.0
"""Describes a wrong token that a verified replay has found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mismatch:
    """A token whose stored KV differs from the expected KV.

    Attributes:
        request: Index of the request.
        token: Position of the token.
        block_column: Column of the block in the block table.
        block_id: The block.
        group: The cache group, if there are several.
        is_state: Whether the recurrent state after the token is wrong. For token 0, the wrong state
            may also be the zeros before the token. None for groups without states.
    """

    request: int
    token: int
    block_column: int
    block_id: int
    group: int | None = None
    is_state: bool | None = None

    def __str__(self) -> str:
        what = "state" if self.is_state else "KV"
        group = "" if self.group is None else f", group {self.group}"
        return (
            f"request {self.request}, token {self.token}: wrong {what} in block {self.block_id} "
            f"(block column {self.block_column}{group})"
        )
