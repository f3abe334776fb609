# SPDX-License-Identifier: Apache-2.0
"""Assigns the requests of a workload to sessions, by their content."""

from __future__ import annotations

import numpy as np

from kvcache.replay.content import mix64, prefix_keys
from kvcache.replay.workload import WorkloadRequest


class Sessions:
    """Finds the session of each request of a workload, in order.

    A request continues the session whose last prompt has the most full blocks, all of which begin the
    request's prompt. A request that continues none begins a session.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ends: dict[int, int] = {}  # key of a prompt's last full block -> its session
        self.num_sessions = 0

    def of(self, item: WorkloadRequest) -> int:
        """Return the session of the next request, numbered from 0 in order of their first requests."""
        content = item.content if len(item.content) else prefix_keys(item.token_ids)
        keys = content[self._block_size - 1 :: self._block_size].tolist()
        last = next((key for key in reversed(keys) if key in self._ends), None)
        # Only one session continues a prompt, for example one that is a common system prompt.
        session = self._ends.pop(last, None)
        if session is None:
            session = self.num_sessions
            self.num_sessions += 1
        if keys:
            self._ends[keys[-1]] = session
        return session


def share_of(session: int, num_shares: int) -> int:
    """Return the share, from 0 to `num_shares` - 1, to which a session belongs. Shares are random."""
    return int(mix64(np.array([session], np.uint64))[0] % np.uint64(num_shares))
