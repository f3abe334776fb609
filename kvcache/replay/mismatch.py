"""A wrong token that a verified replay found, and its text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mismatch:
    """A token whose stored KV is not its own; `block_column`: its place in the block table.

    `group`: where there are several. `is_state`: it is the recurrent state behind the token that is
    wrong (of token 0, maybe the zeros before it); else None.
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
