"""Every token reads all before it."""

from kvcache.kinds.base import KindProperties
from kvcache.kinds.registry import register
from kvcache.native.load import core


@register("full_attention")
class FullAttention(KindProperties, core.FullAttention):
    """No options."""
