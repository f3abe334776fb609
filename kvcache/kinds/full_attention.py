# SPDX-License-Identifier: Apache-2.0
"""Full attention, in which every token attends to all earlier tokens."""

from kvcache.kinds.base import KindProperties
from kvcache.kinds.registry import register
from kvcache.native.load import core


@register("full_attention")
class FullAttention(KindProperties, core.FullAttention):
    """Full attention, without options."""
