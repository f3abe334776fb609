"""Every token reads all before it."""

from kvcache._native import core
from kvcache.allocator.groups.base import register

register("full_attention")(core.FullAttention)
