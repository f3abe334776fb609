# SPDX-License-Identifier: Apache-2.0
"""The loads of a source. All sources share this state machine, including the quarantine.

    match      begin        finish
    ------> MATCHED ----> LOADING ----> done
                              | quarantine          release
                              +----------> QUARANTINED ----> done

Once the manager has admitted a matched request with `External.delayed`, the request is in the
receiving state: it is not scheduled, and other requests cannot hit its blocks. `finish` returns the
request to the engine; call it only if no transfer can write to the request's blocks any more.
Otherwise, call `quarantine`, which frees the request and keeps its blocks until `release`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from kvcache.allocator import RequestState
from kvcache.allocator.manager import KVCacheManager
from kvcache.allocator.request import Request
from kvcache.sources.base import Arrived, LoadStats

Detail = TypeVar("Detail")


class LoadState(Enum):
    """The state of a load."""

    MATCHED = "matched"
    LOADING = "loading"
    QUARANTINED = "quarantined"
    DONE = "done"


@dataclass(eq=False)
class SourceLoad(Generic[Detail]):
    """A load of a request's tokens [first_token, end_token) into its blocks.

    Attributes:
        request: The request.
        first_token: Index of the first token to load.
        end_token: End (exclusive) of the tokens to load.
        detail: Data specific to the source.
        state: State of the load.
        num_blocks: Number of this load's blocks that are in quarantine.
        root: `PrefixCache.adapter_root` of the request at the match. If it has changed, the adapter was
            forgotten, and what arrives must not be used.
    """

    request: Request
    first_token: int
    end_token: int
    detail: Detail | None
    state: LoadState = LoadState.MATCHED
    num_blocks: int = 0
    root: bytes | None = None


class SourceLoads(Generic[Detail]):
    """The loads of one source, keyed by request ID."""

    def __init__(self, manager: KVCacheManager, stats: LoadStats) -> None:
        self._manager, self._stats = manager, stats
        self._matched: dict[str, SourceLoad[Detail]] = {}
        self._under_way: dict[str, SourceLoad[Detail]] = {}

    def __len__(self) -> int:
        """Return the number of loads whose blocks may still be written to."""
        return len(self._under_way)

    def __contains__(self, request: Request) -> bool:
        """Return whether a load with this request ID may still write to blocks."""
        return request.request_id in self._under_way

    def __getitem__(self, request_id: str) -> SourceLoad[Detail]:
        return self._under_way[request_id]

    @property
    def under_way(self) -> list[SourceLoad[Detail]]:
        """All loads that are loading or quarantined."""
        return list(self._under_way.values())

    @property
    def num_quarantined_blocks(self) -> int:
        """Number of blocks in quarantine."""
        return sum(load.num_blocks for load in self._under_way.values())

    # Methods called before a load.

    def match(
        self, request: Request, first_token: int, end_token: int, detail: Detail | None = None
    ) -> SourceLoad[Detail]:
        """Record which tokens of a request can be loaded, instead of an earlier match."""
        root = self._manager.cache.adapter_root(request)
        load = SourceLoad(request, first_token, end_token, detail, root=root)
        self._matched[request.request_id] = load
        return load

    def matched(self, request: Request) -> SourceLoad[Detail] | None:
        """Return this request object's match, or None if the match belongs to another request with
        the same ID or the request's adapter was forgotten since.
        """
        load = self._matched.get(request.request_id)
        if load is None or load.request is not request or self._is_forgotten(load):
            return None
        return load

    def forget(self, request_id: str) -> SourceLoad[Detail] | None:
        """Remove and return the match for a request ID."""
        return self._matched.pop(request_id, None)

    def forget_all(self) -> list[SourceLoad[Detail]]:
        """Remove and return all matches."""
        found, self._matched = [*self._matched.values()], {}
        return found

    def admitted(self, request: Request) -> SourceLoad[Detail]:
        """Return the match with which a request was admitted. Raises ValueError if there is none."""
        load = self.matched(request)
        if load is None or not self._is_receiving(request):
            raise ValueError(
                f"request {request.request_id!r} has no load to begin: call match, then admit it in a "
                "step with External.delayed, without a new epoch (start_epoch) in between"
            )
        if (end := self._manager.num_computed_tokens(request)) != load.end_token:
            raise ValueError(
                f"request {request.request_id!r} was admitted with {end} tokens (hit and tokens to "
                f"load): expected {load.end_token}, because its hit was {load.first_token} at match; "
                "cancel the request, and call match immediately before the step"
            )
        return load

    # Methods called during a load.

    def begin(self, load: SourceLoad[Detail]) -> None:
        """Record that the load of a matched request has begun."""
        del self._matched[load.request.request_id]
        self._under_way[load.request.request_id] = load
        load.state = LoadState.LOADING
        self._stats.loads += 1
        self._stats.hit_tokens += load.end_token - load.first_token

    def is_receiving(self, load: SourceLoad[Detail]) -> bool:
        """Return whether a load may still write to its request's blocks."""
        is_loading = load.state is LoadState.LOADING
        return is_loading and self._is_receiving(load.request)

    def finish(
        self, load: SourceLoad[Detail], num_tokens: int | None = None, error: str | None = None
    ) -> Arrived:
        """End a load, and let its request continue. The caller ensures that no transfer writes to
        the blocks any more.

        Args:
            load: The load.
            num_tokens: Number of leading tokens that arrived. None: all tokens arrived.
            error: Reason why some tokens did not arrive.
        """
        count = load.end_token - load.first_token if num_tokens is None else num_tokens
        if count and self._is_forgotten(load):
            count, error = 0, "its adapter was forgotten"
        computed = self._manager.finish_receiving(load.request, count)
        num_loaded = max(min(computed, load.first_token + count) - load.first_token, 0)
        self._end(load, num_loaded)
        return Arrived(load.request, computed, num_loaded, error)

    def drop(self, load: SourceLoad[Detail]) -> None:
        """End a load whose request was freed by other code."""
        self._end(load, 0)

    def quarantine(self, load: SourceLoad[Detail], error: str | None = None) -> Arrived:
        """Free a failed load's request, but keep its blocks until `release` is called."""
        manager, request = self._manager, load.request
        num_blocks = sum(
            int((manager.block_ids(request, group) > 0).sum())
            for group, spec in enumerate(manager.groups)
            if spec.transferred
        )
        manager.free(request, keep_blocks=True)
        load.state, load.num_blocks = LoadState.QUARANTINED, num_blocks
        self._stats.quarantined_loads += 1
        self._count_failed(load, 0)
        return Arrived(request, None, 0, error)

    def release(self, load: SourceLoad[Detail]) -> None:
        """End a load's quarantine once no transfer can write to its blocks any more."""
        self._manager.release_blocks(load.request)
        load.state, load.num_blocks = LoadState.DONE, 0
        del self._under_way[load.request.request_id]

    def free(self, request: Request) -> None:
        """Free a request whose load has not begun, in any state."""
        if self._is_receiving(request):
            self._manager.finish_receiving(request, 0)
        self._manager.free(request)

    def _end(self, load: SourceLoad[Detail], num_loaded: int) -> None:
        load.state = LoadState.DONE
        del self._under_way[load.request.request_id]
        self._stats.loaded_tokens += num_loaded
        self._count_failed(load, num_loaded)

    def _count_failed(self, load: SourceLoad[Detail], num_loaded: int) -> None:
        missing = load.end_token - load.first_token - num_loaded
        self._stats.failed_loads += missing > 0
        self._stats.failed_tokens += missing

    def _is_forgotten(self, load: SourceLoad[Detail]) -> bool:
        return self._manager.cache.adapter_root(load.request) != load.root

    def _is_receiving(self, request: Request) -> bool:
        try:
            return self._manager.state(request) is RequestState.RECEIVING
        except ValueError:  # the request is not admitted
            return False
