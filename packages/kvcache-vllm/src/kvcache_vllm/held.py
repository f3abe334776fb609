# SPDX-License-Identifier: Apache-2.0
"""The manager's record of a vLLM request that has blocks."""

from __future__ import annotations

from typing import NamedTuple

from vllm.v1.request import Request

from kvcache import allocator
from kvcache_vllm.blocks import BlockIds


class HashSpan(NamedTuple):
    """The tokens that a block's hash covers: the block's own tokens and the `num_lookahead` tokens
    after it.
    """

    block_size: int
    num_lookahead: int

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks whose hashes cover only the first `num_tokens` tokens."""
        return max(num_tokens - self.num_lookahead, 0) // self.block_size


class HeldRequest:
    """The state of a vLLM request that has blocks in the native manager."""

    __slots__ = (
        "copied_states",
        "due",
        "engine_request",
        "hashed",
        "is_receiving",
        "num_computed",
        "num_external",
        "num_filled",
        "num_known",
        "quiet_until",
        "ready",
        "request",
        "row",
        "start",
        "step",
        "stop",
    )

    def __init__(
        self, engine_request: Request, request: allocator.Request, hashed: HashSpan
    ) -> None:
        self.engine_request = engine_request
        self.request = request
        self.hashed = hashed
        self.row = -1
        self.start = 0  # first token of the request's last native call
        self.num_computed = 0  # tokens with slots in the native manager
        self.num_known = 0  # known tokens at the last update of the native manager
        self.stop = 0  # end of the tokens that the scheduler's last call covered
        self.num_filled = 0  # known tokens that are computed after that call
        self.step = 0  # step of the scheduler's last call
        self.quiet_until = 0  # number of slots up to which the blocks do not change
        self.due = 0  # step in which one token per step exceeds `quiet_until`
        self.ready: BlockIds | None = None  # new blocks not yet returned to the scheduler
        self.num_external = 0
        self.is_receiving = False
        # (group, column, id) of the states from which the admission step continues.
        self.copied_states: list[tuple[int, int, int]] = []

    @property
    def num_published(self) -> int:
        """Number of tokens in published blocks, as known and computed at the last native call."""
        size = self.hashed.block_size
        return min(self.hashed.num_blocks(self.num_known), self.num_computed // size) * size
