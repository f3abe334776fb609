"""Checks of the arguments of `BlockSpaceManager`, before anything changes."""

from __future__ import annotations

from enum import Enum
from typing import NoReturn

from kvcache.allocator.sequences.protocol import SequenceGroupLike, SequenceLike, extra_hash
from kvcache.checks import integer
from kvcache.native.load import core


def checked_window(sliding_window: int | None) -> int | None:
    """2 tokens or more; None for no window."""
    if sliding_window is None:
        return None
    window = integer(sliding_window, "sliding_window")
    if window < 2:
        raise ValueError(
            f"sliding_window is {window}: expected 2 or more, a token that reads itself alone needs "
            "no cache"
        )
    return window


def check_one_prompt(
    seq_group: SequenceGroupLike, seqs: list[SequenceLike], reads_ids: bool
) -> None:
    """That these sequences of a group are several, and all have the first one's prompt."""
    first = seqs[0]
    seen = {first.seq_id}
    for seq in seqs[1:]:
        if seq.seq_id in seen:
            raise ValueError(
                f"seq_group {seq_group.request_id!r} has seq {seq.seq_id!r} twice: expected it once"
            )
        seen.add(seq.seq_id)
        same = seq.get_len() == first.get_len() and (
            not reads_ids
            or (
                ([*seq.get_token_ids()] == [*first.get_token_ids()])
                and extra_hash(seq) == extra_hash(first)
            )
        )
        if not same:
            raise ValueError(
                f"seq {seq.seq_id!r} of seq_group {seq_group.request_id!r} has other tokens, or "
                f"another extra_hash, than seq {first.seq_id!r}: expected one prompt"
            )


def check_tier(native: core.Manager, row: int, what: str, name: object, on_host: bool) -> None:
    """That a row is on this tier; `what` and `name` say whose it is."""
    if native.is_on_host(row) != on_host:
        raise ValueError(
            f"{what} {name!r} is on the device: expected one that is swapped out"
            if on_host
            else f"{what} {name!r} is swapped out: expected one on the device"
        )


def checked_encoder_length(seq_group: SequenceGroupLike, max_model_len: int) -> int:
    """Tokens of the group's encoder, 1 to `max_model_len`."""
    count = integer(seq_group.get_encoder_seq().get_len(), "get_encoder_seq().get_len()")
    if not 0 < count <= max_model_len:
        raise ValueError(
            f"the encoder of seq_group {seq_group.request_id!r} has {count} tokens: expected 1 to "
            f"max_model_len, which is {max_model_len}"
        )
    return count


def device_name(device: Enum | str) -> str:
    """Either "gpu" or "cpu"."""
    name = device if isinstance(device, str) else getattr(device, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"device is {device!r}: expected 'gpu', 'cpu' or an enum member so named")
    if name.lower() not in ("gpu", "cpu"):
        raise ValueError(f"device is {device!r}: expected 'gpu' or 'cpu'")
    return name.lower()


def fail_shorter(seq: SequenceLike, num_tokens: int) -> NoReturn:
    """For a sequence that had `num_tokens` before."""
    raise ValueError(
        f"seq {seq.seq_id!r} has {seq.get_len()} tokens: expected {num_tokens} or more, which have "
        "slots"
    )


def fail_unknown(seq: SequenceLike) -> NoReturn:
    """For a sequence without blocks."""
    raise ValueError(f"seq {seq.seq_id!r} has no blocks: expected one that was allocated")


def fail_to_fit(what: str, num_free: int, question: str) -> NoReturn:
    """For what needs more than the free blocks."""
    raise ValueError(f"{what}, {num_free} blocks are free: expected {question} to be asked first")
