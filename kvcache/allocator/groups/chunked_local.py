"""A token reads those before it in its own chunk of the sequence."""

from kvcache.allocator.groups.base import register
from kvcache.native.load import core


@register("chunked_local")
def chunked_local(*, chunk_size: int) -> core.ChunkedLocal:
    """`chunk_size`: tokens, 1 or more."""
    return core.ChunkedLocal(chunk_size)
