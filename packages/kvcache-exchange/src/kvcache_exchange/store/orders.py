# SPDX-License-Identifier: Apache-2.0
"""The messages between a store tier in the scheduler and its ranks. All messages can be pickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvcache_exchange.store.identity import Share
from kvcache_exchange.store.value_format import BlockKey


class LookUp(NamedTuple):
    """Look up which of these blocks the store contains."""

    number: int
    keys: tuple[BlockKey, ...]


class PageOfBlock(NamedTuple):
    """A block to load: its key, its page, and the index of its first token."""

    key: BlockKey
    page: int
    first_token: int


class LoadBlocks(NamedTuple):
    """Load blocks into pages."""

    number: int
    blocks: tuple[PageOfBlock, ...]


class SaveBlocks(NamedTuple):
    """Store blocks. `pages` contains each block's page on the medium from which the tier stores
    blocks.
    """

    number: int
    keys: tuple[BlockKey, ...]
    pages: tuple[int, ...]


class GiveUp(NamedTuple):
    """Abandon a lookup or a load. `is_late` indicates that its deadline has passed."""

    number: int
    is_late: bool


class RemoveBlocks(NamedTuple):
    """Remove invalid blocks of a version of the weights from the store, before any other access to
    the store.
    """

    number: int
    keys: tuple[BlockKey, ...]
    version: str


class StartEpoch(NamedTuple):
    """Use the weights' new version for all later orders."""

    version: str


Order = LookUp | LoadBlocks | SaveBlocks | GiveUp | RemoveBlocks | StartEpoch


class Found(NamedTuple):
    """The result of a `LookUp`: the blocks that the store contains."""

    number: int
    keys: frozenset[BlockKey]


class Loaded(NamedTuple):
    """The result of a `LoadBlocks`. The rank does not write to the blocks after reporting it.

    `failed_at` is the first token that was not loaded, and `error` is the reason. Both are None if
    all blocks were loaded.
    """

    number: int
    failed_at: int | None
    error: str | None


class Saved(NamedTuple):
    """The result of a `SaveBlocks`. `outcomes` contains "stored", "known", "refused" or "dropped"
    for each block, or is None if the call failed.
    """

    number: int
    outcomes: tuple[str, ...] | None


class Removed(NamedTuple):
    """The result of a `RemoveBlocks`: the store no longer contains any of the blocks."""

    number: int


class Held(NamedTuple):
    """Blocks of the rank's `epoch` that the store contained when it was opened."""

    keys: tuple[BlockKey, ...]
    epoch: int


class Evicted(NamedTuple):
    """Blocks of the rank's `epoch` that the store has evicted or removed."""

    keys: tuple[BlockKey, ...]
    epoch: int


Result = Found | Loaded | Saved | Removed | Held | Evicted


@dataclass
class StoreResults:
    """The report of a rank to its tier.

    Attributes:
        entries: Results in order of completion.
        counts: Increments of the fields of `StoreStats`, by name.
        may_write: Whether the rank accepts `SaveBlocks`.
        is_dead: Whether the rank's circuit breaker is open.
        is_busy: Whether the rank has unfinished work other than loads.
    """

    entries: list[Result] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    may_write: bool = True
    is_dead: bool = False
    is_busy: bool = False


@dataclass(frozen=True)
class RankDescription:
    """Properties of a rank that a tier must know.

    Attributes:
        identity: `cache_identity` of the manager for which the rank was created.
        model: The `model` string.
        rank: The `rank` argument.
        fingerprint: The fingerprint of the rank's blocks.
        num_pages: Number of device pages.
        num_host_pages: Number of host pages. 0: none.
        num_writes: Maximum number of blocks that can be stored concurrently.
        num_per_call: Maximum number of blocks per call to the store.
        timeout_s: Seconds after which the rank abandons a load.
        knows_keys: Whether the store reports its keys and evictions.
    """

    identity: str
    model: str
    rank: str | Share
    fingerprint: bytes
    num_pages: int
    num_host_pages: int
    num_writes: int
    num_per_call: int
    timeout_s: float
    knows_keys: bool


class StoreRankLink(Protocol):
    """A `StoreRank`, or a connection to one in another process.

    A connection must deliver orders and step plans in the sequence in which they were sent: a rank
    receives an order after all earlier plans and before all later plans. Therefore, blocks can be
    reused as soon as their load is abandoned, without waiting for the rank.

    `begin` and `take_results` must not raise an exception if the rank has died. Orders to a dead
    rank are lost; call `StoreTier.replace_rank` to replace the rank.
    """

    description: RankDescription

    def begin(self, orders: Sequence[Order]) -> None:
        """Send orders to the rank, without waiting."""

    def take_results(self) -> StoreResults | None:
        """Return the next result of `StoreRank.take_results`, in order and without waiting. None if
        no result has arrived.
        """

    def close(self, timeout_s: float) -> bool:
        """Close the rank. Return whether all of its calls to the store have ended."""
