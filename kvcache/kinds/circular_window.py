# SPDX-License-Identifier: Apache-2.0
"""Sliding-window attention over a circular buffer. A token attends to itself and the previous
`window - 1` tokens.

A request keeps the same blocks while it runs. These blocks can hold `buffer` tokens, rounded up to whole
blocks. The token at position p is in table column `p // block_size % columns`, where it overwrites an
earlier token.

Because tokens are overwritten, the blocks can never be hit. After a hit in other groups, the window
would be missing, and recomputing it would require computing all lower layers from the first token. A
manager with a circular group therefore caches nothing, unless the group has `cached=False`. In that
case, the group's layers attend only to tokens that the request itself has computed.
"""

from kvcache.kinds.base import KindError, KindProperties, check_tokens
from kvcache.kinds.contents import CIRCULAR
from kvcache.kinds.registry import register
from kvcache.native.load import core


@register("circular_window")
class CircularWindow(KindProperties, core.CircularWindow):
    """Sliding-window attention over a circular buffer.

    Args:
        window: Number of tokens that a query attends to, including itself. At least 1.
        buffer: Number of tokens in the buffer. The buffer must be large enough for all tokens that a
            step reads and writes: `window - 1` tokens plus the maximum number of tokens per request
            in a step, including drafts and lookahead.
    """

    pages = CIRCULAR

    def __init__(self, *, window: int, buffer: int) -> None:
        core.CircularWindow.__init__(self, window, buffer)
        self._window, self._buffer = window, buffer

    @property
    def window(self) -> int:
        """Number of tokens that a query attends to, including itself."""
        return self._window

    @property
    def buffer(self) -> int:
        """Number of tokens in a request's buffer."""
        return self._buffer

    def max_live_tokens(self, num_tokens: int, step_tokens: int) -> int:
        """Return the number of a step's tokens plus the earlier tokens in the first token's window."""
        check_tokens(num_tokens, step_tokens)
        return self._window - 1 + step_tokens

    def max_pages(self, num_tokens: int, step_tokens: int, tokens_per_page: int) -> int:
        """Return the number of pages in the buffer."""
        return -(-min(num_tokens, self._buffer) // tokens_per_page)

    def most_held(self, num_tokens: int, step_tokens: int, tokens_per_page: int) -> int:
        """Return the number of pages in the buffer. Checks that a step's reads and writes fit into it."""
        step_tokens = min(step_tokens, num_tokens)
        needed = min(self.max_live_tokens(num_tokens, step_tokens), num_tokens)
        if needed > -(-self._buffer // tokens_per_page) * tokens_per_page:
            raise KindError(
                f"options of {type(self).__name__} have buffer {self._buffer}: expected {needed} "
                f"or more, window - 1 plus the {step_tokens} tokens of a step"
            )
        return -(-min(num_tokens, self._buffer) // tokens_per_page)
