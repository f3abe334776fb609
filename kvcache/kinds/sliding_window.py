# SPDX-License-Identifier: Apache-2.0
"""Sliding-window attention, in which a token attends to itself and the previous `window - 1` tokens."""

from kvcache.kinds.base import KindProperties, check_tokens
from kvcache.kinds.registry import register
from kvcache.native.load import core


@register("sliding_window")
class SlidingWindow(KindProperties, core.SlidingWindow):
    """Sliding-window attention.

    Args:
        window: Number of tokens that a query attends to, including itself. At least 1.
    """

    def __init__(self, *, window: int) -> None:
        core.SlidingWindow.__init__(self, window)
        self._window = window

    @property
    def window(self) -> int:
        """Number of tokens that a query attends to, including itself."""
        return self._window

    def max_live_tokens(self, num_tokens: int, step_tokens: int) -> int:
        """Return the number of a step's tokens plus the earlier tokens in the first token's window."""
        check_tokens(num_tokens, step_tokens)
        return self._window - 1 + step_tokens
