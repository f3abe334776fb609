"""A token reads itself and the `window - 1` tokens before it."""

from kvcache.allocator.groups.base import register
from kvcache.native.load import core


@register("sliding_window")
def sliding_window(*, window: int) -> core.SlidingWindow:
    """`window`: tokens, 1 or more."""
    return core.SlidingWindow(window)
