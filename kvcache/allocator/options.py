# SPDX-License-Identifier: Apache-2.0
"""Validates a manager's options and the arguments that `free` passes to eviction policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypedDict

from kvcache.allocator.hashing import DEFAULT_ALGORITHM, DEFAULT_SEED, hash_bytes_of
from kvcache.allocator.hashing import hash_seed as first_parent
from kvcache.checks import MAX_INT64, flag, integer, num_entries, number, one_of, shown, text
from kvcache.native.load import core

HOST_WRITES = ("back", "through")


class PolicyArguments(TypedDict, total=False):
    """Options of `CacheOptions` that do not depend on a plan or on the size of a host tier.

    Used by type checkers.
    """

    retention_interval: int | None
    hash_block_size: int | None
    watermark: float
    fence_frees: bool
    engine_copies_states: bool
    enable_events: bool
    prefault: bool
    explain_misses: int | None
    hash_seed: str
    hash_algorithm: str
    hash_bytes: int | None
    num_hash_lookahead_tokens: int
    eviction: str
    eviction_options: Mapping[str, float] | None
    host_eviction: str
    host_eviction_options: Mapping[str, float] | None
    host_write: str
    min_gain_to_write: float | None


class CacheArguments(PolicyArguments, total=False):
    """Options of `CacheOptions` that `KVCacheManager` accepts as keyword arguments.

    Used by type checkers and editors.
    """

    max_num_reqs: int | None
    num_host_blocks: int


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Options for a manager's caching, eviction and statistics. Pool sizes and cache groups are
    passed to the manager separately.

    Sizes are at most 2**31 - 1. An invalid value raises a ValueError or TypeError that names the
    option.

    >>> CacheOptions(num_host_blocks=1)
    Traceback (most recent call last):
    ValueError: num_host_blocks is 1: expected 2 to 2147483647 (the null block is counted)
    """

    # To add an option, add a field here, a line in `_native`, an entry in `PolicyArguments` or
    # `CacheArguments`, a field of `ManagerOptions` (csrc/core/manager/options.h, its range in
    # options.cpp), and a line of csrc/python/options.cpp.

    enable_caching: bool = True
    """Whether later requests can hit full blocks of known tokens. If False, options for cached blocks
    (retention, hashes, eviction, events, misses, writes to the host) have no effect.
    """

    retention_interval: int | None = None
    """Interval, in tokens, between the possible hit positions for which sliding-window blocks and
    recurrent states are cached.

    A positive interval must be a multiple of the granularity of hits. None: all hits can be served. 0:
    only the longest hit of an identical prompt, and a hit that ends with a prefix that full-attention
    groups have cached for another request (`CachedPrefix.num_shared_tokens`). N: in addition, hits that
    end at multiples of N. Blocks that none of these hits needs are not cached, so other blocks stay
    cached longer. Groups of other kinds are not affected; without a cached group of sliding windows or
    recurrent states, a manager accepts only None. vLLM's option `prefix_cache_retention_interval` is
    equivalent.
    """

    num_preallocate_tokens: int = 64
    """Number of tokens to preallocate.

    When a request needs a new block, `ceil(num_preallocate_tokens / block_size)` additional blocks are
    allocated, limited by `max_model_len` and the number of free blocks.
    """

    max_num_reqs: int | None = None
    """Maximum number of admitted requests (rows), at least 1. None: no limit."""

    hash_block_size: int | None = None
    """Tokens per hash, a divisor of every block size.

    If it is smaller than a block, hits may end inside a block. The plan then copies the matching
    part into a new block of the request. None: the greatest common divisor of all block sizes, and
    hits consist of whole blocks only.
    """

    watermark: float = 0.0
    """Fraction of all blocks, from 0 to 1, that admission and preallocation leave free."""

    fence_frees: bool = False
    """Whether released blocks can be reused only after `report` for all steps planned so far.

    Required if a worker reads a step's pages outside the step's stream, or if loads may fail. A worker
    that uses a single stream does not need fences for its own steps.
    """

    engine_copies_states: bool = False
    """Whether `admit`, `extend` and `advance` accept recurrent groups. No effect without such groups.

    When a call moves a request's state to a new page, the engine must copy the state from the page
    that was previously last in the request's table. The old page can be reused after the report of
    the last planned step. In each engine step, the engine must therefore call `step()` before these
    methods, and call `report` for the previous step. If all requests are served by `step`, this option
    is not needed, because plans contain the copies. For groups with `num_speculative_blocks`, see
    "Drafts and recurrent states" in `docs/hybrid_models.md`.
    """

    enable_events: bool = False
    """Whether to record events for blocks that enter or leave the cache (`drain_events`)."""

    prefault: bool = True
    """Whether the manager commits the memory of its block pools at construction.

    If False, the first calls that use a block wait until the operating system has committed and cleared
    the block's memory. Nothing is committed if the pools need more than 64 MiB and more than half of
    the memory available to the process (`MemAvailable` and the limits of its control groups).
    """

    explain_misses: int | None = None
    """Whether to record why tokens of a request are not found in the cache
    (`PrefixCache.explain`, `PrefixCacheStats.missed_tokens`). N: one in N blocks that leave the
    cache is recorded, selected by hash. 1: all blocks are recorded. The most recent records are
    kept: at least 262,144, and at least four times the number of blocks in the pools divided by N.
    Each record uses 8 bytes. None: nothing is recorded.
    """

    hash_seed: str = DEFAULT_SEED
    """Seed whose hash is the parent of first blocks."""

    hash_algorithm: str = DEFAULT_ALGORITHM
    """Hash algorithm, which is also reported in events: "sha256_cbor", "xxh3_128_cbor" or "engine:NAME".
    "xxh3_128_cbor" is faster but not cryptographic: a client that chooses tokens can construct two
    prompts with the same hash. With "engine:NAME", the engine computes the hashes, and every request
    must contain them (`Request.block_hashes`).
    """

    hash_bytes: int | None = None
    """Bytes per hash, 1 to 32, for an "engine:NAME" algorithm. None: 32."""

    num_hash_lookahead_tokens: int = 0
    """Number of tokens after a block that the block's hash also covers, for an "engine:NAME" algorithm.

    The KV that a drafter (EAGLE, MTP) writes at a block's last position depends on the tokens after the
    block. If hashes cover these tokens, a drafting group need not drop the last block of a hit. A block
    is cached once these tokens are known.
    """

    eviction: str = "lru"
    """Policy that chooses which cached block to evict: "lru" (least recently released), or another of
    `eviction_names()`. Regardless of the policy, a block is evicted only after the blocks that follow it
    in a chain, and pinned blocks (`pin`) are evicted last.
    """

    eviction_options: Mapping[str, float] | None = None
    """Options of the eviction policy by name. None: its defaults."""

    num_host_blocks: int = 0
    """Number of pages in a second tier in host memory, including its null block.

    At least 2, or 0 for no host tier. The host tier stores swapped-out rows (`swap_out` of `step`)
    and cached blocks evicted from the device, which can be hit and loaded again. With a host tier,
    every step must be reported: other requests can hit loaded blocks, and host pages can be reused,
    only after the step that uses them has been reported.
    """

    host_eviction: str = "lru"
    """Eviction policy for host pages, one of `host_eviction_names()`.

    Policies other than "lru" require a host tier (`num_host_blocks`), and "learned" also requires
    `eviction="learned"`.
    """

    host_eviction_options: Mapping[str, float] | None = None
    """Options of the host's eviction policy by name. None: its defaults."""

    host_write: str = "back"
    """When a cached block is written to the host (no effect without a host tier). "back": when the
    device evicts the block. "through": in the plan after the one that filled the block, and when the
    device evicts it, unless the host already has it.
    """

    min_gain_to_write: float | None = None
    """Minimum gain in expected hits for a block to be written to the host, from 0 to 1, such as 0.05.
    None: every block is written. The gain is the number of hits expected for the block on the host
    minus the number expected for other blocks if they used the page. A higher value reduces the number
    of bytes moved per hit, but also the number of hits. Requires "learned" for `eviction` and
    `host_eviction`.
    """

    def __post_init__(self) -> None:
        checked_watermark(self.watermark)
        first_parent(self.hash_seed, "hash_seed")
        self._native().check_optional()

    @classmethod
    def from_arguments(cls, caller: str, /, **options: object) -> CacheOptions:
        """Create options from the keyword arguments of `caller`.

        Raises TypeError for unknown options (see `check_names`).
        """
        cls.check_names(caller, options)
        return cls(**options)

    @classmethod
    def check_names(cls, caller: str, options: Iterable[str]) -> None:
        """Raise TypeError for an unknown option.

        The message lists `caller` and the known options.
        """
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                raise TypeError(
                    f"{caller}: option {name!r} is unknown: expected one of {', '.join(names)}"
                )

    def native_of(
        self,
        groups: Sequence[tuple[core.AttentionKind, int, bool, bool, bool]],
        num_gpu_blocks: int,
        max_model_len: int,
    ) -> core.ManagerOptions:
        """Create the native options of a manager with these groups.

        Args:
            groups: (kind, tokens per block, drafts, cached, transferred) of each group.
            num_gpu_blocks: Number of blocks, including the null block.
            max_model_len: Maximum number of tokens of a request.
        """
        native = self._native()
        native.groups = list(groups)
        native.num_gpu_blocks = num_gpu_blocks
        native.max_model_len = max_model_len
        native.watermark_blocks = watermark_blocks(self.watermark, native.num_gpu_blocks)
        return native

    def _native(self) -> core.ManagerOptions:
        native = core.ManagerOptions()
        native.enable_caching = flag(self.enable_caching, "enable_caching")
        if self.retention_interval is not None:
            native.retention_interval = self._integer("retention_interval")
        native.num_preallocate_tokens = self._integer("num_preallocate_tokens")
        if self.max_num_reqs is not None:
            native.max_num_reqs = self._integer("max_num_reqs")
        if self.hash_block_size is not None:
            native.hash_block_size = self._integer("hash_block_size")
        native.hash_bytes = hash_bytes_of(self.hash_algorithm, self.hash_bytes)
        self._integer("num_hash_lookahead_tokens")
        native.fence_frees = flag(self.fence_frees, "fence_frees")
        native.engine_copies_states = flag(self.engine_copies_states, "engine_copies_states")
        native.enable_events = flag(self.enable_events, "enable_events")
        native.prefault = flag(self.prefault, "prefault")
        if self.explain_misses is not None:
            native.explain_misses = self._integer("explain_misses")
        native.eviction = _eviction(self.eviction, self.eviction_options, "eviction")
        native.num_host_blocks = self._integer("num_host_blocks")
        of_host, make = self.host_eviction_options, core.Eviction.for_host
        native.host_eviction = _eviction(self.host_eviction, of_host, "host_eviction", make)
        native.writes_through = one_of(self.host_write, "host_write", HOST_WRITES) == "through"
        if self.min_gain_to_write is not None:
            native.min_gain_to_write = number(self.min_gain_to_write, "min_gain_to_write")
        return native

    def _integer(self, name: str) -> int:
        """Return an option as an integer. Native code checks its range."""
        return integer(getattr(self, name), name, -MAX_INT64, MAX_INT64)


def watermark_blocks(watermark: float, num_gpu_blocks: int) -> int:
    """Convert a fraction (0 to 1) of all blocks to a number of blocks."""
    return int(checked_watermark(watermark) * num_gpu_blocks)


def checked_watermark(watermark: float) -> float:
    """Return a fraction from 0 to 1 as a float. Raises TypeError or ValueError."""
    share = number(watermark, "watermark", "a fraction from 0 to 1")
    if not 0 <= share <= 1:
        raise ValueError(f"watermark is {shown(watermark)}: expected a fraction from 0 to 1")
    return share


def _eviction(
    policy: str,
    options: Mapping[str, float] | None,
    name: str,
    make: Callable[[str, dict[str, float]], core.Eviction] = core.Eviction,
) -> core.Eviction:
    if not isinstance(policy, str):
        raise TypeError(f"{name} is {shown(policy)}: expected the name of a policy")
    text(policy, name)
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"{name}_options is {shown(options)}: expected a dict of numbers")
    numbers = {}
    for option, value in (options or {}).items():
        if not isinstance(option, str):
            raise TypeError(f"{name}_options has {option!r}: {shown(value)}: expected a number")
        numbers[text(option, f"a name in {name}_options")] = number(
            value, f"{name}_options[{option!r}]"
        )
    return make(policy, numbers)


def checked_session(session: str) -> str:
    """Validate the name of a session that pins blocks. Raises TypeError or ValueError."""
    return text(session, "session")


def checked_seconds(value: float, name: str, most: float = 2.0**50) -> float:
    """Return a time in seconds, which must be finite and non-negative, as a float."""
    seconds = number(value, name)
    if not 0 <= seconds < most:
        raise ValueError(f"{name} is {shown(value)}: expected a finite number of 0 or more")
    return seconds


def checked_retention(
    retention: Sequence[tuple[int, int, int, float | None]],
) -> list[tuple[int, int, int, int]]:
    """Convert each range to (first token, end, priority, milliseconds or -1 for no limit)."""
    if not isinstance(retention, list | tuple):
        raise TypeError(f"retention is {shown(retention)}: expected a list of tuples")
    return [_checked_range(f"retention[{i}]", each) for i, each in enumerate(retention)]


def _checked_range(name: str, value: object) -> tuple[int, int, int, int]:
    if not isinstance(value, list | tuple) or num_entries(value, name) != 4:
        raise TypeError(
            f"{name} is {shown(value)}: expected (first token, stop, priority, seconds or None)"
        )
    first = integer(value[0], f"{name}: first token")
    stop = integer(value[1], f"{name}: stop", least=first)
    priority = integer(value[2], f"{name}: priority", most=100)
    if value[3] is None:
        return first, stop, priority, -1
    return first, stop, priority, int(checked_seconds(value[3], f"{name}: seconds") * 1000)
