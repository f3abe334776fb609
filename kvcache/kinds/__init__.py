# SPDX-License-Identifier: Apache-2.0
"""Attention kinds of layers and cache groups. Each kind has its own file and is registered by name.

A kind defines which earlier tokens a query attends to. From this rule, the manager derives which blocks
a hit needs and which blocks leave a request's window, and `plan_cache` derives how many pages a
request holds. A kind also defines its options, the content of its pages, and the window outside which
block table entries are null.

A custom kind needs one function and a name (`docs/own_attention_kind.md`):

>>> from kvcache.kinds import AttentionKind, register
>>> @register("last_segment")
... class LastSegment(AttentionKind):
...     def __init__(self, *, segment):
...         super().__init__()
...         self.segment = segment
...
...     def first_needed_token(self, num_computed_tokens):
...         return max(num_computed_tokens // self.segment - 1, 0) * self.segment
>>> make_kind("last_segment", {"segment": 64}).first_needed_token(200)
128
>>> make_kind("last_segment", {})
Traceback (most recent call last):
...
ValueError: options of kind 'last_segment' are {}: expected segment=N
"""

from kvcache.kinds import (  # noqa: F401  (each registers its kind)
    chunked_local,
    circular_window,
    cross_attention,
    full_attention,
    recurrent,
    sliding_window,
)
from kvcache.kinds.base import (
    AttentionKind,
    KindError,
    KindProperties,
    check_planned_pages,
    checked_first_live_token,
    checked_max_pages,
)
from kvcache.kinds.contents import PageContent
from kvcache.kinds.registry import kind_class, kind_names, make_kind, register

__all__ = [
    "AttentionKind",
    "KindError",
    "KindProperties",
    "PageContent",
    "check_planned_pages",
    "checked_first_live_token",
    "checked_max_pages",
    "kind_class",
    "kind_names",
    "make_kind",
    "register",
]
