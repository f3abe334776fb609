# SPDX-License-Identifier: Apache-2.0
"""The identity of KV: which bytes may be used for which tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kvcache.allocator import KVCacheManager
from kvcache.allocator.prefix_cache import INITIAL_VERSION
from kvcache.checks import instance, instances, integer, shown, text
from kvcache.kinds import kind_class

FORMAT_VERSION = 3
DIGEST_BYTES = 16
# The options that set how blocks are hashed, which must be equal in engines that exchange blocks.
HASH_OPTIONS = {"algorithm": "hash_algorithm", "seed": "hash_seed", "bytes": "hash_bytes"}


@dataclass(frozen=True)
class KVIdentity:
    """Everything that determines the KV of given tokens. KV from elsewhere is used only under it.

    Engines that exchange blocks compare identities with `check`, and their layouts, which transfer
    plans convert, with `check_like`. A store converts nothing, so its keys contain the `digest`.
    Adapters, images, embeddings and salts belong to the tokens: they are in block hashes and in the
    digests of offers.

    Args:
        model: JSON values that identify the weights at startup and their quantization.
        version: Version of the weights (`PrefixCache.model_version`).
        groups: The fields of each cache group.
        hashing: How blocks are hashed: the values of `HASH_OPTIONS`, and the tokens per hash and per
            block of each group. None: blocks are not hashed.
        lookahead: Number of tokens after a token on which its KV depends.
        part: What a rank's pages hold of a block, for stores.

    Example:
        >>> one, other = (KVIdentity({"name": "llama"}, version=each) for each in ("1", "2"))
        >>> one.digest == other.digest
        False
        >>> one.check(other, "prefill")
        Traceback (most recent call last):
        ...
        ValueError: version of the weights is '1' here, but '2' in engine 'prefill': expected equal ...
    """

    model: Mapping[str, Any]
    version: str = INITIAL_VERSION
    groups: tuple[Mapping[str, Any], ...] = ()
    hashing: Mapping[str, Any] | None = None
    lookahead: int = 0
    part: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "part", *(() if self.hashing is None else ("hashing",))):
            instance(getattr(self, name), Mapping, name)
        text(self.version, "version")
        integer(self.lookahead, "lookahead")
        object.__setattr__(self, "groups", tuple(instances(self.groups, Mapping, "groups")))

    @classmethod
    def of_manager(cls, manager: KVCacheManager, model: Mapping[str, Any]) -> KVIdentity:
        """Return the identity of a manager's blocks, without the contents of pages.

        Raises TypeError or ValueError if `manager` is not a manager, or if `model` cannot be
        represented in JSON.
        """
        instance(manager, KVCacheManager, "manager")
        try:  # as another engine receives the values
            model = json.loads(json.dumps(model, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise type(error)(f"model is {shown(model)}: expected JSON values ({error})") from None
        options, cache, hashing = manager.options, manager.cache, None
        if options.enable_caching:
            hashing = {
                "algorithm": cache.hash_algorithm,
                "seed": hashlib.sha256(repr(options.hash_seed).encode()).hexdigest()[:16],
                "bytes": cache.hash_bytes,
                "hash_block_size": cache.hash_block_size,
                "block_sizes": list(manager.block_sizes),
            }
        groups = [
            _plain(spec) | {"is_state": not kind_class(spec.kind).pages.has_slots}
            for spec in manager.groups
        ]
        parallel, lookahead = cache.context_parallel, options.num_hash_lookahead_tokens
        part = {"context_parallel": _plain(parallel)} if parallel.world_size > 1 else {}
        return cls(model, cache.model_version, tuple(groups), hashing, lookahead, part)

    @property
    def digest(self) -> bytes:
        """A digest of all fields, 16 bytes."""
        encoded = json.dumps([FORMAT_VERSION, asdict(self)], sort_keys=True).encode()
        return hashlib.sha256(encoded).digest()[:DIGEST_BYTES]

    def check(
        self, other: KVIdentity, engine_id: str, options: Mapping[str, str] = HASH_OPTIONS
    ) -> None:
        """Check that blocks of another engine have the KV that this engine would compute.

        Args:
            other: The other engine's identity.
            engine_id: Name of the other engine, for messages.
            options: For each value of `hashing` that must be equal, the option that sets it.

        Raises:
            ValueError: The identities differ. The one-line message names the first difference.
        """
        instance(other, KVIdentity, "other")
        instance(options, Mapping, "options")
        same = "serve the same model"
        compared = [
            (f"{name} of the model", self.model.get(name), other.model.get(name), same)
            for name in sorted({*self.model, *other.model}, key=str)
        ]
        compared.append(("groups of the model", self._kinds(), other._kinds(), same))
        change = "call start_epoch with the same model_version"
        compared.append(("version of the weights", self.version, other.version, change))
        change = "set num_hash_lookahead_tokens to the same"
        compared.append(("lookahead of KV, in tokens,", self.lookahead, other.lookahead, change))
        if self.hashing is not None and other.hashing is not None:
            for name, option in options.items():
                values = self.hashing.get(name), other.hashing.get(name)
                change = f"set {option} to the same"
                compared.append((f"{name} of block hashes (hashing)", *values, change))
        for what, here, there, change in compared:
            if here != there:
                raise ValueError(
                    f"{what} is {shown(here)} here, but {shown(there)} in engine {engine_id!r}: "
                    f"expected equal values; {change} in both engines"
                )

    def _kinds(self) -> list[list[Any]]:
        """Return what transfer plans cannot convert: the attention kinds of transferred groups."""
        groups = [group for group in self.groups if group.get("transferred")]
        return [[group.get("kind"), group.get("options")] for group in groups]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, keyed by name, as JSON values."""
        return {**asdict(self), "groups": list(self.groups)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KVIdentity:
        """Create an identity from the result of `to_dict`. Raises an error for any other value."""
        instance(values, Mapping, "values of the identity")
        return cls(**{each.name: values[each.name] for each in fields(cls)})


def _plain(spec: Any) -> dict[str, Any]:
    """Return all fields of a dataclass as JSON values, including fields that are added later."""
    return json.loads(json.dumps(asdict(spec), default=dict))
