"""The keys that one request had."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx

from kvcache.allocator import BlockPool


class RequestKeys:
    """Kept with vLLM's context of a request. `pool`: of the cache as it was: a reset makes a new one."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.own: set[OffloadKey] = set()  # that it has stored
        self.storing: set[OffloadKey] = set()  # of these, those under way
        self.hits: set[OffloadKey] = set()
        self.counted: set[OffloadKey] = set()  # offered, and not stored at first
        self.has_ended = False
        self._at: defaultdict[int, dict[int, OffloadKey]] = defaultdict(dict)

    def add(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Notes keys by group and position."""
        for key in keys:
            position = req_context.get_offload_key_position(key)
            self._at[get_offload_group_idx(key)][position] = key

    def key_at(self, group: int, position: int) -> OffloadKey | None:
        """The key of the chunk that ends with this token, where it was noted."""
        return self._at[group].get(position)

    def by_group(self) -> dict[int, list[tuple[int, OffloadKey]]]:
        """All that were noted, with their positions, the last one first."""
        return {
            group: sorted(keys.items(), reverse=True) for group, keys in sorted(self._at.items())
        }
