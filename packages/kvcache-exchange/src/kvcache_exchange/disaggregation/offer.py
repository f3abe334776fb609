# SPDX-License-Identifier: Apache-2.0
"""A sender's offer, in plain JSON, that lets other engines read the blocks of a request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvcache.checks import MAX_INT64, instance, instances, integer, shown
from kvcache_exchange.disaggregation.layout import GroupLayout, check_like
from kvcache_exchange.disaggregation.leases import NUM_SLOTS, Lease
from kvcache_exchange.identity import HASH_OPTIONS, KVIdentity

VERSION = 6
_MOST_RANKS = 4096


@dataclass(frozen=True)
class RankAddress:
    """The information that a peer needs to read from one of the sender's ranks.

    Attributes:
        transport: Name of the transport.
        metadata: Base64-encoded metadata for `Transport.connect`.
        addresses: Start address of each region of the rank's pages, per group.
        leases: Address of the lease slots.
    """

    transport: str
    metadata: str
    addresses: tuple[tuple[int, ...], ...]
    leases: int


@dataclass(frozen=True)
class Offer:
    """Describes the blocks of a request that another engine can read.

    Attributes:
        digest: Digest of the tokens on which the KV depends, from `digest_of`: `num_tokens`, and the
            identity's `lookahead`.
        identity: The sender's identity.
        groups: The layouts of the sender's blocks, which may be converted.
        blocks: The request's block table for each group. 0 marks a block that is no longer held.
    """

    engine_id: str
    request_id: str
    num_tokens: int
    digest: str
    identity: KVIdentity
    groups: tuple[GroupLayout, ...]
    blocks: tuple[tuple[int, ...], ...]
    ranks: tuple[RankAddress, ...]
    lease: Lease

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, including a seal over them."""
        groups = [each.to_dict() for each in self.groups]
        return sealed(_plain(asdict(self) | {"version": VERSION, "groups": groups}))

    @classmethod
    def from_dict(cls, values: Any) -> Offer:
        """Create an offer from the result of `to_dict`.

        Raises ValueError if the version, a value or the seal is wrong.
        """
        if not isinstance(values, Mapping) or values.get("version") != VERSION:
            version = values.get("version") if isinstance(values, Mapping) else None
            raise ValueError(
                f"version of the offer is {shown(version)}: expected {VERSION}; install the same "
                "version of kvcache in both engines"
            )
        try:
            return cls._checked(values)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"this is not an offer: {missing}") from error

    @classmethod
    def _checked(cls, own: Mapping[str, Any]) -> Offer:
        groups = tuple(GroupLayout.from_dict(each) for each in own["groups"])
        blocks = tuple(
            tuple(integer(each, "a block", 0, layout.num_blocks - 1) for each in ids)
            for layout, ids in zip(groups, own["blocks"], strict=True)
        )
        num_tokens = integer(own["num_tokens"], "num_tokens", 1)
        world_sizes = {layout.description.world_size for layout in groups}
        if world_sizes != {len(own["ranks"])} or len(own["ranks"]) > _MOST_RANKS:
            raise ValueError(f"there are {len(own['ranks'])} ranks: expected {sorted(world_sizes)}")
        ranks = tuple(_rank(each, groups, rank) for rank, each in enumerate(own["ranks"]))
        for layout, ids in zip(groups, blocks):
            if not layout.is_state and len(ids) * layout.block_size < num_tokens:
                raise ValueError(
                    f"a group has {len(ids)} blocks of {layout.block_size} tokens: expected enough for "
                    f"{num_tokens} tokens"
                )
        lease = own["lease"]
        found = cls(
            _text(own["engine_id"], "engine_id"),
            _text(own["request_id"], "request_id"),
            num_tokens,
            _text(own["digest"], "digest"),
            KVIdentity.from_dict(own["identity"]),
            groups,
            blocks,
            ranks,
            Lease(
                integer(lease["slot"], "slot", 0, NUM_SLOTS - 1),
                integer(lease["generation"], "generation", 1, MAX_INT64),
                float(lease["until"]),
            ),
        )
        if own["seal"] != sealed(own)["seal"]:
            raise ValueError(
                f"seal is {shown(own['seal'])}: expected the seal of the other fields; do not change "
                "offers"
            )
        return found

    def check_like(
        self,
        identity: KVIdentity,
        layouts: Sequence[GroupLayout],
        options: Mapping[str, str] = HASH_OPTIONS,
        converts: Sequence[str] = (),
    ) -> None:
        """Raise ValueError unless the sender's blocks hold the KV that this engine would compute, or
        if they cannot be converted to its layouts. See `KVIdentity.check` and `layout.check_like`.
        """
        instance(identity, KVIdentity, "identity")
        instances(layouts, GroupLayout, "layouts")
        instances(converts, str, "converts")
        identity.check(self.identity, self.engine_id, options)
        check_like(layouts, self.groups, converts)

    def check_prompt(self, num_tokens: int, digest_of_first: Callable[[int], str]) -> None:
        """Raise ValueError if a request has fewer tokens than the offer or its tokens differ.

        `num_tokens` are the request's tokens, and `digest_of_first(n)` returns `digest_of` of the
        first n of them.
        """
        covered = self.num_tokens + self.identity.lookahead
        if not callable(digest_of_first):
            raise TypeError(f"digest_of_first is {shown(digest_of_first)}: expected a function")
        if integer(num_tokens, "num_tokens") < covered:
            raise ValueError(
                f"the request has {num_tokens} tokens, but the offer has {covered}: expected a "
                "prompt of at least as many tokens"
            )
        if digest_of_first(covered) != self.digest:
            raise ValueError(
                "the offer is for other tokens, images or another adapter: send both engines the same "
                "prompt"
            )


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an offer's values together with a seal, which is a digest that detects accidental
    changes.

    The seal does not protect against forgery. Raises TypeError or ValueError for values that JSON
    cannot represent.
    """
    own = {name: value for name, value in values.items() if name != "seal"}
    try:
        text = json.dumps(own, sort_keys=True)
    except (ValueError, RecursionError):
        raise ValueError(
            "a value cannot be represented in JSON: expected numbers and strings"
        ) from None
    return own | {"seal": hashlib.sha256(text.encode()).hexdigest()}


def digest_of(
    token_ids: Sequence[int],
    lora: str | Sequence[str] | None,
    items: Sequence[Sequence[str | int]],
    *,
    salt: str | None = None,
    embeds: str | None = None,
) -> str:
    """Return a digest of the tokens and of all other inputs that determine their KV.

    Args:
        token_ids: The tokens.
        lora: Name of an adapter, or (name, path) with further texts, such as its version.
        items: A tuple (identifier, first token, number of tokens) for each image or other
            multimodal item.
        salt: Cache salt, which separates tenants.
        embeds: Digest of the embedding rows that replace tokens.
    """
    digest = hashlib.sha256(np.asarray(token_ids, np.int64).tobytes())
    beside = {"lora": lora, "items": list(items), "salt": salt, "embeds": embeds}
    digest.update(json.dumps([len(token_ids), beside]).encode())
    return digest.hexdigest()


def _rank(values: Mapping[str, Any], groups: Sequence[GroupLayout], rank: int) -> RankAddress:
    addresses = tuple(
        tuple(integer(each, "an address", 0, MAX_INT64) for each in of_group)
        for of_group in values["addresses"]
    )
    expected = [layout.num_regions(rank) for layout in groups]
    if [len(each) for each in addresses] != expected:
        raise ValueError(
            f"rank {rank} has addresses of {[len(each) for each in addresses]} regions: "
            f"expected {expected}"
        )
    return RankAddress(
        _text(values["transport"], "transport"),
        _text(values["metadata"], "metadata"),
        addresses,
        integer(values["leases"], "leases", 0, MAX_INT64),
    )


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)}: expected text")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value
