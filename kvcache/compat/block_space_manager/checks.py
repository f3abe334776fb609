# SPDX-License-Identifier: Apache-2.0
"""Argument checks of `BlockSpaceManager`, performed before anything changes."""

from __future__ import annotations

from enum import Enum
from typing import NoReturn

from kvcache.checks import integer, shown
from kvcache.compat.block_space_manager.protocol import (
    SequenceGroupLike,
    SequenceLike,
    extra_hash,
    length_of,
    token_ids_of,
)


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
