# SPDX-License-Identifier: Apache-2.0
"""The wire format of cache events for cache-aware routers. A message is msgpack in three ZMQ
frames.

topic | sequence number, 8 bytes big-endian | [time, [events], data-parallel rank]

An event is a map with a "type" key. Keys without a default are always present, with the value nil
if empty. Keys with a default are omitted if unset. In the older encoding, an event is an array of
the type followed by the values of all fields in order, without `session_id`. A hash is the low 64
bits of the digest, as a uint64. Other publishers may send complete digests.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec
import numpy as np
from msgspec.structs import astuple

from kvcache.checks import shown
from kvcache.events import BlockRemoved, BlockStored

WireHash = int | bytes
EventEncoding = Literal["map", "array"]  # encoding of the events; a batch is always an array
EVENT_ENCODINGS: tuple[EventEncoding, ...] = get_args(EventEncoding)

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
    """Events that were sent together. `ts`: time of sending in seconds since 1970."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    """The leading fields of `WireStored`. Arrays from other publishers may omit all other fields.

    SGLang sends a map of metadata instead of `lora_name` if a block has a salt.
    """

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | dict[str, Any] | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.lora_name, dict):
            self.lora_name = None


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: list[WireHash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


_ARRAYS: dict[type[WireEvent], type[msgspec.Struct]] = {
    WireStored: _StoredArray,
    WireRemoved: _RemovedArray,
    WireCleared: _ClearedArray,
}
_MAPS = {array: event for event, array in _ARRAYS.items()}


class WireError(ValueError):
    """Raised if a message does not conform to this format. The error message gives the reason."""


_encode = msgspec.msgpack.Encoder().encode
_decode_maps = msgspec.msgpack.Decoder(WireBatch).decode
_decode_arrays = msgspec.msgpack.Decoder(_ArrayBatch).decode


def checked_encoding(encoding: EventEncoding) -> EventEncoding:
    if not isinstance(encoding, str) or encoding not in EVENT_ENCODINGS:
        raise ValueError(
            f"event_encoding is {shown(encoding)}: expected one of {', '.join(EVENT_ENCODINGS)}"
        )
    return encoding


def encode_batch(batch: WireBatch, encoding: EventEncoding = "map") -> bytes:
    """Encode the third frame."""
    if encoding == "map":
        return _encode(batch)
    arrays = [_ARRAYS[type(each)] for each in batch.events]
    events = [
        array(*astuple(each)[: len(array.__struct_fields__)])
        for array, each in zip(arrays, batch.events, strict=True)
    ]
    return _encode((batch.ts, events, batch.data_parallel_rank))


def decode_batch(payload: bytes) -> WireBatch:
    """Decode the third frame, with events of either encoding.

    Raises WireError for malformed data and lists of unequal length.
    """
    try:
        batch = _decode_maps(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        try:
            arrays = _decode_arrays(payload)
        except (msgspec.MsgspecError, RecursionError):
            raise WireError(f"payload is not a batch of events: {error}") from None
        events = [_MAPS[type(each)](*astuple(each)) for each in arrays.events]
        batch = WireBatch(arrays.ts, events, arrays.data_parallel_rank)
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
            f"token_ids has {len(event.token_ids)} entries: expected none, or {event.block_size} for "
            f"each of {num_blocks} blocks"
        )
    if event.extra_keys is not None and len(event.extra_keys) != num_blocks:
        raise WireError(f"extra_keys has {len(event.extra_keys)} entries: expected {num_blocks}")


def encode_sequence(number: int) -> bytes:
    """Encode a sequence number, for the second frame of a message or for a replay request."""
    return number.to_bytes(_SEQUENCE_BYTES, "big")


def decode_sequence(frame: bytes) -> int:
    """Decode a sequence number. Raises WireError for a wrong size or a negative number."""
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
