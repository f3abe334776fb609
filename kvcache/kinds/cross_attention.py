# SPDX-License-Identifier: Apache-2.0
"""Cross-attention, in which every token attends to all `Request.num_encoder_tokens` tokens of the
encoder.

The encoder's blocks are allocated at admission, held until the request is freed, and never shared. The
decoder's KV depends on the encoder's input, so requests with encoder tokens do not use cached blocks,
and their own blocks are not cached.
"""

from kvcache.kinds.base import KindProperties
from kvcache.kinds.contents import ENCODER
from kvcache.kinds.registry import register
from kvcache.native.load import core


@register("cross_attention")
class CrossAttention(KindProperties, core.CrossAttention):
    """Cross-attention, without options. Planning calls `max_pages` with `max_encoder_tokens`."""

    pages = ENCODER

    def most_held(self, num_tokens: int, step_tokens: int, tokens_per_page: int) -> int:
        """Return the number of pages for all encoder tokens."""
        return -(-num_tokens // tokens_per_page)
