# SPDX-License-Identifier: Apache-2.0
"""Protocols of the sequences and groups that `BlockSpaceManager` accepts, and functions that read and
check them and other arguments. No base class is required.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from enum import Enum, auto
from typing import Any, NoReturn, Protocol

from kvcache.checks import integer, listed, shown

WAITING, RUNNING, SWAPPED = "WAITING", "RUNNING", "SWAPPED"
_OF_GROUPS = ("get_seqs", "request_id", "is_encoder_decoder", "get_encoder_seq")


class AllocStatus(Enum):
    """Result of `can_allocate` and `can_swap_in`."""

    OK = auto()
    LATER = auto()  # the sequences may fit once other blocks have been freed
    NEVER = auto()  # the sequences need more blocks than the device has


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

    def get_encoder_seq(self) -> SequenceLike | None:
        """Return the encoder's sequence. Only its length is read."""


def _read(of: object, name: str) -> Any:
    """Return an attribute. Raises TypeError if there is none, and the errors of its own code."""
    try:
        return getattr(of, name)
    except AttributeError:
        if hasattr(of, name):
            raise
        kind = "seq_group" if name in _OF_GROUPS else "seq"
        raise TypeError(f"{kind} is {shown(of)}: expected an object with {name}") from None


def id_of(of: SequenceLike | SequenceGroupLike, name: str = "seq_id") -> Hashable:
    """Return the ID of a sequence, or with name="request_id" of a group."""
    value = _read(of, name)
    if type(value) is int or type(value) is str:
        return value
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{name} is {shown(value)}: expected a hashable value") from None
    return value


def length_of(seq: SequenceLike) -> int:
    """Return the number of a sequence's known tokens."""
    try:
        length = seq.get_len()
    except AttributeError:
        _read(seq, "get_len")  # raises if there is none
        raise
    if type(length) is int and 0 < length < 2**31:
        return length
    return integer(length, f"get_len() of seq {shown(id_of(seq))}", 1)


def status_of(seq: SequenceLike) -> str:
    """Return the name of a sequence's status."""
    try:
        status = seq.status
    except AttributeError:
        _read(seq, "status")  # raises if there is none
        raise
    if type(status) is str:
        return status
    # `name` of an enum member is a property in Python, which takes longer.
    name = getattr(status, "_name_", None) or getattr(status, "name", status)
    if not isinstance(name, str):
        raise TypeError(
            f"status of seq {shown(id_of(seq))} is {shown(status)}: expected an enum member or text"
        )
    return name


def seqs_of(seq_group: SequenceGroupLike) -> Sequence[SequenceLike]:
    """Return all sequences of a group."""
    try:
        seqs = seq_group.get_seqs()
    except AttributeError:
        _read(seq_group, "get_seqs")  # raises if there is none
        raise
    if type(seqs) is list or type(seqs) is tuple:
        return seqs
    return listed(seqs, "get_seqs() of seq_group", "a list")


def seqs_with(seq_group: SequenceGroupLike, status: str) -> list[SequenceLike]:
    """Return the sequences with this status. Raises ValueError if there are none."""
    found = [seq for seq in seqs_of(seq_group) if status_of(seq) == status]
    if not found:
        request_id = _read(seq_group, "request_id")
        raise ValueError(
            f"seq_group {shown(request_id)} has no {status} sequence: expected 1 or more"
        )
    return found


def has_encoder(seq_group: SequenceGroupLike) -> bool:
    """Return whether a group has an encoder."""
    value = _read(seq_group, "is_encoder_decoder")()
    try:
        return bool(value)
    except (TypeError, ValueError):
        raise TypeError(f"is_encoder_decoder() is {shown(value)}: expected True or False") from None


def encoder_length(seq_group: SequenceGroupLike, max_model_len: int) -> int:
    """Return the number of tokens of a group's encoder."""
    length = _read(_read(seq_group, "get_encoder_seq")(), "get_len")()
    count = integer(length, "get_encoder_seq().get_len()")
    if not 0 < count <= max_model_len:
        raise ValueError(
            f"the encoder of seq_group {shown(_read(seq_group, 'request_id'))} has {count} tokens: "
            f"expected 1 to max_model_len, which is {max_model_len}"
        )
    return count


def token_ids_of(seq: SequenceLike) -> Sequence[int]:
    """Return a sequence's token ids. Raises TypeError if they are no sequence."""
    ids: Sequence[int] = _read(seq, "get_token_ids")()
    try:
        len(ids)
        return ids
    except TypeError:
        raise TypeError(
            f"get_token_ids() of seq {shown(id_of(seq))} is {shown(ids)}: expected a sequence of "
            "token ids"
        ) from None


def fail_ids(seq: SequenceLike, num_ids: int, num_tokens: int) -> NoReturn:
    """Raise ValueError for a sequence whose number of token ids differs from its length."""
    raise ValueError(
        f"get_token_ids() of seq {shown(id_of(seq))} has {num_ids} tokens: expected {num_tokens}, "
        "as returned by get_len()"
    )


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


def num_skipped_blocks(num_tokens: int, block_size: int, window: int | None) -> int:
    """Return the number of leading prompt blocks to which no later token attends."""
    return 0 if window is None else max(num_tokens - window + 1, 0) // block_size


def checked_window(sliding_window: int | None) -> int | None:
    """Validate and return the window: at least 2 tokens, or None for no window."""
    if sliding_window is None:
        return None
    window = integer(sliding_window, "sliding_window")
    if window < 2:
        raise ValueError(
            f"sliding_window is {window}: expected 2 or more, because a token that reads only "
            "itself needs no cache"
        )
    return window


def check_one_prompt(
    seq_group: SequenceGroupLike, seqs: list[SequenceLike], reads_ids: bool
) -> None:
    """Check that the sequences of a group are distinct and share the first sequence's prompt."""
    first = seqs[0]
    seen = {first.seq_id}
    for seq in seqs[1:]:
        if seq.seq_id in seen:
            raise ValueError(
                f"seq_group {seq_group.request_id!r} has seq {seq.seq_id!r} twice: expected each "
                "sequence once"
            )
        seen.add(seq.seq_id)
        same = length_of(seq) == length_of(first) and (
            not reads_ids
            or (
                ([*token_ids_of(seq)] == [*token_ids_of(first)])
                and extra_hash(seq) == extra_hash(first)
            )
        )
        if not same:
            raise ValueError(
                f"seq {seq.seq_id!r} of seq_group {seq_group.request_id!r} has different "
                f"tokens or extra_hash than seq {shown(first.seq_id)}: expected the same prompt"
            )


def device_name(device: Enum | str) -> str:
    """Validate a device and return its name, "gpu" or "cpu"."""
    name = device if isinstance(device, str) else getattr(device, "name", None)
    if not isinstance(name, str):
        raise TypeError(
            f"device is {shown(device)}: expected 'gpu', 'cpu' or an enum member with that name"
        )
    if name.lower() not in ("gpu", "cpu"):
        raise ValueError(f"device is {shown(device)}: expected 'gpu' or 'cpu'")
    return name.lower()


def fail_to_fit(what: str, num_free: int, question: str) -> NoReturn:
    """Raise ValueError for a request that needs more blocks than are free."""
    raise ValueError(f"{what}, {num_free} blocks are free: expected a call to {question} first")
