"""Attention kinds of cache groups, one per file, known by name.

A kind says which earlier tokens are still read; the manager derives from it what a hit needs and
which blocks leave a request's window. To add one:

>>> from kvcache.allocator.groups import AttentionKind, register
>>> @register("prefix_lm")
... class PrefixLM(AttentionKind):
...     def first_needed_token(self, num_computed_tokens):
...         return max(num_computed_tokens - 128, 0)
>>> make_kind("prefix_lm", {}).first_needed_token(200)
72
"""

from kvcache.allocator.groups import (  # noqa: F401  (each registers its kind)
    chunked_local,
    cross_attention,
    full_attention,
    recurrent,
    sliding_window,
)
from kvcache.allocator.groups.base import AttentionKind, kind_names, make_kind, register

__all__ = ["AttentionKind", "kind_names", "make_kind", "register"]
