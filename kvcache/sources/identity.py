# SPDX-License-Identifier: Apache-2.0
"""The identity of KV: which bytes may be used for which tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from kvcache.allocator.manager import KVCacheManager
from kvcache.allocator.prefix_cache import INITIAL_VERSION
from kvcache.checks import instance, integer, listed, shown, text
from kvcache.kinds import kind_class

FORMAT_VERSION = 3
DIGEST_BYTES = 16
# The options that set how blocks are hashed. Engines that exchange blocks set them to equal values.
HASH_OPTIONS = {"algorithm": "hash_algorithm", "seed": "hash_seed", "bytes": "hash_bytes"}


@dataclass(frozen=True)
class KVIdentity:
    """Everything that determines the KV of given tokens. KV from outside an engine is used only if
    its identity is right.

    - Engines that exchange blocks compare identities with `check`. The layouts of their blocks
      travel next to the identity, because transfer plans convert them (`check_like` refuses other
      dtypes, heads, scales and states).
    - A store converts nothing. Its keys contain the `digest`, which also covers `part`.

    Adapters, images, embeddings and salts belong to the tokens: they are in block hashes and in the
    digests of offers.

    Args:
        model: JSON values that identify the weights at startup, their quantization, and whatever
            else KV depends on.
        version: Version of the weights (`PrefixCache.model_version`).
        groups: The fields of the cache groups, as JSON values.
        hashing: How blocks are hashed: `HASH_OPTIONS`, and the tokens per hash and per block of each
            group, which may differ between engines that exchange blocks. None: blocks are not hashed.
        lookahead: Number of tokens after a token on which its KV depends.
        part: The bytes of a block that this process holds. Empty if a transfer plan knows them.

    Example:
        >>> one = KVIdentity({"name": "llama"}, version="step 1")
        >>> other = replace(one, version="step 2")
        >>> one.digest == other.digest
        False
        >>> one.check(other, "prefill")
        Traceback (most recent call last):
        ...
        ValueError: version of the weights is 'step 1' here, but 'step 2' in engine 'prefill': ...
    """

    model: Mapping[str, Any]
    version: str = INITIAL_VERSION
    groups: tuple[Mapping[str, Any], ...] = ()
    hashing: Mapping[str, Any] | None = None
    lookahead: int = 0
    part: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_manager(cls, manager: KVCacheManager, model: Mapping[str, Any]) -> KVIdentity:
        """Return the identity of a manager's blocks on one rank, without the contents of pages."""
        options, cache = manager.options, manager.cache
        hashing = None
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
        parallel = cache.context_parallel
        part = {"block_sizes": list(manager.block_sizes)}
        part |= {"context_parallel": _plain(parallel)} if parallel.world_size > 1 else {}
        lookahead = options.num_hash_lookahead_tokens
        return cls(model, cache.model_version, tuple(groups), hashing, lookahead, part)

    def exchanged(self) -> KVIdentity:
        """Return the identity that engines which exchange blocks compare. It covers the attention
        kinds of the transferred groups, but nothing that a transfer plan converts.
        """
        kinds = [
            {"kind": group["kind"], "options": group["options"]}
            for group in self.groups
            if group["transferred"]
        ]
        return replace(self, groups=tuple(kinds), part={})

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
        mine, theirs = ({**each.model, "groups": list(each.groups)} for each in (self, other))
        for name in sorted({*mine, *theirs}, key=str):
            if mine.get(name) != theirs.get(name):
                raise ValueError(
                    f"{name} of the model is {shown(mine.get(name))} here, but "
                    f"{shown(theirs.get(name))} in engine {engine_id!r}: expected equal values; serve "
                    "the same model in both engines"
                )
        if self.version != other.version:
            raise ValueError(
                f"version of the weights is {shown(self.version)} here, but {shown(other.version)} in "
                f"engine {engine_id!r}: expected equal versions; call start_epoch with the same "
                "model_version in both engines"
            )
        if self.lookahead != other.lookahead:
            raise ValueError(
                f"lookahead of KV is {self.lookahead} tokens here, but {other.lookahead} in engine "
                f"{engine_id!r}: set num_hash_lookahead_tokens to the same in both"
            )
        if self.hashing is None or other.hashing is None:
            return
        for name, option in options.items():
            if self.hashing.get(name) != other.hashing.get(name):
                raise ValueError(
                    f"{name} of block hashes (hashing) is {shown(self.hashing.get(name))} here, but "
                    f"{shown(other.hashing.get(name))} in engine {engine_id!r}: set {option} to the "
                    "same in both"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, keyed by name, as JSON values."""
        return {**asdict(self), "groups": list(self.groups)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KVIdentity:
        """Create an identity from the result of `to_dict`. Raises KeyError, TypeError or ValueError
        for any other value.
        """
        instance(values, Mapping, "identity")
        found = {each.name: values[each.name] for each in fields(cls)}
        for name in ("model", "part"):
            instance(found[name], Mapping, name)
        if found["hashing"] is not None and not isinstance(found["hashing"], Mapping):
            raise TypeError(f"hashing is {shown(found['hashing'])}: expected algorithm and seed")
        text(found["version"], "version")
        integer(found["lookahead"], "lookahead")
        return cls(**found | {"groups": tuple(listed(found["groups"], "groups"))})


def _plain(spec: Any) -> dict[str, Any]:
    """Return all fields of a dataclass as JSON values.

    Fields that are added to the class later are included automatically.
    """
    values = {each.name: getattr(spec, each.name) for each in fields(spec)}
    return {
        name: dict(value)
        if isinstance(value, Mapping)
        else list(value)
        if isinstance(value, tuple)
        else value
        for name, value in values.items()
    }
