"""The attributes that `BlockSpaceManager` reads of sequences and their groups: no base class."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from enum import Enum
from typing import Protocol

from kvcache.checks import shown

WAITING, RUNNING, SWAPPED = "WAITING", "RUNNING", "SWAPPED"


class SequenceLike(Protocol):
    """One sequence: a prompt and what was generated behind it.

    Where its KV depends on more than its tokens (an adapter), it also has `extra_hash()`: a str or
    int, or None, the same for as long as it lives. It enters the hashes as `cache_salt` of a
    `Request` does, an int as its decimal text.
    """

    @property
    def seq_id(self) -> Hashable:
        """One per sequence that lives."""

    @property
    def status(self) -> Enum | str:
        """Its name: WAITING, RUNNING, SWAPPED, or one that begins with FINISHED."""

    def get_len(self) -> int:
        """Tokens known so far, 1 or more; never fewer than before."""

    def get_token_ids(self) -> Sequence[int]:
        """All of them, 0 to 2**31 - 1; asked for only with caching."""


class SequenceGroupLike(Protocol):
    """Sequences that come from one prompt."""

    @property
    def request_id(self) -> Hashable:
        """One per group that lives."""

    def get_seqs(self) -> Collection[SequenceLike]:
        """All of them, whatever their status."""

    def is_encoder_decoder(self) -> bool:
        """Whether `get_encoder_seq` answers."""

    def get_encoder_seq(self) -> SequenceLike:
        """The encoder's tokens, of which only the number is asked."""


def extra_hash(seq: SequenceLike) -> str | None:
    """Everything but tokens that its KV depends on, as text."""
    extra = getattr(seq, "extra_hash", None)
    extra = None if extra is None else extra()
    if extra is None or isinstance(extra, str):
        return extra
    if isinstance(extra, int) and not isinstance(extra, bool):
        return str(extra)
    raise TypeError(
        f"extra_hash() of seq {seq.seq_id!r} is {shown(extra)}: expected a str, int or None"
    )
