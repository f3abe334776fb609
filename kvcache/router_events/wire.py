"""The wire format of cache events for cache-aware routers. A message is msgpack in three ZMQ
frames.

topic | sequence number, 8 bytes big-endian | [time, [events], data-parallel rank]

An event is a map with a "type" key. Keys without a default are always present, and nil if empty.
Keys with a default are omitted if unset. A hash is a uint64 with the low 64 bits of the digest.
Other publishers may send complete digests.
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
_MOST_SEQUENCE = 2**63 - 1  # maximum sequence number; larger numbers decode as negative


class WireStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Blocks of one chain, each the parent of the next, have been cached."""

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None  # None: start of a prompt
    token_ids: list[int]  # token IDs of all blocks; empty if unknown
    block_size: int  # tokens per block
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None  # one entry per block
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None


class WireRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """Blocks are no longer cached on a medium."""

    block_hashes: list[WireHash]
    medium: str | None
    group_idx: int | None = None


class WireCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True, gc=False):
    """All blocks have been removed from all mediums."""


WireEvent = WireStored | WireRemoved | WireCleared


class WireBatch(msgspec.Struct, array_like=True, gc=False):
    """Events that were sent together. `ts`: seconds since 1970."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


class WireError(ValueError):
    """Raised if a message does not conform to this format. The error message gives the reason."""


encode_batch = msgspec.msgpack.Encoder().encode
_decode_batch = msgspec.msgpack.Decoder(WireBatch).decode


def decode_batch(payload: bytes) -> WireBatch:
    """Decode the third frame. Raises WireError for malformed data and lists of unequal length."""
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
    """Encode the second frame."""
    return number.to_bytes(_SEQUENCE_BYTES, "big")


def decode_sequence(frame: bytes) -> int:
    """Decode the second frame or a request. Raises WireError for a wrong size or a negative number."""
    if len(frame) != _SEQUENCE_BYTES:
        raise WireError(f"sequence number has {len(frame)} bytes: expected {_SEQUENCE_BYTES}")
    number = int.from_bytes(frame, "big")
    if number > _MOST_SEQUENCE:
        raise WireError(f"sequence number is {number - 2**64}: expected 0 or more")
    return number


def wire_hash(digest: bytes) -> int:
    """Return the low 64 bits of a digest."""
    return int.from_bytes(digest[-8:], "big")


def wire_hashes(event: BlockStored | BlockRemoved) -> list[WireHash]:
    """Return the hashes of an event's blocks."""
    hashes = event.block_hashes
    if hashes.shape[1] < 8:
        return [wire_hash(each.tobytes()) for each in hashes]
    return np.ascontiguousarray(hashes[:, -8:]).view(">u8").ravel().tolist()
