"""The torch ops of kvcache: `torch.ops.kvcache.*` under names with documentation.

Importing this module registers them. CPU and CUDA; every argument is checked before anything is
written, and a wrong one is a RuntimeError that names it. Values that live on a GPU are checked only
with `KVCACHE_CHECKED=1` in the environment (which synchronises); without, tokens with a value out of
range are skipped, and nothing is read or written outside the tensors.

Capturable in a CUDA graph: no allocation, no synchronisation (outside the checked mode). Each op has
a fake implementation, so `torch.compile` sees what it mutates.
"""

from __future__ import annotations

import torch

from kvcache import _native

_native.load_ops()
_ops = torch.ops.kvcache


def slot_mapping(
    block_table: torch.Tensor,
    row_indices: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    out: torch.Tensor,
) -> None:
    """Slot of each token: `table[row, pos // block_size] * block_size + pos % block_size`.

    block_table: int32[num_rows, num_columns] of block ids. row_indices: int32[n], the token's row, or
    -1 for a token of a dummy request, whose slot is -1. positions: int64[n], in tokens. out:
    int64[m], m >= n; entries from n on become -1. All contiguous and on one device.
    """
    _ops.slot_mapping(block_table, row_indices, positions, block_size, out)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Writes each token's K and V at its slot; slot -1 is skipped.

    key: [n, num_kv_heads, head_size], value: [n, num_kv_heads, v_head_size], contiguous within a
    token. key_cache, value_cache: [num_blocks, block_size, num_kv_heads, (v_)head_size], any strides
    but 1 in the last dimension (NHD and HND). Same dtype as their cache, any element size: bytes are
    moved as they are. slot_mapping: int64[n]. Two tokens must not name one slot.
    """
    _ops.write_kv(key, value, key_cache, value_cache, slot_mapping)


def gather_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Reads tokens back: the K and V at each slot into key[n, ...] and value[n, ...]; -1 gives zeros.

    Shapes, dtypes and strides as for `write_kv`.
    """
    _ops.gather_kv(key_cache, value_cache, slot_mapping, key, value)


# The ops return nothing and only mutate: a fake one has nothing to make up.
for _name in ("slot_mapping", "write_kv", "gather_kv"):
    torch.library.register_fake(f"kvcache::{_name}", lambda *args: None)
