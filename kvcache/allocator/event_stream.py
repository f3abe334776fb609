# SPDX-License-Identifier: Apache-2.0
"""Combines native events, one per block, into a manager's events for chains of blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvcache.allocator.hashing import HashKey
from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from kvcache.specs import GroupSpec
from kvcache.step import NO_IDS

_STORED, _REMOVED, _CLEARED = 0, 1, 2
_MEDIUMS = ("gpu", "cpu")


class NativeEvents(NamedTuple):
    """Events of the native log, as arrays with one entry per event.

    The tokens are those of blocks stored on the device. Each block's tokens are followed by the
    lookahead tokens that its hash also covers.
    """

    kinds: np.ndarray
    mediums: np.ndarray
    groups: np.ndarray
    hashes: np.ndarray
    parents: np.ndarray
    tokens: np.ndarray
    first_tokens: np.ndarray  # positions; for AllBlocksCleared, number of dropped events
    labels: list[RequestLabels | None]


class RequestLabels(NamedTuple):
    """Request fields in events about its blocks, which native code passes through unchanged."""

    key: HashKey
    lora: tuple[str, ...] | None
    mm_items: Sequence[tuple[str, int, int]]
    cache_salt: str | None
    prompt_embeds: np.ndarray | None
    session: str | None
    is_token_id: np.ndarray | None = None

    def extra_keys(self, first_token: int, stop: int) -> tuple[tuple | None, ...] | None:
        """Return each hash block's extra keys (csrc/core/hashing/extra_keys.h), or None without any."""
        size, covered = self.key.block_size, self.key.block_size + self.key.num_lookahead
        starts = range(first_token, stop, size)
        keys = tuple(self._keys_of(start, start + covered) for start in starts)
        return keys if any(keys) else None

    def _keys_of(self, start: int, stop: int) -> tuple[tuple, ...] | None:
        keys: list[tuple] = [] if self.lora is None else [("lora", *self.lora)]
        for identifier, first, length in self.mm_items:
            if first < stop and first + length > start:
                keys.append(("mm", identifier, first - start))
        if self.cache_salt is not None and start == 0:
            keys.append(("cache_salt", self.cache_salt))
        if self.prompt_embeds is not None and start < len(self.prompt_embeds):
            digest = digest_of_rows(self.prompt_embeds, start, stop, self.is_token_id)
            if digest is not None:
                keys.append(("prompt_embeds", digest))
        return tuple(keys) or None


def digest_of_rows(
    rows: np.ndarray, start: int, stop: int, is_token_id: np.ndarray | None = None
) -> bytes | None:
    """Return the SHA-256 digest of the dtype, row shape and bytes of the rows [start, stop).

    `is_token_id` marks the rows that are not used. The digest contains the mask and the other rows,
    or is None if no row is used.
    """
    header, some = ",".join([rows.dtype.str, *map(str, rows.shape[1:])]), rows[start:stop]
    mask = np.zeros(0, bool) if is_token_id is None else is_token_id[start:stop]
    if not mask.any():
        return hashlib.sha256(f"{header}:".encode() + some.tobytes()).digest()
    if mask.all():
        return None
    mixed = f"{header},mixed:".encode() + mask.tobytes() + some[~mask].tobytes()
    return hashlib.sha256(mixed).digest()


def events_of(
    drained: tuple, groups: Sequence[GroupSpec], block_sizes: Sequence[int], key: HashKey
) -> list[CacheEvent]:
    """Convert the fields of `NativeEvents` to the events of a manager with these groups."""
    native = NativeEvents(*drained)
    emitted: list[CacheEvent] = []
    token = 0
    for first, stop in _runs(native):
        kind, group = int(native.kinds[first]), int(native.groups[first])
        medium = _MEDIUMS[native.mediums[first]]
        hashes = native.hashes[first:stop]
        if kind == _CLEARED:
            emitted.append(AllBlocksCleared(medium, int(native.first_tokens[first])))
            continue
        if kind == _REMOVED:
            emitted.append(BlockRemoved(hashes, group, medium))
            continue
        size, spec = block_sizes[group], groups[group]
        of_group = {
            "block_size": size,
            "group": group,
            "medium": medium,
            "hash_algorithm": key.algorithm,
            "hash_block_size": key.block_size,
            "group_kind": spec.kind,
            "window": spec.options.get("window"),
        }
        if medium == "cpu":
            emitted.append(BlockStored(hashes, None, NO_IDS, **of_group))
            continue
        first_token, num_tokens = int(native.first_tokens[first]), (stop - first) * size
        covered = size + key.num_lookahead
        tokens = native.tokens[token : token + (stop - first) * covered].reshape(-1, covered)
        has_parent = first_token > 0 or not key.is_given
        labels = native.labels[first]
        if labels is not None:
            of_group |= {
                "lora": labels.lora,
                "session": labels.session,
                "root_hash": None if labels.key.parent == key.parent else labels.key.parent,
                "extra_keys": labels.extra_keys(first_token, first_token + num_tokens),
            }
        emitted.append(
            BlockStored(
                hashes,
                native.parents[first].tobytes() if has_parent else None,
                tokens[:, :size].reshape(-1),
                lookahead_token_ids=tokens[:, size:] if key.num_lookahead else None,
                **of_group,
            )
        )
        token += tokens.size
    return emitted


def _runs(native: NativeEvents) -> Iterator[tuple[int, int]]:
    """Yield the (first, stop) of native events of equal kind and group; stored blocks form a chain."""
    kinds, mediums, groups, hashes, parents = native[:5]
    if len(kinds) == 0:
        return
    same = (kinds[1:] == kinds[:-1]) & (groups[1:] == groups[:-1]) & (kinds[1:] != _CLEARED)
    same &= mediums[1:] == mediums[:-1]
    labels = np.array([id(each) for each in native.labels])
    chained = (parents[1:] == hashes[:-1]).all(axis=1) & (labels[1:] == labels[:-1])
    chained |= (kinds[1:] != _STORED) | (mediums[1:] != 0)
    breaks = np.flatnonzero(~(same & chained)) + 1
    yield from zip([0, *breaks.tolist()], [*breaks.tolist(), len(kinds)])
