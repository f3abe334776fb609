# SPDX-License-Identifier: Apache-2.0
"""Assigns the requests of a workload to sessions, by their content."""

from __future__ import annotations

from kvcache_lab.content import prefix_keys
from kvcache_lab.workload import WorkloadRequest

_STRIDE = 512  # a key is kept every 512 tokens of a prompt
# Maximum number of requests that continue sessions from the same block inside a last prompt.
_MOST_FROM_A_BLOCK = 4


class Sessions:
    """Assigns a session to each request of a workload, in order.

    A request continues a session if it begins with all full blocks of the session's last prompt. It
    also continues the session with which it shares the longest prefix if this prefix covers more
    than half of the last prompt's full blocks, for example because a client has replaced the last
    message. Only some prefixes are found: those whose length is a multiple of 512 tokens, and those
    that lack a power of two of the last prompt's blocks. At most four requests can continue sessions
    from the same block inside a prompt, so that requests that share only a system prompt belong to
    different sessions. Any other request begins a session.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._stride = max(_STRIDE // block_size, 1)
        self._sessions: dict[int, int] = {}  # maps a block key to the last session with the block
        self._num_blocks: list[int] = []  # number of full blocks in each session's last prompt
        # Number of requests that continued from a block inside a last prompt, by the block's key.
        self._num_continued: dict[int, int] = {}

    def of(self, item: WorkloadRequest) -> int:
        """Return the session of the next request. Sessions are numbered from 0, in order of first
        requests.
        """
        content = item.content if len(item.content) else prefix_keys(item.token_ids)
        keys = content[self._block_size - 1 :: self._block_size].tolist()
        session = self._continued_by(keys)
        if session is None:
            session = len(self._num_blocks)
            self._num_blocks.append(0)
        self._num_blocks[session] = len(keys)
        distances = [0, *(1 << i for i in range(self._stride.bit_length()))]
        kept = [keys[-1 - distance] for distance in distances if distance < len(keys)]
        for key in (*keys[self._stride - 1 :: self._stride], *kept):
            self._sessions[key] = session
        return session

    def _continued_by(self, keys: list[int]) -> int | None:
        """Return the session that a prompt continues, if any."""
        is_longest = True
        for count in range(len(keys), 0, -1):
            key = keys[count - 1]
            session = self._sessions.get(key)
            if session is None:
                continue
            num_blocks = self._num_blocks[session]
            if count == num_blocks:
                return session
            num_continued = self._num_continued.get(key, 0)
            if is_longest and 2 * count > num_blocks and num_continued < _MOST_FROM_A_BLOCK:
                self._num_continued[key] = num_continued + 1
                return session
            is_longest = False
        return None
