"""Sliding-window attention over a circular buffer: a token reads itself and the `window - 1` before it.

A request keeps the same blocks for as long as it runs: `buffer` tokens, rounded up to whole blocks. The
token at position p is in table column `p // block_size % columns` and overwrites the token one buffer
earlier.

Its blocks can therefore never be hits: after a hit of other groups the window would be missing, and could
be computed only from the beginning, together with all lower layers. A manager with such a group caches
nothing, unless the group has `cached=False`. In that case its layers read only what the request itself
has computed.
"""

from kvcache.kinds.base import KindError, KindProperties, check_tokens
from kvcache.kinds.contents import CIRCULAR
from kvcache.kinds.registry import register
from kvcache.native.load import core


@register("circular_window")
class CircularWindow(KindProperties, core.CircularWindow):
    """Sliding-window attention over a circular buffer.

    Args:
        window: Tokens that a query attends to, itself included; at least 1.
        buffer: Tokens in the buffer. It must hold what a step reads and writes: `window - 1` tokens and
            the maximum number of tokens of a request in a step, including drafts and lookahead.
    """

    pages = CIRCULAR

    def __init__(self, *, window: int, buffer: int) -> None:
        core.CircularWindow.__init__(self, window, buffer)
        self._window, self._buffer = window, buffer

    @property
    def window(self) -> int:
        """Tokens that a query attends to, itself included."""
        return self._window

    @property
    def buffer(self) -> int:
        """Tokens that the buffer of a request holds."""
        return self._buffer

    def max_live_tokens(self, num_tokens: int, step_tokens: int) -> int:
        """Return the tokens of a step plus those in the window of its first token."""
        check_tokens(num_tokens, step_tokens)
        return self._window - 1 + step_tokens

    def max_pages(self, num_tokens: int, step_tokens: int, tokens_per_page: int) -> int:
        """Return the pages of the buffer."""
        return -(-min(num_tokens, self._buffer) // tokens_per_page)

    def most_held(self, num_tokens: int, step_tokens: int, tokens_per_page: int) -> int:
        """Return the pages of the buffer, which must hold what a step reads and writes."""
        step_tokens = min(step_tokens, num_tokens)
        needed = min(self.max_live_tokens(num_tokens, step_tokens), num_tokens)
        if needed > -(-self._buffer // tokens_per_page) * tokens_per_page:
            raise KindError(
                f"options of {type(self).__name__} have buffer {self._buffer}: expected {needed} "
                f"or more, window - 1 and the {step_tokens} tokens of a step"
            )
        return -(-min(num_tokens, self._buffer) // tokens_per_page)
