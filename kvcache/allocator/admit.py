# SPDX-License-Identifier: Apache-2.0
"""Arguments that describe how a manager admits a request."""

from __future__ import annotations

from typing import NamedTuple

from kvcache.allocator.request import Request
from kvcache.native.load import core


class External(NamedTuple):
    """Tokens of a new request whose KV comes from another process or a store.

    The tokens follow the request's prefix hit, and slots are allocated for them. In window groups,
    only tokens that the next token reads get slots. In a circular buffer, only the last tokens that
    fit into it get slots. KV must be supplied for all groups with `transferred=True`.

    Attributes:
        num_tokens: Number of tokens, at least 0. At least one token of the request must remain to
            be computed.
        delayed: False: the KV is loaded within the step that admits the request, and later plans
            can hit the blocks. True: the KV arrives later. Until `KVCacheManager.finish_receiving`
            is called, the request is not served and gets no more slots, and its blocks cannot be
            hit.
    """

    num_tokens: int
    delayed: bool = False


class Admit(NamedTuple):
    """A request to admit, with options. A plain `Request` is equivalent to `Admit(request)`.

    Attributes:
        request: The request. It must not be admitted yet.
        num_tokens: Maximum number of tokens to compute after the prefix hit and the external
            tokens. None: all known tokens. With `External.delayed`, must be None or 0.
        external: Tokens after the hit whose KV comes from another process or a store. None: no
            external tokens.
        num_lookahead_tokens: Additional slots for draft tokens. Draft tokens are never cached, and later
            tokens reuse their slots. Fewer slots are allocated near `max_model_len`.
        num_reserved_blocks: Number of blocks to leave free in addition to the watermark.
        max_host_blocks: If the hit needs more than this number of blocks from the host, only the
            part of the hit on the device is used. None: no limit. See `PrefixCache.cached_tokens`.
        read_cache: Whether the request uses cached blocks. None: the request's own `read_cache`.
            Requests with encoder tokens never use cached blocks.
        num_prompt_tokens: Number of prompt tokens, at most the known tokens, if the request also
            has generated tokens because it was preempted. `CacheOptions.retention_interval` keeps
            the end of the prompt cached. None: all known tokens.
        num_shared_tokens: Used only by `KVCacheManager.admit`. Pass `CachedPrefix.num_shared_tokens`
            of the lookup that found the hit. `CacheOptions.retention_interval` keeps the end of
            these tokens cached. `step` performs the lookup itself.

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
    num_prompt_tokens: int | None = None
    num_shared_tokens: int = 0


core.use_admit_types(Admit, External)
