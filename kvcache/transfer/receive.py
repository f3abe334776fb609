"""Permutes received blocks of another engine into the local block size and layout, in place.

The function names are vLLM's. There the blocks are gathered, permuted as a copy and scattered back, which
moves every byte three to four times. `ops.permute_blocks_` moves each byte once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from kvcache import ops
from kvcache.checks import as_array, listed, num_entries, shown
from kvcache.worker.pages.regions import check_apart, regions_of

Indices = Sequence[int] | np.ndarray | torch.Tensor
Caches = torch.Tensor | Sequence[torch.Tensor]

# Errors of the op about an argument begin with its name. They become a ValueError here.
_ARGUMENT = re.compile(r"(cache|offsets|indices|remote_block_size)\b")


def kv_postprocess_blksize_on_receive(
    cache: Caches, indices: Indices, block_size_ratio: int, *, dims: str = "NHD"
) -> None:
    """Permutes remote HND blocks of another size into local HND blocks.

    cache, dims: as for `permute_received_blocks`, stored as HND. block_size_ratio r > 0: a local block
    holds r remote ones, `[r, num_kv_heads, block_size / r, head_size]`. r = -k: k local blocks,
    consecutive in indices, hold the bytes of one remote block. ValueError as there, for NHD storage, and
    where r does not divide the block size.

    >>> cache = torch.arange(8.0).view(1, 2, 4, 1).transpose(1, 2)  # one block, 4 tokens, 2 heads: HND
    >>> kv_postprocess_blksize_on_receive(cache, [0], 2)
    >>> cache[0, :, 0, 0].tolist()  # the tokens of head 0
    [0.0, 1.0, 4.0, 5.0]
    """
    layers = _layers(cache, dims)
    _require_storage(layers[0], "HND", dims)
    _permute(layers, indices, _remote_block_size(layers[0], block_size_ratio), "HND")


def kv_postprocess_layout_on_receive(cache: Caches, indices: Indices, *, dims: str = "NHD") -> None:
    """Permutes remote HND blocks of the local size into local NHD blocks.

    cache, dims: as for `permute_received_blocks`, stored as NHD. ValueError as there, and for HND
    storage.
    """
    layers = _layers(cache, dims)
    _require_storage(layers[0], "NHD", dims)
    _permute(layers, indices, layers[0].shape[1], "HND")


def kv_postprocess_blksize_and_layout_on_receive(
    cache: Caches, indices: Indices, block_size_ratio: int, *, dims: str = "NHD"
) -> None:
    """Permutes remote HND blocks of another size into local NHD blocks.

    As `kv_postprocess_blksize_on_receive`, for a cache stored as NHD.
    """
    layers = _layers(cache, dims)
    _require_storage(layers[0], "NHD", dims)
    _permute(layers, indices, _remote_block_size(layers[0], block_size_ratio), "HND")


def permute_received_blocks(
    caches: Caches,
    indices: Indices,
    *,
    remote_block_size: int | None = None,
    remote_layout: str = "HND",
    dims: str = "NHD",
) -> None:
    """Permutes the listed blocks into the local layout, in place; other blocks keep every byte.

    caches: `[num_blocks, block_size, num_kv_heads, head_size]`, any dtype, any strides, except that the
    last dimension is dense. The strides determine the local layout, NHD or HND. dims: the order in which
    the shape names tokens and heads, whatever the strides are; "HND" is
    `[num_blocks, num_kv_heads, block_size, head_size]`. It is never guessed: with one token or one head
    the strides do not tell. `[num_blocks, block_size, head_size]` is a cache of one head. A sequence of
    caches, one per layer (K and V count as two), is permuted in one call; all have the same shape,
    strides, dtype and device.
    indices: the blocks; integers in a list, an array or a tensor. remote_block_size: tokens of a remote
    block (None: block_size), a divisor or a multiple of block_size. Where it is k * block_size, k
    consecutive indices, `[n, k]` or flat, are the blocks that hold the bytes of one remote block.
    remote_layout: "HND" or "NHD".

    On a GPU this is enqueued on the current stream. Indices on the device are first copied to the host
    to be checked, which synchronizes; `ops.permute_blocks_` takes them without that.

    ValueError, with nothing changed, for blocks named twice or out of range, sizes of which neither
    divides the other, a number of indices that is not a multiple of k, layers that differ or share
    memory, and strides other than the above.
    """
    layers = _layers(caches, dims)
    if not isinstance(remote_layout, str) or remote_layout not in ("HND", "NHD"):
        raise ValueError(f"remote_layout is {shown(remote_layout)}: expected 'HND' or 'NHD'")
    size = layers[0].shape[1] if remote_block_size is None else remote_block_size
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        raise ValueError(f"remote_block_size is {shown(size)}: expected a number of tokens")
    _permute(layers, indices, int(size), remote_layout)


def _layers(caches: Caches, dims: str) -> list[torch.Tensor]:
    """The layers as [num_blocks, block_size, num_kv_heads, head_size] each; checks that all are alike."""
    if not isinstance(dims, str) or dims not in _SHAPES:
        raise ValueError(f"dims is {shown(dims)}: expected 'NHD' or 'HND'")
    layers = [caches] if isinstance(caches, torch.Tensor) else listed(caches, "caches")
    if not layers:
        raise ValueError("cache is an empty sequence: expected a layer or more")
    for i, layer in enumerate(layers):
        if not isinstance(layer, torch.Tensor):
            raise TypeError(f"layer {i} is a {type(layer).__name__}: expected a tensor")
    first = layers[0]
    if first.dim() not in (3, 4):
        raise ValueError(
            f"cache has shape {list(first.shape)}: expected {_SHAPES[dims]} or "
            "[num_blocks, block_size, head_size]"
        )
    expected = _kind(first)
    for i, layer in enumerate(layers):
        if (kind := _kind(layer)) != expected:
            what, came, like = next(
                x for x in zip(_KIND, kind, expected, strict=True) if x[1] != x[2]
            )
            raise ValueError(f"layer {i} has {what} {came}: expected {like} as layer 0 has")
    _check_apart(layers)
    if first.dim() == 3:
        return [layer.unsqueeze(2) for layer in layers]
    return layers if dims == "NHD" else [layer.transpose(1, 2) for layer in layers]


def _check_apart(layers: list[torch.Tensor]) -> None:
    """ValueError where layers of the same shape and strides share memory."""
    first = layers[0]
    if first.numel() == 0 or len(layers) == 1:
        return
    extent = 1 + sum((n - 1) * step for n, step in zip(first.shape, first.stride()))
    begins = sorted(layer.data_ptr() for layer in layers)
    if all(b - a >= extent * first.element_size() for a, b in pairwise(begins)):
        return
    # The layers' spans overlap: they are packed together, or share memory.
    found = [(r, i) for i, layer in enumerate(layers) for r in regions_of(layer, 0, f"layer {i}")]
    check_apart(np.array([r for r, _ in found]), [i for _, i in found], first.shape[0])


_SHAPES = {
    "NHD": "[num_blocks, block_size, num_kv_heads, head_size]",
    "HND": "[num_blocks, num_kv_heads, block_size, head_size]",
}
_KIND = ("shape", "strides", "dtype", "device")


def _kind(layer: torch.Tensor) -> tuple:
    return tuple(layer.shape), layer.stride(), layer.dtype, layer.device


def _require_storage(layer: torch.Tensor, layout: str, dims: str) -> None:
    """ValueError for the other layout. With one token or one head, NHD and HND are the same."""
    _, block_size, heads, _ = layer.shape
    _, token, head, _ = layer.stride()
    found = "HND" if head > token else "NHD"
    if block_size > 1 and heads > 1 and found != layout:
        raise ValueError(
            f"cache is stored as {found} (strides {list(layer.stride())} of its shape as "
            f"{_SHAPES['NHD']}, with dims={dims!r}): expected {layout}"
        )


def _remote_block_size(layer: torch.Tensor, ratio: int) -> int:
    if isinstance(ratio, bool) or not isinstance(ratio, int | np.integer) or ratio == 0:
        raise ValueError(
            f"block_size_ratio is {shown(ratio)}: expected how many remote blocks one block holds, "
            "or -k where a remote block fills k"
        )
    block_size = layer.shape[1]
    if ratio > 0 and block_size % ratio:
        raise ValueError(
            f"block_size_ratio {shown(ratio)} does not divide the block size {block_size}"
        )
    return block_size // int(ratio) if ratio > 0 else block_size * -int(ratio)


def _ids(indices: Indices, group_size: int) -> torch.Tensor:
    """int32[n, group_size] on the CPU."""
    if isinstance(indices, torch.Tensor):
        if indices.is_floating_point():
            raise ValueError(f"indices has dtype {indices.dtype}: expected integers")
        num_entries(indices, "indices")
        indices = indices.cpu()
    given = as_array(indices, "indices")
    if given.size and given.dtype.kind not in "iu":
        raise ValueError(f"indices has dtype {given.dtype}: expected integers")
    per_row = given.shape[1] if given.ndim == 2 else group_size
    if given.ndim not in (1, 2) or per_row != group_size or given.size % group_size:
        raise ValueError(
            f"indices has shape {list(given.shape)}: expected [n, {group_size}] or n * {group_size}, "
            "the blocks that the bytes of one remote block fill together"
        )
    ids = given.astype(np.int32)
    too_large = given[ids != given]
    if too_large.size:
        raise ValueError(f"indices holds {too_large[0]}: expected the cache's blocks")
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
            f"remote_block_size is {shown(remote_block_size)}: expected at most {most}, the cache's "
            "tokens"
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
