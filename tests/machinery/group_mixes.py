# SPDX-License-Identifier: Apache-2.0
"""Kinds of cache groups, and what a group's attention reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcache import GroupSpec

TOKENS, STATE, ENCODER, CIRCULAR = "tokens", "state", "encoder", "circular"
FOREVER = 10**9


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass
class ModelGroup:
    """A cache group. `reads_from(n)`: first token to which token n or any later token attends."""

    block_size: int
    reads_from: Callable[[int], int] = lambda n: 0
    pages: str = TOKENS
    keeps_all: bool = False  # reads_from always returns 0
    drafts: bool = False
    cached: bool = True
    transferred: bool = True
    buffer: int = 0  # CIRCULAR: token capacity of a row, before rounding up to whole blocks
    ends_caching: bool = False  # CIRCULAR: the group is declared as cached
    num_speculative: int = 0  # STATE: maximum number of drafts in a step
    sparse: bool = False  # the retention interval limits which blocks are cached

    def num_places(self):
        """Return the fixed number of blocks per row, or FOREVER if the number is not fixed."""
        return ceil_div(self.buffer, self.block_size) if self.pages == CIRCULAR else FOREVER


def state_column(group: ModelGroup, num_tokens: int, sure: int) -> int:
    """Return the table column of the state after `num_tokens` tokens, for a step whose drafts begin
    at `sure`.
    """
    return (sure - 1) // group.block_size + max(num_tokens - sure, 0)


@dataclass(frozen=True)
class Kind:
    spec: Callable[[int], GroupSpec]  # a function of the block size
    model: Callable[[int], ModelGroup]


def window_of(window: int) -> Kind:
    return Kind(
        lambda size: GroupSpec("sliding_window", size, {"window": window}),
        lambda size: ModelGroup(size, lambda n: max(n - window + 1, 0), sparse=True),
    )


FULL = Kind(
    lambda size: GroupSpec("full_attention", size), lambda size: ModelGroup(size, keeps_all=True)
)


def chunked_of(chunk: int) -> Kind:
    return Kind(
        lambda size: GroupSpec("chunked_local", size, {"chunk_size": chunk}),
        lambda size: ModelGroup(size, lambda n: n // chunk * chunk),
    )


def _recurrent(num_speculative: int) -> Kind:
    options = {"num_speculative_blocks": num_speculative} if num_speculative else {}
    return Kind(
        lambda size: GroupSpec("recurrent", size, options),
        lambda size: ModelGroup(
            size, lambda n: max(n - 1, 0), STATE, num_speculative=num_speculative, sparse=True
        ),
    )


RECURRENT, RECURRENT_1 = _recurrent(0), _recurrent(1)
CROSS = Kind(
    lambda size: GroupSpec("cross_attention", size), lambda size: ModelGroup(size, pages=ENCODER)
)
