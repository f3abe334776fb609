"""The wire format of cache events, as cache-aware routers read it: msgpack in three frames of ZMQ.

topic | sequence number, 8 bytes big-endian | [time, [events], data-parallel rank]

An event is a map with "type". Keys without a default are always there, nil where there is nothing to
say; the others are left out. A hash is a uint64, the low 64 bits of the digest; other publishers may
send whole digests.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from kvcache.events import BlockRemoved, BlockStored

WireHash = int | bytes

GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"  # mediums
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_SEQUENCE_BYTES = 8
_MOST_SEQUENCE = 2**63 - 1  # what is above reads as below 0


class WireStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Blocks of one chain, each the parent of the next, are found from now on."""

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None  # of the block before the first; None: it begins a prompt
    token_ids: list[int]  # of all blocks; empty: unknown
    block_size: int  # tokens
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None  # one entry per block
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None


class WireRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """These blocks are no longer found on this medium."""

    block_hashes: list[WireHash]
    medium: str | None
    group_idx: int | None = None


class WireCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True, gc=False):
    """No block is found any more, on any medium."""


WireEvent = WireStored | WireRemoved | WireCleared


class WireBatch(msgspec.Struct, array_like=True, gc=False):
    """Events that came together. `ts`: seconds since 1970."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


class WireError(ValueError):
    """A message that is not of this format; it says why."""


encode_batch = msgspec.msgpack.Encoder().encode
_decode_batch = msgspec.msgpack.Decoder(WireBatch).decode


def decode_batch(payload: bytes) -> WireBatch:
    """The batch of the third frame; WireError for anything else, or unequal lists."""
    try:
        batch = _decode_batch(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"payload is no batch of events: {error}") from None
    for event in batch.events:
        if isinstance(event, WireStored):
            _check_lengths(event)
    return batch


def _check_lengths(event: WireStored) -> None:
    num_blocks = len(event.block_hashes)
    if event.block_size < 1:
        raise WireError(f"block_size is {event.block_size}: expected 1 or more")
    if event.token_ids and len(event.token_ids) != num_blocks * event.block_size:
        raise WireError(
            f"token_ids has {len(event.token_ids)} entries: expected none, or {event.block_size} of "
            f"each of {num_blocks} blocks"
        )
    if event.extra_keys is not None and len(event.extra_keys) != num_blocks:
        raise WireError(f"extra_keys has {len(event.extra_keys)} entries: expected {num_blocks}")


def encode_sequence(number: int) -> bytes:
    """The second frame."""
    return number.to_bytes(_SEQUENCE_BYTES, "big")


def decode_sequence(frame: bytes) -> int:
    """The number of a second frame, or of a request; WireError for another size, or below 0."""
    if len(frame) != _SEQUENCE_BYTES:
        raise WireError(f"sequence number has {len(frame)} bytes: expected {_SEQUENCE_BYTES}")
    number = int.from_bytes(frame, "big")
    if number > _MOST_SEQUENCE:
        raise WireError(f"sequence number is {number - 2**64}: expected 0 or more")
    return number


def wire_hash(digest: bytes) -> int:
    """The low 64 bits of a digest."""
    return int.from_bytes(digest[-8:], "big")


def wire_hashes(event: BlockStored | BlockRemoved) -> list[WireHash]:
    """Those of an event's blocks."""
    hashes = event.block_hashes
    if hashes.shape[1] < 8:
        return [wire_hash(each.tobytes()) for each in hashes]
    return np.ascontiguousarray(hashes[:, -8:]).view(">u8").ravel().tolist()
