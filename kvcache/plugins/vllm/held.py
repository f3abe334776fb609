"""The manager's record of a vLLM request that has blocks."""

from __future__ import annotations

from vllm.v1.request import Request

from kvcache import allocator
from kvcache.plugins.vllm.blocks import BlockIds


class HeldRequest:
    """The state of a vLLM request that has blocks in the native manager."""

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
        self.start = 0  # start of the request's last native call
        self.num_computed = 0  # tokens with slots in the native manager
        self.num_known = 0  # known tokens at the last update of the native manager
        self.stop = 0  # number of tokens after the scheduler's last call
        self.step = 0  # step of the scheduler's last call
        self.quiet_until = 0  # number of slots up to which the blocks do not change
        self.due = 0  # step that exceeds `quiet_until`, at one token per step
        self.ready: BlockIds | None = None  # new blocks not yet returned to the scheduler
        self.num_external = 0
        self.is_receiving = False
        # (group, column, id) of the states from which the admission step continues.
        self.copied_states: list[tuple[int, int, int]] = []

    def num_published(self, block_size: int) -> int:
        """Return the number of published blocks: known and computed at the last native call."""
        return min(self.num_known, self.num_computed) // block_size
