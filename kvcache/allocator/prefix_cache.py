# SPDX-License-Identifier: Apache-2.0
"""A view of a manager's prefix cache, with lookups, hashes, eviction, statistics and events."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcache.allocator.event_stream import events_of
from kvcache.allocator.hashing import HashKey
from kvcache.allocator.misses import MissReport, report_of
from kvcache.allocator.options import checked_seconds, checked_session
from kvcache.allocator.request import Request
from kvcache.allocator.stats import PrefixCacheStats, stats_of
from kvcache.checks import flag, instance, integer, num_entries, one_of, shown, text
from kvcache.events import CacheEvent
from kvcache.native.load import core
from kvcache.specs import ContextParallel, GroupSpec

Ids = np.ndarray | Sequence[int]
INITIAL_VERSION = ""  # of the weights before the first `start_epoch`


class CachedTokens(NamedTuple):
    """The number of a request's cached tokens on the device, the number on the device and the host tier
    together, and the number of host blocks to load.
    """

    on_device: int
    with_host: int
    num_host_blocks: int


class FoundBlocks(NamedTuple):
    """Device blocks and host pages that are cached under the given hashes, int32[n] each.

    An entry is -1 if its hash is not cached.
    """

    device: np.ndarray
    host: np.ndarray


class BlockHashes(NamedTuple):
    """The hashes of blocks, uint8[n, hash_bytes], and their groups, int32[n]. The group of a block that
    is not cached is -1.
    """

    hashes: np.ndarray
    groups: np.ndarray


class CachedPrefix(NamedTuple):
    """The cached prefix of a request.

    Attributes:
        block_ids: The blocks, int32[k], or one array per group if there are several groups.
        num_tokens: Number of tokens of the prefix.
        num_shared_tokens: Number of tokens that are cached in the groups that cache all tokens.
    """

    block_ids: np.ndarray | list[np.ndarray]
    num_tokens: int
    num_shared_tokens: int


class PrefixCache:
    """The cached blocks of a `KVCacheManager`, as `manager.cache`.

    It provides lookups by content, eviction, statistics and events. Rows and their blocks are
    accessed through the manager.

    >>> from kvcache.allocator import KVCacheManager
    >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128)
    >>> plan = manager.step(new=[Request("r1", range(40))])
    >>> manager.cache.find_prefix(Request("r2", range(40))).num_tokens
    32
    """

    def __init__(
        self,
        native: core.Manager,
        requests: core.RequestRows,
        groups: tuple[GroupSpec, ...],
        block_sizes: tuple[int, ...],
        context_parallel: ContextParallel,
        policies: tuple[str, str],
    ) -> None:
        self._native, self._requests = native, requests
        self._groups, self._block_sizes = groups, block_sizes
        self._context_parallel, self._policies = context_parallel, policies
        self._model_versions = {0: INITIAL_VERSION}  # by epoch

    @property
    def context_parallel(self) -> ContextParallel:
        """The parallel sizes and ranks over which blocks are distributed."""
        return self._context_parallel

    @property
    def hash_block_size(self) -> int:
        """Tokens per hash."""
        return self._native.hash_block_size

    @property
    def hash_bytes(self) -> int:
        """Bytes per hash."""
        return len(self._chain_key.parent)

    @property
    def hash_algorithm(self) -> str:
        """Name of the hash algorithm, as reported in events."""
        return self._chain_key.algorithm

    def hashes(self, request: Request) -> np.ndarray:
        """Return the hashes of the request's full blocks, uint8[n, hash_bytes].

        Missing hashes are computed.
        """
        return self._native.hashes(self._chain(request))

    def find(self, hashes: np.ndarray | Sequence[bytes], group: int = 0) -> FoundBlocks:
        """Look up the blocks that are cached under the given hashes on each tier. Does not change the
        cache.

        Each hash is looked up independently, whether or not earlier blocks of its chain are cached.
        Partially filled blocks are not found.

        Args:
            hashes: uint8[n, hash_bytes], or n bytes objects.
            group: The cache group.

        Raises:
            TypeError, ValueError: A hash has the wrong length, or the group is unknown.

        >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128)
        >>> request = Request("r1", range(40))
        >>> plan = manager.step(new=[request])
        >>> manager.cache.find(manager.cache.hashes(request)).device
        array([1, 2], dtype=int32)
        """
        if not isinstance(hashes, np.ndarray):
            hashes = self._stacked(hashes)
        num_entries(hashes, "hashes")
        return FoundBlocks(*self._native.find_hashes(np.ascontiguousarray(hashes), group))

    def hashes_of(self, ids: Ids, medium: str = "gpu") -> BlockHashes:
        """Return the hashes under which blocks are cached.

        Args:
            ids: int32[n]. Device blocks ("gpu") or host pages ("cpu"), held or free.
            medium: "gpu" or "cpu".

        Returns:
            Hashes and groups. For blocks that are not cached, the hash is zero and the group is -1.

        Raises:
            ValueError: An ID is out of range, the medium is unknown, or there is no host tier.
        """
        one_of(medium, "medium", ("gpu", "cpu"))
        return BlockHashes(*self._native.hashes_of_blocks(ids, medium == "cpu"))

    def _stacked(self, hashes: Sequence[bytes]) -> np.ndarray:
        if not isinstance(hashes, list | tuple):
            raise TypeError(f"hashes is {shown(hashes)}: expected an array or a list of bytes")
        for i, each in enumerate(hashes):
            if not isinstance(each, bytes):
                raise TypeError(f"hashes[{i}] is {shown(each)}: expected bytes")
            if len(each) != self.hash_bytes:
                raise ValueError(
                    f"hashes[{i}] has {len(each)} bytes: expected {self.hash_bytes}, the hash_bytes "
                    "of the manager"
                )
        return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, self.hash_bytes)

    def cached_tokens(self, request: Request, *, read_cache: bool | None = None) -> CachedTokens:
        """Count the cached tokens of a request on each tier, in whole blocks. Does not change the
        cache.

        External tokens (`Admit.external`) follow the cached tokens and are not counted.

        Args:
            request: The request.
            read_cache: Whether the request uses cached blocks. None: the request's own
                `read_cache`.
        """
        reads = _choice(read_cache, "read_cache")
        return CachedTokens(*self._native.lookup_tiers(self._chain(request), reads))

    def hit_tokens(self, request: Request) -> int:
        """Return how many of a request's tokens `stats` counts as hits.

        These are the tokens that the request did not have to compute because other requests had. The
        request's own tokens that it hits again after a preemption, and external tokens, are not
        counted.

        Args:
            request: A request that was admitted, or 0 is returned.
        """
        return self._native.num_counted_hits(self._chain(request))

    def find_prefix(
        self,
        request: Request,
        *,
        read_cache: bool | None = None,
        whole_blocks: bool = False,
        max_tokens: int | None = None,
    ) -> CachedPrefix:
        """Find the longest cached prefix on the device. Does not change the cache.

        If `hash_block_size` is smaller than a group's blocks, the prefix may end inside a block, as
        in `step`. The last ID is then the block from which to copy the prefix's last tokens (see
        `take_copies`). The request never holds this block. With a recurrent group or a group with
        `cached=False`, this method finds only whole blocks, although hits in `step` may end inside a
        block.

        Args:
            request: The request.
            read_cache: Whether the request uses cached blocks. None: the request's own
                `read_cache`.
            whole_blocks: Whether to find whole blocks only.
            max_tokens: Maximum length of the prefix in tokens. Set it, for example, if the outputs of
                later tokens are needed. None: unlimited.

        Returns:
            The prefix, with at most `num_tokens - 1` tokens, because the last token must be
            computed. If there are several groups, the prefix has one array of IDs per group. In window
            groups, blocks that later tokens do not attend to are null.

        >>> manager = KVCacheManager(16, 9, 128, hash_block_size=4, num_preallocate_tokens=0)
        >>> plan = manager.step(new=[Request("r1", range(30))])
        >>> manager.cache.find_prefix(Request("r2", range(30)))[:2]
        (array([1, 2], dtype=int32), 28)
        >>> manager.cache.find_prefix(Request("r2", range(30)), whole_blocks=True)[:2]
        (array([1], dtype=int32), 16)
        """
        ids, num_tokens, num_shared_tokens = self._native.lookup(
            self._chain(request),
            _choice(read_cache, "read_cache"),
            not flag(whole_blocks, "whole_blocks"),
            None if max_tokens is None else integer(max_tokens, "max_tokens", 0),
        )
        return CachedPrefix(by_group(ids), num_tokens, num_shared_tokens)

    def explain(self, request: Request) -> MissReport:
        """Report why tokens of a request were not found in the cache.

        Requires `CacheOptions.explain_misses`. For an admitted request, the report describes the
        request's last admission. For any other request, the report describes what would happen if the
        request were admitted now. `stats.missed_tokens` is the total over all admitted requests that
        read the cache.

        Args:
            request: The request.

        Returns:
            The missed tokens by reason.

        Raises:
            ValueError: The manager was created without `explain_misses`.

        >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128, explain_misses=1)
        >>> plan = manager.step(new=[Request("r1", range(40))])
        >>> report = manager.cache.explain(Request("r2", [*range(20), *range(80, 100)]))
        >>> report.hit_tokens, report.missed_tokens, report.nearest_id, report.nearest_tokens
        (16, {'new': 16, 'tail': 8}, 'r1', 20)
        """
        found = self._native.explain(self._requests, request, self._chain(request))
        return report_of(request.request_id, self._policies, found)

    def access(self, request: Request, now: float) -> None:
        """Tell the eviction policy that the request's blocks were accessed at time `now` (seconds)."""
        self._native.access(self._requests.at(request), checked_seconds(now, "now"))

    def pin(self, session: str, request: Request) -> int:
        """Pin the request's cached blocks on the device for a session, and return their number.

        Earlier pins of the session are removed. Pinned blocks are evicted only if no other cached
        block is left. `stats.num_pins_broken` counts such evictions.

        Args:
            session: Name of the session.
            request: The request whose cached blocks are pinned.
        """
        return self._native.pin(checked_session(session), self._chain(request))

    def unpin(self, session: str) -> int:
        """Remove the pins of a session, and return how many of its pinned blocks were evicted."""
        return self._native.unpin(checked_session(session))

    def set_now(self, seconds: float) -> None:
        """Set the clock for expiring priorities and eviction policies. Used by replays.

        By default, the system clock is used, starting at 0 when the manager is created.

        Args:
            seconds: The time in seconds.

        Raises:
            ValueError: `seconds` is earlier than the current clock.
        """
        self._native.set_now(int(checked_seconds(seconds, "seconds") * 1000))

    def evict(self, ids: Ids) -> None:
        """Remove held or free blocks from the cache. Blocks that are not cached do not change."""
        self._native.evict(ids)

    def reset(self, group: int | None = None) -> bool:
        """Remove every block from the cache.

        Args:
            group: If given, only the blocks of this group are removed, on both tiers. The remaining
                blocks cannot be hit, because a hit requires blocks of all groups.

        Returns:
            True if the blocks were removed. False if a request holds one of these blocks, or one of
            them is being loaded from the host. In this case, nothing has changed.
        """
        if group is None:
            return self._native.reset_prefix_cache()
        return self._native.reset_group(group)

    def start_epoch(self, model_version: str | int | None = None) -> None:
        """Make all current hashes unreachable. To be called after the weights have changed, before a
        step uses them.

        Running requests keep their blocks, but publish no more blocks. Sources end the offers, leases
        and loads of earlier weights. Report the steps in flight first: if a step fails afterward,
        requests that had hits on a failed block, but no longer hold it, do not recompute.

        Args:
            model_version: Name of the new weights. Engines exchange KV, and share a store, only
                while their versions are equal. None: a name that no other engine has.

        Raises:
            TypeError: `model_version` is neither a string nor an integer.
            ValueError: `model_version` is empty, or the current version. Nothing has changed.
        """
        version = f"unnamed {uuid.uuid4().hex}" if model_version is None else model_version
        version = str(version) if type(version) is int else text(version, "model_version")
        if version in (INITIAL_VERSION, self.model_version):
            raise ValueError(
                f"model_version is {shown(model_version)}: expected another name than that of the "
                f"current weights, {shown(self.model_version)}, whose KV stores may still have"
            )
        # Recorded before the native call, because a signal handler may raise right after it.
        self._model_versions[self.epoch + 1] = version
        self._native.start_epoch()

    def forget_adapter(self, name: str) -> None:
        """Make all blocks of an adapter unreachable. To be called after the adapter's weights have
        changed under the same name and path.

        The blocks are removed from both tiers, and other adapters keep theirs. Running requests of the
        adapter keep their blocks, but their tokens are not cached. From now on, the hashes of the
        adapter's requests are unique to this manager, so that no KV of the adapter is loaded from
        stores or other engines, except what this manager stores itself. To share KV of changed
        adapters with other engines, change the version in `Request.lora` instead.

        Args:
            name: Name of the adapter, the first entry of `Request.lora`.

        Raises:
            TypeError: `name` is not a string.
            ValueError: The engine computes the hashes (`hash_algorithm` "engine:NAME"). Change the
                adapter's part of these hashes, or call `reset`.

        >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128)
        >>> adapter = ("alpha", "/adapters/alpha")
        >>> plan = manager.step(new=[Request("r1", range(40), lora=adapter)])
        >>> manager.cache.forget_adapter("alpha")
        >>> manager.cache.find_prefix(Request("r2", range(40), lora=adapter)).num_tokens
        0
        """
        name, key = text(name, "name"), self._chain_key
        if key.is_given:
            raise ValueError(
                f"forget_adapter was called with hash_algorithm {shown(key.algorithm)}: expected hashes "
                "that the manager computes; change the engine's hashes of the adapter, or call reset"
            )
        self._native.forget_adapter(self._requests, name, key.forget_adapter(name))

    def adapter_root(self, request: Request) -> bytes | None:
        """Return the parent hash of the first block of requests with this request's adapter, which is
        another one after each `forget_adapter`. None: the adapter was never forgotten.
        """
        instance(request, Request, "request")
        return (
            None if request.lora is None else dict(self._chain_key.forgotten).get(request.lora[0])
        )

    @property
    def _chain_key(self) -> HashKey:
        """The hash parameters, which `forget_adapter` changes."""
        return self._requests.chain_key

    @property
    def epoch(self) -> int:
        """Number of `start_epoch` calls so far."""
        return self._native.num_epochs

    @property
    def num_invalidations(self) -> int:
        """Number of calls of `report`, `abort` and `invalidate` so far that found content to be
        invalid. If blocks are leased to readers, for example to other engines, end the leases when
        this number changes.
        """
        return self._native.num_invalidations

    @property
    def model_version(self) -> str:
        """Name of the weights that cached blocks were computed with. Empty before `start_epoch`."""
        return self._model_versions[self.epoch]

    def is_stale(self, request: Request) -> bool:
        """Return whether an admitted request may have KV that was computed before `start_epoch`.

        Args:
            request: An admitted request. Its blocks are neither cached nor offered if it is stale.
        """
        self._native.check_reader()
        return self._native.is_stale(self._requests.at(request))

    def num_common_prefix_blocks(
        self, request: Request, num_running_requests: int, group: int = 0
    ) -> int:
        """Return the number of a request's leading blocks that all admitted requests share.

        Args:
            request: An admitted request.
            num_running_requests: Number of admitted requests, including this request.
            group: The cache group.
        """
        return self._native.num_common_prefix_blocks(
            self._requests.at(request), num_running_requests, group
        )

    @property
    def stats(self) -> PrefixCacheStats:
        """Hit rates, and stored and evicted blocks."""
        self._native.check_reader()
        native = self._native
        return stats_of(native.stats(), native.pool.num_pins_broken)

    def clear_stats(self) -> None:
        """Reset the counts of `stats`."""
        self._native.clear_stats()

    def drain_events(self) -> list[CacheEvent]:
        """Return the events since the last call, in chronological order."""
        events = events_of(
            self._native.waiting_events(), self._groups, self._block_sizes, self._chain_key
        )
        self._native.drop_events()  # if an interrupt arrives before this line, the events stay in the log
        return events

    def _chain(self, request: Request) -> core.TokenChain:
        instance(request, Request, "request")
        return request.chain(self._chain_key)


def by_group(ids: list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
    """Return the IDs of a single group, or a list with the IDs of each group."""
    return ids[0] if len(ids) == 1 else ids


def _choice(value: bool | None, name: str) -> bool | None:
    """Validate an optional flag. None selects the request's own setting."""
    return None if value is None else flag(value, name)
