"""The options of a manager, and what `free` takes for eviction, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypedDict

from kvcache.allocator.hashing import DEFAULT_ALGORITHM, DEFAULT_SEED, hash_bytes_of
from kvcache.allocator.hashing import hash_seed as first_parent
from kvcache.checks import MAX_INT64, flag, integer, num_entries, number, shown, text
from kvcache.native.load import core

_MOST_BYTES = 2**62
HOST_WRITES = {
    "back": core.HostWrite.BACK,
    "through": core.HostWrite.THROUGH,
    "selective": core.HostWrite.SELECTIVE,
    "learned": core.HostWrite.LEARNED,
}


class PolicyArguments(TypedDict, total=False):
    """The options of `CacheOptions` that no plan and no host tier gives, for type checkers."""

    hash_block_size: int | None
    watermark: float
    fence_frees: bool
    engine_copies_states: bool
    enable_events: bool
    announce_reused: bool
    track_residency: bool
    stats_window: int
    hash_seed: str
    hash_algorithm: str
    hash_bytes: int | None
    eviction: str
    eviction_options: Mapping[str, float] | None
    host_eviction: str
    host_eviction_options: Mapping[str, float] | None
    host_write: str
    num_hits_to_write: int
    min_gain_to_write: float


class CacheArguments(PolicyArguments, total=False):
    """The options of `CacheOptions` that calls take by keyword, for type checkers and editors."""

    max_num_reqs: int | None
    num_host_blocks: int
    page_bytes: int


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """How a manager caches, evicts, reserves and counts; its sizes and groups are not here.

    All sizes are at most 2**31 - 1. A wrong value is a ValueError or TypeError that names the option.
    A new option is a field here with a line in `_native`, one of `PolicyArguments` or `CacheArguments`,
    one of `ManagerOptions` (csrc/core/manager/options.h, its range in options.cpp) and a line of
    csrc/python/options.cpp.

    >>> CacheOptions(num_host_blocks=1)
    Traceback (most recent call last):
    ValueError: num_host_blocks is 1: expected 2 to 2147483647 (the null block is counted)
    """

    enable_caching: bool = True
    """Whether full blocks of known tokens are hits for later requests."""

    num_preallocate_tokens: int = 64
    """Tokens. When a request needs a block, `ceil(num_preallocate_tokens / block_size)` more are
    taken with it, never beyond `max_model_len` or what is free."""

    max_num_reqs: int | None = None
    """Rows, that is requests admitted at a time, 1 or more; None for as many as come."""

    hash_block_size: int | None = None
    """Tokens per hash, a divisor of every block size. Finer than a block: what is found inside a
    block is copied into the request's own, by the plan. None: the largest divisor, whole blocks
    only."""

    watermark: float = 0.0
    """Share of the blocks, 0 to 1, that admissions and preallocation leave free."""

    fence_frees: bool = False
    """Blocks that a request releases can be used again only when `report` has said that the steps
    planned so far are done. For workers that read a step's pages outside its stream, and where loads
    may fail; a worker on one stream needs no fences for its own steps."""

    engine_copies_states: bool = False
    """`allocate_slots`, `append_slots` and `advance` take recurrent groups: where a call moves a
    request's state to a new page, the engine copies it there from the page that was the last of the
    request's table. A page that is left so can be used again when the step that was issued last is
    reported: such an engine calls `step()` before the calls of each of its own steps, and `report` for
    the one before. With `step` alone, plans say what to copy."""

    enable_events: bool = False
    """`drain_events` returns what entered and left the cache."""

    announce_reused: bool = False
    """Events also name the blocks of the device that a request hits, for readers that join late or keep
    only what is used. Only with `enable_events`."""

    track_residency: bool = False
    """`stats` says how long blocks stayed."""

    stats_window: int = 1000
    """Requests that `stats.recent` counts, 1 or more."""

    hash_seed: str = DEFAULT_SEED
    """Gives the parent of first blocks."""

    hash_algorithm: str = DEFAULT_ALGORITHM
    """How blocks are hashed: "sha256_cbor", or "xxh3_128_cbor", which is faster, but not cryptographic:
    who can choose tokens can then make two prompts of one hash. "engine:NAME" is an algorithm that only
    the engine knows: every request comes with its hashes (`Request.block_hashes`). Events name it."""

    hash_bytes: int | None = None
    """Bytes of every hash, 1 to 32, where the algorithm is the engine's (None: 32)."""

    eviction: str = "lru"
    """Which cached block goes first when its space is needed: "lru" (least recently released), or
    another of `eviction_names()`. Whichever it is, no block goes before one that follows it in a
    chain, and pinned ones (`pin`) go last."""

    eviction_options: Mapping[str, float] | None = None
    """Options of that policy, by name; None for its defaults."""

    num_host_blocks: int = 0
    """Pages of a second tier in host memory, its null block counted: 2 or more, or 0 for none. It
    takes rows that are swapped out (`swap_out` of `step`), and cached blocks that leave the device,
    to be hit and loaded from there. Such a manager needs the reports of its steps: what is loaded
    becomes a hit for others, and the host's page can be used again, when `report` has said that the
    step is done."""

    host_eviction: str = "lru"
    """The same choice for the host's pages, one of `host_eviction_names()`; another than "lru" only
    with a host tier (`num_host_blocks`), and "learned" only where `eviction` is, too."""

    host_eviction_options: Mapping[str, float] | None = None
    """Options of that policy, by name; None for its defaults."""

    host_write: str = "back"
    """When a cached block is written to the host: "back", when it is evicted from the device;
    "through", by the plan after the one that filled it; "selective", after `num_hits_to_write` hits;
    "learned", when it is evicted, but only if enough hits are expected of it there
    (`min_gain_to_write`), which needs "learned" for `eviction` and `host_eviction`. What is evicted
    is written in each mode that would have it there, if it is not there any more."""

    num_hits_to_write: int = 2
    """Hits, 1 or more; see `host_write`."""

    min_gain_to_write: float = 0.05
    """Hits expected of a block on the host, less those that its page is worth to other blocks, 0 to 1;
    see `host_write`. The higher, the fewer bytes are moved for each hit, and the fewer hits there are."""

    page_bytes: int = 0
    """Bytes of a page (`CachePlan.page_bytes`), 0 to 2**62, so that plans can say how many they move;
    0 where it is not known."""

    def __post_init__(self) -> None:
        checked_watermark(self.watermark)
        integer(self.page_bytes, "page_bytes", most=_MOST_BYTES)
        first_parent(self.hash_seed, "hash_seed")
        self._native().check_optional()

    @classmethod
    def from_arguments(cls, caller: str, /, **options: object) -> CacheOptions:
        """The options of a call of `caller`; TypeError as `check_names` raises it."""
        cls.check_names(caller, options)
        return cls(**options)

    @classmethod
    def check_names(cls, caller: str, options: Iterable[str]) -> None:
        """TypeError that names the public function and the known options for a name that is none."""
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
        """The native options of a manager with these groups.

        `groups`: (kind, tokens per block, whether it drafts, is cached, is transferred) each.

        `num_gpu_blocks` counts the null block, `max_model_len` is in tokens.
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
        native.num_preallocate_tokens = self._integer("num_preallocate_tokens")
        if self.max_num_reqs is not None:
            native.max_num_reqs = self._integer("max_num_reqs")
        if self.hash_block_size is not None:
            native.hash_block_size = self._integer("hash_block_size")
        native.hash_bytes = hash_bytes_of(self.hash_algorithm, self.hash_bytes)
        native.fence_frees = flag(self.fence_frees, "fence_frees")
        native.engine_copies_states = flag(self.engine_copies_states, "engine_copies_states")
        native.enable_events = flag(self.enable_events, "enable_events")
        native.announce_reused = flag(self.announce_reused, "announce_reused")
        if self.announce_reused and not self.enable_events:
            raise ValueError("announce_reused is True: expected False without enable_events")
        native.track_residency = flag(self.track_residency, "track_residency")
        native.stats_window = self._integer("stats_window")
        native.eviction = _eviction(self.eviction, self.eviction_options, "eviction")
        native.num_host_blocks = self._integer("num_host_blocks")
        native.host_eviction = _eviction(
            self.host_eviction,
            self.host_eviction_options,
            "host_eviction",
            make=core.Eviction.for_host,
        )
        native.host_write = _host_write(self.host_write)
        native.num_hits_to_write = self._integer("num_hits_to_write")
        native.min_gain_to_write = number(self.min_gain_to_write, "min_gain_to_write")
        return native

    def _integer(self, name: str) -> int:
        """An option as an integer; its range is checked natively."""
        return integer(getattr(self, name), name, -MAX_INT64, MAX_INT64)


def watermark_blocks(watermark: float, num_gpu_blocks: int) -> int:
    """Blocks that this share of all, 0 to 1, stands for."""
    return int(checked_watermark(watermark) * num_gpu_blocks)


def checked_watermark(watermark: float) -> float:
    """A share of 0 to 1. TypeError or ValueError."""
    share = number(watermark, "watermark", "a share of 0 to 1")
    if not 0 <= share <= 1:
        raise ValueError(f"watermark is {shown(watermark)}: expected a share of 0 to 1")
    return share


def _eviction(
    policy: str,
    options: Mapping[str, float] | None,
    name: str,
    make: Callable[[str, dict[str, float]], core.Eviction] = core.Eviction,
) -> core.Eviction:
    if not isinstance(policy, str):
        raise TypeError(f"{name} is {shown(policy)}: expected the name of a policy")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"{name}_options is {shown(options)}: expected a dict of numbers")
    numbers = {}
    for option, value in (options or {}).items():
        if not isinstance(option, str):
            raise TypeError(
                f"{name}_options has {option!r}: {shown(value)}: expected a number by name"
            )
        numbers[option] = number(value, f"{name}_options[{option!r}]")
    return make(policy, numbers)


def _host_write(host_write: str) -> core.HostWrite:
    if not isinstance(host_write, str) or host_write not in HOST_WRITES:
        raise ValueError(
            f"host_write is {shown(host_write)}: expected one of {', '.join(HOST_WRITES)}"
        )
    return HOST_WRITES[host_write]


def checked_session(session: str) -> str:
    """The name of a session that pins."""
    return text(session, "session")


def checked_seconds(value: float, name: str, most: float = 2.0**50) -> float:
    """Seconds of a clock, 0 or more and finite."""
    seconds = number(value, name)
    if not 0 <= seconds < most:
        raise ValueError(f"{name} is {shown(value)}: expected 0 or more, and a finite number")
    return seconds


def checked_retention(
    retention: Sequence[tuple[int, int, int, float | None]],
) -> list[tuple[int, int, int, int]]:
    """(first token, stop, priority, milliseconds or -1 for ever) each."""
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
