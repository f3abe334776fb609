# SPDX-License-Identifier: Apache-2.0
"""Chunked local attention, in which a token attends only to earlier tokens in the same chunk."""

from kvcache.kinds.base import KindProperties, check_tokens
from kvcache.kinds.registry import register
from kvcache.native.load import core


@register("chunked_local")
class ChunkedLocal(KindProperties, core.ChunkedLocal):
    """Chunked local attention.

    Args:
        chunk_size: Tokens per chunk, at least 1.
    """

    def __init__(self, *, chunk_size: int) -> None:
        core.ChunkedLocal.__init__(self, chunk_size)
        self._chunk_size = chunk_size

    def max_live_tokens(self, num_tokens: int, step_tokens: int) -> int:
        """Return the number of tokens in a step plus those in the chunk of the step's first token."""
        check_tokens(num_tokens, step_tokens)
        return self._chunk_size + step_tokens
