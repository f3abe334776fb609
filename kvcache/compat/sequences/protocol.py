# SPDX-License-Identifier: Apache-2.0
"""Protocols of the sequences and groups that `BlockSpaceManager` accepts. No base class is required."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from enum import Enum
from typing import Protocol

from kvcache.checks import shown

WAITING, RUNNING, SWAPPED = "WAITING", "RUNNING", "SWAPPED"


class SequenceLike(Protocol):
    """One sequence: a prompt and its generated tokens.

    Once `allocate` has been called, tokens are only appended. A shorter sequence is rejected, and so is
    a different token among the last tokens with slots (their last block). Earlier tokens are not read
    again. To replace tokens, free the sequence and allocate a new one.

    If the sequence's KV depends on more than its tokens (for example, on an adapter), the sequence must
    also have a method `extra_hash()`, which always returns the same str, int or None. The value is
    hashed like the `cache_salt` of a `Request`. An int is hashed as decimal text.
    """

    @property
    def seq_id(self) -> Hashable:
        """An ID that is unique among live sequences."""

    @property
    def status(self) -> Enum | str:
        """The name of the status: WAITING, RUNNING, SWAPPED, or a name that starts with FINISHED."""

    def get_len(self) -> int:
        """Return the number of known tokens, at least 1. Never decreases."""

    def get_token_ids(self) -> Sequence[int]:
        """Return all token ids, 0 to 2**31 - 1. Called only with caching."""


class SequenceGroupLike(Protocol):
    """Sequences that share one prompt."""

    @property
    def request_id(self) -> Hashable:
        """An ID that is unique among live groups."""

    def get_seqs(self) -> Collection[SequenceLike]:
        """Return all sequences, regardless of status."""

    def is_encoder_decoder(self) -> bool:
        """Return whether the group has an encoder (`get_encoder_seq`)."""

    def get_encoder_seq(self) -> SequenceLike:
        """Return the encoder's sequence. Only its length is read."""


def extra_hash(seq: SequenceLike) -> str | None:
    """Return the sequence's extra hash as text, or None if the sequence has no extra hash."""
    extra = getattr(seq, "extra_hash", None)
    extra = None if extra is None else extra()
    if extra is None or isinstance(extra, str):
        return extra
    if isinstance(extra, int) and not isinstance(extra, bool):
        return str(extra)
    raise TypeError(
        f"extra_hash() of seq {seq.seq_id!r} is {shown(extra)}: expected a str, int or None"
    )
