# SPDX-License-Identifier: Apache-2.0
"""The sizes of a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcache.checks import MAX_INT64, flag, integer, shown, text
from kvcache.specs import GroupSpec
from kvcache_exchange.cli.policy_text import parse_eviction
from kvcache_lab.fleet.routers import ROUTERS
from kvcache_lab.groups import parse_groups


@dataclass(frozen=True)
class Fleet:
    """Sizes of a fleet of identical replicas.

    Args:
        replicas: Number of replicas; with decode replicas, the number of prefill replicas.
        num_blocks: Number of device blocks per replica, including the null block.
        block_size: Tokens per block, unless `groups` has other sizes.
        host_blocks: Number of host blocks per replica, including the null block. 0: no host tier.
        store_blocks: Number of blocks in the store that all replicas share. 0: no store.
        router: One of `ROUTERS`.
        concurrency: Maximum number of running requests per replica.
        eviction: Eviction policy of both tiers of a replica, as `policy[:option=value]...`.
        num_preallocate_tokens: Tokens that a replica preallocates for answers (`CacheOptions`).
        decode_replicas: Number of replicas that load computed prompts and generate answers. Decode
            replicas have no host tier, and use neither the store nor peers. 0: all replicas both
            prefill prompts and generate answers.
        peers: Whether a replica loads tokens from the device or host of another replica that has
            cached more of the prefix than the replica's own tiers and the store.
        groups: Cache groups of the model, as `kind[:option=value]...` separated by commas. All groups
            share the blocks of a replica.
        page_bytes: Bytes of a block, summed over all devices of a replica. 0: derived from
            `Hardware.bytes_per_token`, for one group with full attention.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    replicas: int
    num_blocks: int
    block_size: int = 16
    host_blocks: int = 0
    store_blocks: int = 0
    router: str = "prefix"
    concurrency: int = 256
    eviction: str = "lru"
    num_preallocate_tokens: int = 0
    decode_replicas: int = 0
    peers: bool = False
    groups: str = "full_attention"
    page_bytes: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            *(("replicas", 1), ("num_blocks", 2), ("block_size", 1)),
            *(("host_blocks", 0), ("store_blocks", 0), ("concurrency", 1)),
            *(("num_preallocate_tokens", 0), ("decode_replicas", 0)),
        ):
            integer(getattr(self, name), name, least)
        if self.host_blocks == 1:
            raise ValueError("host_blocks is 1: expected 0, or at least 2 including the null block")
        if text(self.router, "router") not in ROUTERS:
            raise ValueError(
                f"router is {shown(self.router)}: expected one of {', '.join(ROUTERS)}"
            )
        integer(self.page_bytes, "page_bytes", 0, MAX_INT64)
        text(self.groups, "groups")
        try:
            kinds = [spec.kind for spec in self.group_specs()]
        except ValueError as error:
            raise ValueError(f"groups has {error}") from None
        if kinds != ["full_attention"] and not self.page_bytes:
            raise ValueError(
                f"page_bytes is 0 with groups {shown(self.groups)}: expected the bytes of a block"
            )
        flag(self.peers, "peers")
        text(self.eviction, "eviction")
        try:
            parse_eviction(self.eviction)
        except ValueError as error:
            raise ValueError(f"eviction is {error}") from None

    def group_specs(self) -> list[GroupSpec]:
        """Return the cache groups."""
        return parse_groups(self.groups, self.block_size)


def fleet_size(fleet: dict[str, Any]) -> str:
    """Return the numbers of replicas of a fleet as text."""
    count, decoding = fleet["replicas"], fleet["decode_replicas"]
    if not decoding:
        return f"{count:,} replica{'s' * (count > 1)}"
    return f"{count:,} prefill and {decoding:,} decode replica{'s' * (decoding > 1)}"
