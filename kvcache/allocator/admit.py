# SPDX-License-Identifier: Apache-2.0
"""Arguments that describe how a manager admits a request."""

from __future__ import annotations

from typing import NamedTuple

from kvcache.allocator.request import Request
from kvcache.native.load import core


class External(NamedTuple):
    """Tokens of a new request whose KV comes from another process or a store.

    The tokens follow the request's prefix hit, and slots are allocated for them. In window groups,
    slots are allocated only for the tokens to which the next token attends. In a circular buffer,
    slots are allocated only for the last tokens that fit into the buffer. The caller must supply the
    KV for all groups with `transferred=True`.

    Attributes:
        num_tokens: Number of tokens, at least 0. At least one token of the request must remain to
            be computed.
        delayed: If False, the KV is loaded within the step that admits the request, and later plans
            can hit the blocks. If True, the KV arrives later. Until `KVCacheManager.finish_receiving`
            is called, the request is not scheduled, no further slots are allocated for it, and its
            blocks cannot be hit.
    """

    num_tokens: int
    delayed: bool = False


class Admit(NamedTuple):
    """A request to admit, with options. A plain `Request` is equivalent to `Admit(request)`.

    Attributes:
        request: The request. It must not be admitted yet.
        num_tokens: Maximum number of known tokens to compute after the prefix hit and the external
            tokens. None: all known tokens. With `External.delayed`, must be None or 0. Slots for tokens
            that are not known yet are lookahead slots.
        external: Tokens after the hit whose KV comes from another process or a store. None: no
            external tokens, as required for a request that does not use cached blocks.
        num_lookahead_tokens: Additional slots for draft tokens. Draft tokens are never cached, and later
            tokens reuse their slots. Fewer slots are allocated near `max_model_len`.
        num_reserved_blocks: Number of blocks to leave free in addition to the watermark.
        max_host_blocks: Maximum number of blocks that the hit may load from the host. If the hit needs
            more, only the part that is on the device is used. None: no limit. See
            `PrefixCache.cached_tokens`.
        read_cache: Whether the request uses cached blocks. None: the request's own `read_cache`.
            Requests with encoder tokens never use cached blocks.
        num_prompt_tokens: Number of prompt tokens, at most the number of known tokens. Specify it for a
            preempted request, whose known tokens include generated tokens. With
            `CacheOptions.retention_interval`, the blocks at the end of the prompt stay cached. None:
            all known tokens.
        num_shared_tokens: Used only by `KVCacheManager.admit`. Pass the `num_shared_tokens` of the
            `CachedPrefix` that the lookup returned. With `CacheOptions.retention_interval`, the
            blocks at the end of these tokens stay cached. `step` performs the lookup itself.

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
