# SPDX-License-Identifier: Apache-2.0
"""The mixes of cache groups that random tests use, and what a group's attention reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvcache import GroupSpec
from kvcache.kinds import AttentionKind, register

TOKENS, STATE, ENCODER, CIRCULAR = "tokens", "state", "encoder", "circular"
FOREVER = 10**9

# Position of the first token whose KV a group stores. The first entry applies to uncached groups,
# which have no KV for the tokens of the prefix hit. The second applies to groups that are not
# transferred, which have no KV for the external tokens either.
Begins = tuple[int, int]
Cell = tuple[int, int | str, int]  # (page, slot, position of the token whose KV is stored there)


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

    def hits_from(self, n):
        """Return the first token whose KV a hit of n tokens provides."""
        return self.reads_from(n) if self.cached else n


def state_column(group: ModelGroup, num_tokens: int, sure: int) -> int:
    """Return the table column of the state after `num_tokens` tokens, for a step whose drafts begin
    at `sure`.
    """
    return (sure - 1) // group.block_size + max(num_tokens - sure, 0)


def cells_of(
    group: ModelGroup, blocks: list[int], position: int, sure: int, begins: Begins
) -> list[Cell]:
    """Return a group's cells read by the token at `position` in a step whose drafts begin at `sure`."""
    size = group.block_size
    if group.pages == STATE:
        return [(blocks[state_column(group, position, sure)], STATE, position - 1)]
    first = max(group.reads_from(position), 0 if group.cached else begins[not group.transferred])
    return [(blocks[i // size % group.num_places()], i % size, i) for i in range(first, position)]


@register("test_sinks_and_stride")
class Strided(AttentionKind):
    """A user-defined attention kind. A token attends to the earlier tokens of its own stride and to
    all tokens of the previous stride.
    """

    def __init__(self, *, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens // self.stride - 1, 0) * self.stride


class Chooser:
    """Draws choices from a seeded generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def pick(self, values: Sequence):
        return values[self.integer(0, len(values) - 1)]

    def chance(self, one_in: int) -> bool:
        return self.integer(1, one_in) == 1


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
    lambda size: GroupSpec("full_attention", size),
    lambda size: ModelGroup(size, keeps_all=True),
)
UNCACHED = Kind(
    lambda size: GroupSpec("full_attention", size, cached=False),
    lambda size: ModelGroup(size, keeps_all=True, cached=False),
)
UNCACHED_WINDOW = Kind(
    lambda size: GroupSpec("sliding_window", size, {"window": 6}, cached=False),
    lambda size: ModelGroup(size, lambda n: max(n - 5, 0), cached=False),
)


def _circular(window: int, buffer: int, cached: bool) -> Kind:
    return Kind(
        lambda size: GroupSpec(
            "circular_window", size, {"window": window, "buffer": buffer}, cached=cached
        ),
        lambda size: ModelGroup(
            size,
            lambda n: max(n - window + 1, 0),
            CIRCULAR,
            cached=False,
            buffer=buffer,
            ends_caching=cached,
        ),
    )


def chunked_of(chunk: int) -> Kind:
    return Kind(
        lambda size: GroupSpec("chunked_local", size, {"chunk_size": chunk}),
        lambda size: ModelGroup(size, lambda n: n // chunk * chunk),
    )


CHUNKED = chunked_of(10)


def _recurrent(num_speculative: int) -> Kind:
    options = {"num_speculative_blocks": num_speculative} if num_speculative else {}
    return Kind(
        lambda size: GroupSpec("recurrent", size, options),
        lambda size: ModelGroup(
            size, lambda n: max(n - 1, 0), STATE, num_speculative=num_speculative, sparse=True
        ),
    )


RECURRENT, RECURRENT_1, RECURRENT_3 = _recurrent(0), _recurrent(1), _recurrent(3)
CROSS = Kind(
    lambda size: GroupSpec("cross_attention", size),
    lambda size: ModelGroup(size, pages=ENCODER),
)
STRIDED = Kind(
    lambda size: GroupSpec("test_sinks_and_stride", size, {"stride": 6}),
    lambda size: ModelGroup(size, lambda n: max(n // 6 - 1, 0) * 6),
)

# Manager configurations to drive: (kinds with block sizes, hash block size).
MIXES = [
    ([(FULL, 4)], None),
    ([(window_of(6), 4)], None),
    ([(FULL, 4), (window_of(6), 4)], None),
    ([(FULL, 4), (window_of(5), 2), (CHUNKED, 4)], None),
    ([(FULL, 4), (RECURRENT, 4)], None),
    ([(RECURRENT, 4), (window_of(9), 2), (RECURRENT, 4)], None),
    ([(FULL, 8)], 2),
    ([(FULL, 8), (window_of(5), 4)], 2),
    ([(CHUNKED, 8), (window_of(7), 8)], 4),
    ([(FULL, 8), (RECURRENT, 4)], 2),
    ([(FULL, 4), (CROSS, 2)], None),
    ([(STRIDED, 4), (FULL, 2)], None),
    ([(window_of(1), 2), (STRIDED, 2)], 1),
    ([(FULL, 8), (FULL, 12)], 2),
    ([(FULL, 6), (window_of(7), 4)], None),
    ([(FULL, 12), (RECURRENT, 8)], 2),
    ([(RECURRENT, 12), (window_of(5), 4), (FULL, 8)], 2),
    ([(RECURRENT, 8), (RECURRENT, 6)], 2),
    ([(FULL, 4), (UNCACHED, 6)], None),
    ([(FULL, 8), (UNCACHED_WINDOW, 4), (RECURRENT, 4)], 2),
    ([(UNCACHED, 4), (UNCACHED_WINDOW, 2)], None),
    ([(FULL, 4), (_circular(6, 13, True), 2)], None),
    ([(FULL, 8), (_circular(5, 12, False), 4), (window_of(6), 4)], 2),
    ([(FULL, 4), (RECURRENT_1, 4)], None),
    ([(FULL, 4), (RECURRENT_3, 4)], None),
    ([(RECURRENT_3, 2), (window_of(9), 2), (RECURRENT_3, 4)], None),
    ([(RECURRENT_3, 1), (FULL, 2)], None),
    ([(FULL, 8), (RECURRENT_3, 4), (RECURRENT_1, 6)], 2),
    ([(RECURRENT_3, 12), (window_of(5), 4), (FULL, 8)], 2),
    ([(FULL, 4), (chunked_of(3), 8)], 1),
    ([(FULL, 2), (window_of(6), 8)], None),
    ([(FULL, 2), (RECURRENT, 4)], 2),
]


def groups_of(
    choose: Chooser, kinds: Sequence[tuple[Kind, int]]
) -> tuple[list[GroupSpec], list[ModelGroup]]:
    """Return the groups of a mix and the matching model groups. Some groups are randomly marked as
    used by a drafter.
    """
    specs, groups = [], []
    for kind, size in kinds:
        group = kind.model(size)
        drafts = group.pages == TOKENS and choose.chance(8)
        options = {"drafts": drafts, "transferred": not choose.chance(8)}
        specs.append(replace(kind.spec(size), **options))
        groups.append(replace(group, **options))
    return specs, groups
