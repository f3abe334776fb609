"""Every token reads all tokens of the encoder: `Request.num_encoder_tokens` of them.

Their blocks are taken at admission, stay until the request is freed, and are never shared. The KV of
the decoder depends on the encoder's input, so that requests with encoder tokens neither take hits
nor leave any.
"""

from kvcache.kinds.base import KindProperties
from kvcache.kinds.registry import register
from kvcache.native.load import core


@register("cross_attention")
class CrossAttention(KindProperties, core.CrossAttention):
    """No options. Planning asks `max_pages` with the encoder's tokens (`max_encoder_tokens`)."""

    pages = "encoder"
