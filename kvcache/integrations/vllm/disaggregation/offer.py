"""What a producer tells of a finished request: the `kv_transfer_params` of its answer, plain JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvcache.checks import MAX_INT64, integer, shown
from kvcache.integrations.vllm.disaggregation.layout import GroupLayout

VERSION = 1
_KEY = "kvcache"
_MOST_RANKS = 4096


@dataclass(frozen=True)
class RankAddress:
    """Where a rank of the producer is read. transport: its name. metadata: what the transport connects
    to, base64. addresses: by group, where page 0 of each layer begins. leases: where the slots are."""

    transport: str
    metadata: str
    addresses: tuple[tuple[int, ...], ...]
    leases: int


@dataclass(frozen=True)
class Lease:
    """Blocks are kept while `slot` of each rank's leases holds `generation`.

    until: seconds since the epoch, by the producer's clock; what counts is the slot.
    """

    slot: int
    generation: int
    until: float


@dataclass(frozen=True)
class Offer:
    """The blocks of a request, as another engine may read them.

    hashing: algorithm and seed of the producer's block hashes, None without prefix caching. model: what
    must be equal in both engines. digest: of the first `num_tokens` tokens, by `digest_of`. blocks: by
    group; 0 where there is none any more.
    """

    engine_id: str
    request_id: str
    num_tokens: int
    digest: str
    hashing: Mapping[str, str] | None
    model: Mapping[str, Any]
    groups: tuple[GroupLayout, ...]
    blocks: tuple[tuple[int, ...], ...]
    ranks: tuple[RankAddress, ...]
    lease: Lease

    def to_params(self) -> dict[str, Any]:
        """Values for JSON. The names of vLLM's own connectors beside them are for proxies."""
        own = asdict(self) | {
            "version": VERSION,
            "groups": [each.to_dict() for each in self.groups],
        }
        return {"do_remote_prefill": True, "do_remote_decode": False, _KEY: _plain(own)}

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> Offer | None:
        """The offer in a request's `kv_transfer_params`; None where there is none.

        ValueError for another version, and for values that no producer makes.
        """
        if not isinstance(params, Mapping) or not params.get("do_remote_prefill"):
            return None
        own = params.get(_KEY)
        if own is None:
            raise ValueError(
                f"kv_transfer_params have {sorted(params)}: expected {_KEY!r}, as a producer with this "
                "connector answers; use the same connector in both engines"
            )
        if not isinstance(own, Mapping) or own.get("version") != VERSION:
            version = own.get("version") if isinstance(own, Mapping) else None
            raise ValueError(
                f"version of kv_transfer_params is {shown(version)}: expected {VERSION}; install the "
                "same version of kvcache in both engines"
            )
        try:
            return cls._checked(own)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"kv_transfer_params are not an offer: {missing}") from error

    @classmethod
    def _checked(cls, own: Mapping[str, Any]) -> Offer:
        groups = tuple(GroupLayout.from_dict(each) for each in own["groups"])
        blocks = tuple(
            tuple(integer(each, "a block", 0, layout.num_blocks - 1) for each in ids)
            for layout, ids in zip(groups, own["blocks"], strict=True)
        )
        num_tokens = integer(own["num_tokens"], "num_tokens", 1)
        ranks = tuple(_rank(each, groups) for each in own["ranks"])
        world_sizes = {layout.description.world_size for layout in groups}
        if world_sizes != {len(ranks)} or len(ranks) > _MOST_RANKS:
            raise ValueError(f"there are {len(ranks)} ranks: expected {sorted(world_sizes)}")
        for layout, ids in zip(groups, blocks):
            if len(ids) * layout.block_size < num_tokens:
                raise ValueError(
                    f"a group has {len(ids)} blocks of {layout.block_size} tokens: expected enough for "
                    f"{num_tokens} tokens"
                )
        lease, hashing = own["lease"], own["hashing"]
        if hashing is not None and not isinstance(hashing, Mapping):
            raise TypeError(f"hashing is {shown(hashing)}: expected algorithm and seed")
        return cls(
            _text(own["engine_id"], "engine_id"),
            _text(own["request_id"], "request_id"),
            num_tokens,
            _text(own["digest"], "digest"),
            hashing,
            dict(own["model"]),
            groups,
            blocks,
            ranks,
            Lease(
                integer(lease["slot"], "slot"),
                integer(lease["generation"], "generation", 1, MAX_INT64),
                float(lease["until"]),
            ),
        )

    def check_answers(self, model: Mapping[str, Any], hashing: Mapping[str, str] | None) -> None:
        """ValueError where the producer serves another model, or hashes blocks otherwise."""
        for name in sorted(set(model) | set(self.model)):
            if model.get(name) != self.model.get(name):
                raise ValueError(
                    f"{name} of the model is {shown(model.get(name))} here, "
                    f"{shown(self.model.get(name))} in engine {self.engine_id!r}: expected the same; "
                    "serve the same model in both"
                )
        if hashing is None or self.hashing is None:
            return
        for name, change in (
            ("algorithm", "--prefix-caching-hash-algo"),
            ("seed", "PYTHONHASHSEED"),
        ):
            if hashing[name] != self.hashing.get(name):
                raise ValueError(
                    f"{name} of block hashes is {hashing[name]!r} here, "
                    f"{shown(self.hashing.get(name))} in engine {self.engine_id!r}: set {change} to the "
                    "same in both"
                )


def digest_of(
    token_ids: Sequence[int], lora_name: str | None, items: Sequence[tuple[str, int]]
) -> str:
    """A digest of tokens and of what else their KV depends on: an adapter, and (identifier, position) of
    images and other items among them."""
    digest = hashlib.sha256(np.asarray(token_ids, np.int64).tobytes())
    digest.update(json.dumps([len(token_ids), lora_name, list(items)]).encode())
    return digest.hexdigest()


def _rank(values: Mapping[str, Any], groups: Sequence[GroupLayout]) -> RankAddress:
    addresses = tuple(
        tuple(integer(each, "an address", 0, MAX_INT64) for each in of_group)
        for of_group in values["addresses"]
    )
    if [len(each) for each in addresses] != [len(layout.layers) for layout in groups]:
        raise ValueError(
            f"a rank has addresses of {[len(each) for each in addresses]} layers: expected "
            f"{[len(layout.layers) for layout in groups]}"
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
