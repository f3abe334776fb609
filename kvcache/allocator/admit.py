"""The values by which callers ask a manager to admit a request."""

from __future__ import annotations

from typing import NamedTuple

from kvcache.allocator.request import Request
from kvcache.native.load import core


class External(NamedTuple):
    """Tokens of a new request whose KV comes from another process or a store.

    The tokens follow the request's prefix hit, and get slots. In window groups, only the tokens that the
    next token reads get slots; in a circular buffer, the last tokens that it has room for. The KV must
    come for all groups that are transferred.

    Attributes:
        num_tokens: Number of tokens, 0 or more. At least one token must be left to compute.
        delayed: False: the KV is loaded within the step that admits the request, and the blocks become
            hits for later plans. True: the KV arrives later. Until `KVCacheManager.finish_receiving`, the
            request gets no further slots, is not served, and none of its blocks is a hit.
    """

    num_tokens: int
    delayed: bool = False


class Admit(NamedTuple):
    """A request to admit, and how. A plain `Request` stands for `Admit(request)`.

    Attributes:
        request: The request, which has no row yet.
        num_tokens: Maximum number of tokens to compute after the prefix hit and the external tokens; None
            for all known tokens. Must be None or 0 with `External.delayed`.
        external: Tokens after the hit whose KV comes from elsewhere.
        num_lookahead_tokens: Additional slots for draft tokens. Draft tokens are never cached, and later
            tokens reuse their slots. Near `max_model_len` a request gets fewer.
        num_reserved_blocks: Blocks to leave free in addition to the watermark.
        max_host_blocks: If the hit needs more blocks from the host than this, only the device's part of
            the hit is used; None for no limit. See `PrefixCache.cached_tokens`.
        read_cache: Whether the request takes hits; None for its own `read_cache`. A request with
            encoder tokens takes none.

    >>> Admit(Request("r1", range(40)), num_tokens=8).external is None
    True
    """

    request: Request
    num_tokens: int | None = None
    external: External | None = None
    num_lookahead_tokens: int = 0
    num_reserved_blocks: int = 0
    max_host_blocks: int | None = None
    read_cache: bool | None = None


core.use_admit_types(Admit, External)
