"""What is known of a request of vLLM that has blocks."""

from __future__ import annotations

from vllm.v1.request import Request

from kvcache import allocator
from kvcache.integrations.vllm.blocks import BlockIds


class HeldRequest:
    """What is known of a request with blocks."""

    __slots__ = (
        "copied_states",
        "due",
        "engine_request",
        "is_receiving",
        "num_computed",
        "num_external",
        "num_known",
        "quiet_until",
        "ready",
        "request",
        "row",
        "start",
        "step",
        "stop",
    )

    def __init__(self, engine_request: Request, request: allocator.Request) -> None:
        self.engine_request = engine_request
        self.request = request
        self.row = -1
        self.start = 0  # where its last native call began
        self.num_computed = 0  # tokens with slots, as the native manager knows it
        self.num_known = 0  # tokens that were known when it heard of the request last
        self.stop = 0  # tokens that the scheduler's last call asked for,
        self.step = 0  # in this step
        self.quiet_until = 0  # up to so many slots nothing changes
        self.due = 0  # the step in which that ends, if each computes one token
        self.ready: BlockIds | None = None  # new blocks that the scheduler has not been told of
        self.num_external = 0
        self.is_receiving = False
        # (group, column, id) of the states that the step of its admission goes on from.
        self.copied_states: list[tuple[int, int, int]] = []

    def num_published(self, block_size: int) -> int:
        """Blocks that are hits: their tokens were known and computed at the last native call."""
        return min(self.num_known, self.num_computed) // block_size
