# SPDX-License-Identifier: Apache-2.0
"""The tokens and block hashes of sequences, each in a `Request` of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.allocator.hashing import token_sequence
from kvcache.allocator.request import Request
from kvcache.checks import shown
from kvcache.compat.block_space_manager.protocol import (
    SequenceLike,
    extra_hash,
    fail_ids,
    id_of,
    length_of,
    token_ids_of,
)


class TokenSource:
    """Creates requests. Keeps those of queried sequences, so that each sequence is hashed once."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._kept: dict[object, tuple[SequenceLike, Request]] = {}  # kept requests, by seq_id

    def read(self, seq: SequenceLike) -> Request:
        """Return all tokens of a sequence. If its request was kept, only new tokens are read."""
        extra, num_tokens = extra_hash(seq), length_of(seq)
        owner, kept = self._kept.get(id_of(seq)) or (None, None)
        if (
            owner is seq
            and kept is not None
            and kept.cache_salt == extra
            and kept.num_tokens <= num_tokens
        ):
            if kept.num_tokens < num_tokens:
                kept.append_tokens(_tokens_from(seq, kept.num_tokens, num_tokens))
            return kept
        return Request("", _tokens_from(seq, 0, num_tokens), cache_salt=extra)

    def unread(self, num_tokens: int) -> Request:
        """Return tokens with unspecified ids, which neither use nor create cached blocks."""
        ids = np.zeros(num_tokens, np.int32)
        return Request("", ids, read_cache=False, write_cache=False)

    def copy_of(self, request: Request) -> Request:
        """Return an independent copy of the tokens."""
        if not request.read_cache:
            return self.unread(request.num_tokens)
        return Request("", request.token_ids, cache_salt=request.cache_salt)

    def of_child(self, child_seq: SequenceLike, parent: Request) -> Request:
        """Return a copy of the parent's tokens, after comparing the last `block_size` of them."""
        length, num_tokens = length_of(child_seq), parent.num_tokens
        if length < num_tokens:
            raise ValueError(
                f"child_seq {child_seq.seq_id!r} has {length} tokens: expected at least the "
                f"{num_tokens} tokens of its parent"
            )
        if not parent.read_cache:
            return self.unread(num_tokens)
        extra, child_ids = extra_hash(child_seq), token_ids_of(child_seq)
        if extra != parent.cache_salt:
            raise ValueError(
                f"extra_hash() of child_seq {child_seq.seq_id!r} is {shown(extra)}: expected the "
                f"parent's extra_hash(), {shown(parent.cache_salt)}"
            )
        if len(child_ids) != length:
            fail_ids(child_seq, len(child_ids), length)
        first, ids = max(num_tokens - self._block_size, 0), parent.token_ids
        if [*child_ids[first:num_tokens]] != ids[first:].tolist():
            raise ValueError(
                f"child_seq {child_seq.seq_id!r} differs from its parent in tokens {first} to "
                f"{num_tokens - 1}: expected it to start with the parent's {num_tokens} tokens"
            )
        return Request("", ids, cache_salt=extra)

    def keep(self, seq: SequenceLike, request: Request) -> None:
        """Keep the request until `forget`."""
        self._kept[id_of(seq)] = (seq, request)

    def forget(self, seq_id: object) -> None:
        """Discard the kept request, if any."""
        self._kept.pop(seq_id, None)


def _tokens_from(
    seq: SequenceLike, first: int, num_tokens: int
) -> np.ndarray | list[Any] | tuple[Any, ...]:
    all_ids = token_ids_of(seq)
    ids = token_sequence(all_ids[first:] if first else all_ids)
    if len(ids) != num_tokens - first:
        fail_ids(seq, first + len(ids), num_tokens)
    return ids
