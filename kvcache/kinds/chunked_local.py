"""A token reads those before it in its own chunk of the sequence."""

from kvcache.kinds.base import KindProperties, check_tokens
from kvcache.kinds.registry import register
from kvcache.native.load import core


@register("chunked_local")
class ChunkedLocal(KindProperties, core.ChunkedLocal):
    """`chunk_size`: tokens, 1 or more."""

    def __init__(self, *, chunk_size: int) -> None:
        core.ChunkedLocal.__init__(self, chunk_size)
        self._chunk_size = chunk_size

    def max_live_tokens(self, num_tokens: int, step_tokens: int) -> int:
        """The tokens of a step, and the chunk that the first is in."""
        check_tokens(num_tokens, step_tokens)
        return self._chunk_size + step_tokens
