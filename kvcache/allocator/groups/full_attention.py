"""Every token reads all before it."""

from kvcache.allocator.groups.base import register
from kvcache.native.load import core

register("full_attention")(core.FullAttention)
