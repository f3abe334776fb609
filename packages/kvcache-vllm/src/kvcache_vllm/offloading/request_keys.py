# SPDX-License-Identifier: Apache-2.0
"""The chunk keys of one request, by group and position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx

from kvcache.allocator import BlockPool


class RequestKeys:
    """State that is attached to vLLM's context of a request and is valid until the cache is reset."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.own: set[OffloadKey] = set()  # keys that the request has stored
        self.storing: set[OffloadKey] = set()  # subset of `own` with stores in flight
        self.hits: set[OffloadKey] = set()
        self.counted: set[OffloadKey] = set()  # keys that are included in the request counts
        self.has_ended = False
        self._at: defaultdict[int, dict[int, OffloadKey]] = defaultdict(dict)

    def add(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Record keys by their group and position."""
        for key in keys:
            position = req_context.get_offload_key_position(key)
            self._at[get_offload_group_idx(key)][position] = key

    def key_at(self, group: int, position: int) -> OffloadKey | None:
        """Return the recorded key of the chunk that ends with this token, if any."""
        return self._at[group].get(position)

    def by_group(self) -> dict[int, list[tuple[int, OffloadKey]]]:
        """Return all recorded keys with their positions, last position first."""
        return {
            group: sorted(keys.items(), reverse=True) for group, keys in sorted(self._at.items())
        }
