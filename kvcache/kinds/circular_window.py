"""A token reads itself and the `window - 1` tokens before it, out of a buffer that is written round.

A request has the same blocks as long as it runs: `buffer` tokens, rounded up to whole blocks. The token
at position p lies in column `p // block_size % columns` of the table, over what lay there a buffer
before. So nothing of it can be hit: behind a hit of other groups the window would be missing, and could
be computed only with all layers below it, from the beginning. A manager with such a group caches
nothing, unless the group says `cached=False`: then its layers read only what the request has computed.
"""

from kvcache.kinds.base import KindProperties, check_tokens
from kvcache.kinds.registry import register
from kvcache.native.load import core


@register("circular_window")
class CircularWindow(KindProperties, core.CircularWindow):
    """`window`, `buffer`: tokens, 1 or more.

    `buffer` holds what a step reads and writes: `window - 1` and the most tokens of a request in a step,
    drafts and lookahead included.
    """

    pages = "circular"

    def __init__(self, *, window: int, buffer: int) -> None:
        core.CircularWindow.__init__(self, window, buffer)
        self._window, self._buffer = window, buffer

    @property
    def window(self) -> int:
        """Tokens that a query sees, itself included."""
        return self._window

    @property
    def buffer(self) -> int:
        """Tokens that a request has places for."""
        return self._buffer

    def max_live_tokens(self, num_tokens: int, step_tokens: int) -> int:
        """The tokens of a step, and those in the window of the first."""
        check_tokens(num_tokens, step_tokens)
        return self._window - 1 + step_tokens

    def max_pages(self, num_tokens: int, step_tokens: int, tokens_per_page: int) -> int:
        """The buffer's."""
        return -(-min(num_tokens, self._buffer) // tokens_per_page)
