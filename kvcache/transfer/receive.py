# SPDX-License-Identifier: Apache-2.0
"""Permutes blocks received from another engine into the local block size and layout, in place.

`ops.permute_blocks_` moves each byte once. For comparison, vLLM gathers the blocks, permutes a copy
and scatters it back, which moves every byte three to four times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from kvcache import ops
from kvcache.checks import as_array, instance, listed, num_entries, one_of, shown
from kvcache.worker.pages.regions import check_apart, check_memory, regions_of

Indices = Sequence[int] | np.ndarray | torch.Tensor
Caches = torch.Tensor | Sequence[torch.Tensor]

# If an error message of the op begins with one of these argument names, the error is converted to
# ValueError.
_ARGUMENT = re.compile(r"(cache|offsets|indices|remote_block_size)\b")


def permute_received_blocks(
    caches: Caches,
    indices: Indices,
    *,
    remote_block_size: int | None = None,
    remote_layout: str = "HND",
    dims: str = "NHD",
) -> None:
    """Permute the listed blocks into the local layout, in place. Other blocks remain unchanged.

    On a GPU, the operation is enqueued on the current stream. Indices on the device are copied to
    the host for validation, which synchronizes. To avoid the synchronization, call
    `ops.permute_blocks_`.

    Args:
        caches: One cache, or one per layer (K and V count as two) with equal shape, strides, dtype
            and device. All of them are permuted in one kernel call. The shape is [num_blocks,
            block_size, num_kv_heads, head_size], or [num_blocks, block_size, head_size] for a
            single head. The last dimension is contiguous. The other strides determine whether the
            local layout is NHD or HND.
        indices: The blocks to permute, as a list, array or tensor of integers. If
            `remote_block_size` is k times the local block size, each k consecutive indices ([n, k]
            or flat) denote the blocks that hold one remote block's bytes.
        remote_block_size: Tokens per remote block, a divisor or multiple of `block_size`. None:
            `block_size`.
        remote_layout: "HND" or "NHD".
        dims: Order of tokens and heads in the shape, independent of the strides. "HND" means
            [num_blocks, num_kv_heads, block_size, head_size]. It is not inferred, because strides are
            ambiguous for a single token or head.

    Raises:
        ValueError: A block is repeated or out of range, neither block size divides the other, the number
            of indices is not a multiple of k, layers differ or share memory, or strides are unsupported.
            Nothing has changed.

    Example:
        >>> cache = torch.tensor([0.0, 0, 0, 0, 10, 11, 20, 21]).view(2, 2, 2, 1)  # block 1 is HND
        >>> permute_received_blocks(cache, [1], remote_layout="HND")
        >>> cache[1].flatten().tolist()
        [10.0, 20.0, 11.0, 21.0]
    """
    layers = checked_layers(caches, dims)
    one_of(remote_layout, "remote_layout", ("HND", "NHD"))
    size = layers[0].shape[1] if remote_block_size is None else remote_block_size
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        raise ValueError(f"remote_block_size is {shown(size)}: expected a number of tokens")
    _permute(layers, indices, int(size), remote_layout)


def checked_layers(caches: Caches, dims: str) -> list[torch.Tensor]:
    """Return matching layers, each as [num_blocks, block_size, num_kv_heads, head_size]."""
    one_of(dims, "dims", SHAPES)
    layers = [caches] if isinstance(caches, torch.Tensor) else listed(caches, "caches")
    if not layers:
        raise ValueError("cache is an empty sequence: expected at least one layer")
    for i, layer in enumerate(layers):
        instance(layer, torch.Tensor, f"layer {i}")
    first = layers[0]
    if first.dim() not in (3, 4):
        raise ValueError(
            f"cache has shape {list(first.shape)}: expected {SHAPES[dims]} or "
            "[num_blocks, block_size, head_size]"
        )
    expected = _kind(first)
    for i, layer in enumerate(layers):
        if (kind := _kind(layer)) != expected:
            what, came, like = next(
                x for x in zip(_KIND, kind, expected, strict=True) if x[1] != x[2]
            )
            raise ValueError(f"layer {i} has {what} {came}: expected {like}, as in layer 0")
    check_memory(first, "layer 0")  # all other layers have the same strides
    _check_apart(layers)
    if first.dim() == 3:
        return [layer.unsqueeze(2) for layer in layers]
    return layers if dims == "NHD" else [layer.transpose(1, 2) for layer in layers]


def _check_apart(layers: list[torch.Tensor]) -> None:
    """Raise ValueError if any of the layers, which have equal shapes and strides, share memory."""
    first = layers[0]
    if first.numel() == 0 or len(layers) == 1:
        return
    extent = 1 + sum((n - 1) * step for n, step in zip(first.shape, first.stride()))
    begins = sorted(layer.data_ptr() for layer in layers)
    if all(b - a >= extent * first.element_size() for a, b in pairwise(begins)):
        return
    # The spans of the layers overlap, so the layers are either packed together or share memory.
    found = [(r, i) for i, layer in enumerate(layers) for r in regions_of(layer, 0, f"layer {i}")]
    check_apart(np.array([r for r, _ in found]), [i for _, i in found], first.shape[0])


SHAPES = {
    "NHD": "[num_blocks, block_size, num_kv_heads, head_size]",
    "HND": "[num_blocks, num_kv_heads, block_size, head_size]",
}
_KIND = ("shape", "strides", "dtype", "device")


def _kind(layer: torch.Tensor) -> tuple:
    return tuple(layer.shape), layer.stride(), layer.dtype, layer.device


def _ids(indices: Indices, group_size: int) -> torch.Tensor:
    """Convert indices to int32[n, group_size] on the CPU."""
    if isinstance(indices, torch.Tensor):
        if indices.is_floating_point():
            raise ValueError(f"indices has dtype {indices.dtype}: expected integers")
        num_entries(indices, "indices")
        if indices.is_meta:
            raise ValueError("indices is a meta tensor: expected one with values")
        indices = indices.cpu()
    given = as_array(indices, "indices")
    if given.size and given.dtype.kind not in "iu":
        raise ValueError(f"indices has dtype {given.dtype}: expected integers")
    per_row = given.shape[1] if given.ndim == 2 else group_size
    if given.ndim not in (1, 2) or per_row != group_size or given.size % group_size:
        raise ValueError(
            f"indices has shape {list(given.shape)}: expected [n, {group_size}] or n * {group_size}, "
            f"because each remote block fills {group_size} blocks"
        )
    ids = given.astype(np.int32)
    too_large = given[ids != given]
    if too_large.size:
        raise ValueError(f"indices holds {too_large[0]}: expected blocks of the cache")
    return torch.from_numpy(np.ascontiguousarray(ids).reshape(-1, group_size))


def _permute(
    layers: list[torch.Tensor], indices: Indices, remote_block_size: int, remote_layout: str
) -> None:
    first = layers[0]
    start = first.data_ptr()
    offsets = torch.tensor([layer.data_ptr() - start for layer in layers], device="cpu")
    most = first.shape[0] * first.shape[1]
    if remote_block_size > max(most, 1):
        raise ValueError(
            f"remote_block_size is {shown(remote_block_size)}: expected at most {most}, the number "
            "of tokens in the cache"
        )
    ids = _ids(indices, max(1, remote_block_size // max(1, first.shape[1])))
    try:
        ops.permute_blocks_(
            first, offsets, ids, remote_block_size, remote_layout == "HND", layers[1:]
        )
    except RuntimeError as error:
        if _ARGUMENT.match(str(error)):
            raise ValueError(str(error)) from None
        raise
