# SPDX-License-Identifier: Apache-2.0
"""Assigns the requests of a workload to sessions, by their content."""

from __future__ import annotations

import numpy as np

from kvcache.replay.content import mix64, prefix_keys
from kvcache.replay.workload import WorkloadRequest

_STRIDE = 512  # tokens between the blocks of a prompt that are kept, besides its last one


class Sessions:
    """Finds the session of each request of a workload, in order.

    A request continues the session with which it has the longest common prefix, if this prefix has at
    least half of the full blocks of the session's last prompt. Only one request continues a session from
    the same block, for example the end of a common system prompt. A request that continues none begins a
    session.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._stride = max(_STRIDE // block_size, 1)
        self._sessions: dict[int, int] = {}  # key of a block -> the last session that has it
        self._num_blocks: list[int] = []  # of the last prompt of each session
        self._continued: set[int] = set()  # keys of the blocks from which a session continued

    @property
    def num_sessions(self) -> int:
        """Number of sessions so far."""
        return len(self._num_blocks)

    def of(self, item: WorkloadRequest) -> int:
        """Return the session of the next request, numbered from 0 in order of their first requests."""
        content = item.content if len(item.content) else prefix_keys(item.token_ids)
        keys = content[self._block_size - 1 :: self._block_size].tolist()
        session = self._continued_by(keys)
        if session is None:
            session = len(self._num_blocks)
            self._num_blocks.append(0)
        self._num_blocks[session] = len(keys)
        for key in (*keys[self._stride - 1 :: self._stride], *keys[-1:]):
            self._sessions[key] = session
        return session

    def _continued_by(self, keys: list[int]) -> int | None:
        """Return the session that a prompt continues, if any."""
        for count in range(len(keys), 0, -1):
            key = keys[count - 1]
            session = self._sessions.get(key)
            if session is None or key in self._continued:
                continue
            if 2 * count >= self._num_blocks[session]:
                self._continued.add(key)
                return session
        return None


def share_of(session: int, num_shares: int) -> int:
    """Return the share, from 0 to `num_shares` - 1, to which a session belongs. Shares are random."""
    return int(mix64(np.array([session], np.uint64))[0] % np.uint64(num_shares))
