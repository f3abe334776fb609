# SPDX-License-Identifier: Apache-2.0
"""Converts sequences' tokens for the native manager: the token ids, or only the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from kvcache.allocator.event_stream import RequestLabels
from kvcache.allocator.hashing import HashKey, token_sequence
from kvcache.checks import shown
from kvcache.compat.sequences.protocol import SequenceLike, extra_hash
from kvcache.native.load import core


class Tokens:
    """A sequence's known tokens and block hashes, including tokens appended by native code."""

    __slots__ = ("are_read", "chain", "extra", "ids")

    def __init__(
        self, ids: core.TokenIds, are_read: bool, extra: str | None, chain: core.TokenChain
    ) -> None:
        self.ids = ids
        self.are_read = are_read  # whether `ids` are real token ids
        self.extra = extra
        self.chain = chain


class TokenSource:
    """Creates `Tokens`. Keeps the tokens of queried sequences, so that each sequence is hashed once."""

    def __init__(self, key: HashKey) -> None:
        self.key = key
        self._kept: dict[object, tuple[SequenceLike, Tokens]] = {}  # kept tokens, keyed by seq_id

    def read(self, seq: SequenceLike) -> Tokens:
        """Return all tokens of a sequence. If its tokens were kept, only new tokens are read."""
        extra, num_tokens = extra_hash(seq), core.length_of(seq)
        owner, kept = self._kept.get(core.seq_id_of(seq), (None, None))
        if owner is seq and kept.extra == extra and len(kept.ids) <= num_tokens:
            if len(kept.ids) < num_tokens:
                kept.ids.append(_tokens_from(seq, len(kept.ids), num_tokens))
            return kept
        return self._make(core.TokenIds(_tokens_from(seq, 0, num_tokens)), True, extra)

    def unread(self, num_tokens: int) -> Tokens:
        """Return tokens with unspecified ids, which neither use nor create cached blocks."""
        return self._make(core.TokenIds(num_zeros=num_tokens), False, None)

    def copy_of(self, tokens: Tokens) -> Tokens:
        """Return an independent copy of the tokens."""
        if not tokens.are_read:
            return self.unread(len(tokens.ids))
        return self._make(core.TokenIds(tokens.ids.copy()), True, tokens.extra)

    def of_child(self, child_seq: SequenceLike, tokens: Tokens, num_tokens: int) -> Tokens:
        """Return a copy for a child that begins with these tokens.

        Raises ValueError if the child's ids differ from the parent's in the last `block_size` tokens.
        """
        length = core.length_of(child_seq)
        if length < num_tokens:
            raise ValueError(
                f"child_seq {child_seq.seq_id!r} has {length} tokens: expected at least the "
                f"{num_tokens} tokens of its parent"
            )
        if not tokens.are_read:
            return self.unread(num_tokens)
        extra, child_ids = extra_hash(child_seq), token_ids_of(child_seq)
        if extra != tokens.extra:
            raise ValueError(
                f"extra_hash() of child_seq {child_seq.seq_id!r} is {shown(extra)}: expected the "
                f"parent's extra_hash(), {shown(tokens.extra)}"
            )
        if len(child_ids) != length:
            fail_ids(child_seq, len(child_ids))
        first, ids = max(num_tokens - self.key.block_size, 0), tokens.ids.copy()
        if [*child_ids[first:num_tokens]] != ids[first:].tolist():
            raise ValueError(
                f"child_seq {child_seq.seq_id!r} differs from its parent in tokens {first} to "
                f"{num_tokens - 1}: expected it to start with the parent's {num_tokens} tokens"
            )
        return self._make(core.TokenIds(ids), True, extra)

    def keep(self, seq: SequenceLike, tokens: Tokens) -> None:
        """Keep the tokens until `forget`."""
        self._kept[core.seq_id_of(seq)] = (seq, tokens)

    def forget(self, seq_id: object) -> None:
        """Discard kept tokens, if any."""
        if self._kept:
            self._kept.pop(seq_id, None)

    def _make(self, ids: core.TokenIds, are_read: bool, extra: str | None) -> Tokens:
        key = self.key
        plain = (ids, key.block_size, key.parent, are_read, are_read)
        if extra is None:
            chain = core.TokenChain(*plain, algorithm=key.algorithm)
            return Tokens(ids, are_read, extra, chain)
        labels = RequestLabels(key, None, (), extra, None, None)
        chain = core.TokenChain(*plain, None, (), extra, algorithm=key.algorithm, labels=labels)
        return Tokens(ids, are_read, extra, chain)


def token_ids_of(seq: SequenceLike) -> Sequence[int]:
    """Return a sequence's token ids. Raises TypeError if they are no sequence."""
    ids = seq.get_token_ids()
    try:
        len(ids)
        return ids
    except TypeError:
        raise TypeError(
            f"get_token_ids() of seq {seq.seq_id!r} is {shown(ids)}: expected a sequence of token ids"
        ) from None


def fail_ids(seq: SequenceLike, num_ids: int) -> NoReturn:
    """Raise ValueError for a sequence whose number of token ids differs from its length."""
    raise ValueError(
        f"get_token_ids() of seq {seq.seq_id!r} has {num_ids} tokens: expected {seq.get_len()}, "
        "as returned by get_len()"
    )


def _tokens_from(seq: SequenceLike, first: int, num_tokens: int) -> np.ndarray | list | tuple:
    ids = token_ids_of(seq)
    ids = token_sequence(ids[first:] if first else ids)
    if len(ids) != num_tokens - first:
        fail_ids(seq, first + len(ids))
    return ids
