# SPDX-License-Identifier: Apache-2.0
"""vLLM's `kv_postprocess_*` functions, implemented with `kvcache.transfer.permute_received_blocks`."""

from __future__ import annotations

import numpy as np
import torch

from kvcache.checks import shown
from kvcache.transfer.receive import (
    SHAPES,
    Caches,
    Indices,
    checked_layers,
    permute_received_blocks,
)


def kv_postprocess_blksize_on_receive(
    cache: Caches, indices: Indices, block_size_ratio: int, *, dims: str = "NHD"
) -> None:
    """Permute received HND blocks of another size into local HND blocks, in place.

    Args:
        cache: One cache, or one per layer, stored as HND; see `permute_received_blocks`.
        indices: The received local blocks.
        block_size_ratio: If positive, a local block contains the bytes of `r = block_size_ratio` remote
            blocks, `[r, num_kv_heads, block_size / r, head_size]`. If negative, `-block_size_ratio`
            local blocks, consecutive in `indices`, contain the bytes of one remote block.
        dims: The order of tokens and heads in the shape of `cache`, "NHD" or "HND".

    Raises:
        ValueError: See `permute_received_blocks`. Also raised for NHD storage, and if
            `block_size_ratio` does not divide the block size.

    Example:
        >>> cache = torch.arange(8.0).view(1, 2, 4, 1).transpose(1, 2)  # one HND block: 4 tokens, 2 heads
        >>> kv_postprocess_blksize_on_receive(cache, [0], 2)
        >>> cache[0, :, 0, 0].tolist()  # the tokens of head 0
        [0.0, 1.0, 4.0, 5.0]
    """
    layers = _stored_as("HND", cache, dims)
    permute_received_blocks(
        layers, indices, remote_block_size=_remote_block_size(layers[0], block_size_ratio)
    )


def kv_postprocess_layout_on_receive(cache: Caches, indices: Indices, *, dims: str = "NHD") -> None:
    """Permute received HND blocks of the local size into local NHD blocks, in place.

    Args:
        cache: One cache, or one per layer, stored as NHD; see `permute_received_blocks`.
        indices: The received local blocks.
        dims: The order of tokens and heads in the shape of `cache`, "NHD" or "HND".

    Raises:
        ValueError: See `permute_received_blocks`. Also raised for HND storage.
    """
    permute_received_blocks(_stored_as("NHD", cache, dims), indices)


def kv_postprocess_blksize_and_layout_on_receive(
    cache: Caches, indices: Indices, block_size_ratio: int, *, dims: str = "NHD"
) -> None:
    """Permute received HND blocks of another size into local NHD blocks, in place.

    Args:
        cache: One cache, or one per layer, stored as NHD; see `permute_received_blocks`.
        indices: The received local blocks.
        block_size_ratio: See `kv_postprocess_blksize_on_receive`.
        dims: The order of tokens and heads in the shape of `cache`, "NHD" or "HND".

    Raises:
        ValueError: See `permute_received_blocks`. Also raised for HND storage, and if
            `block_size_ratio` does not divide the block size.
    """
    layers = _stored_as("NHD", cache, dims)
    permute_received_blocks(
        layers, indices, remote_block_size=_remote_block_size(layers[0], block_size_ratio)
    )


def _stored_as(layout: str, cache: Caches, dims: str) -> list[torch.Tensor]:
    """Check the layout, and return the layers as `[num_blocks, block_size, num_kv_heads, head_size]`."""
    layers = checked_layers(cache, dims)
    _, block_size, heads, _ = layers[0].shape
    _, token, head, _ = layers[0].stride()
    found = "HND" if head > token else "NHD"
    if block_size > 1 and heads > 1 and found != layout:
        raise ValueError(
            f"cache is stored as {found} (strides {list(layers[0].stride())} of its shape as "
            f"{SHAPES['NHD']}, with dims={dims!r}): expected {layout}"
        )
    return layers


def _remote_block_size(layer: torch.Tensor, ratio: int) -> int:
    if isinstance(ratio, bool) or not isinstance(ratio, int | np.integer) or ratio == 0:
        raise ValueError(
            f"block_size_ratio is {shown(ratio)}: expected the number of remote blocks in a local block, "
            "or -k if a remote block fills k local blocks"
        )
    block_size = layer.shape[1]
    if ratio > 0 and block_size % ratio:
        raise ValueError(
            f"block_size_ratio {shown(ratio)} does not divide the block size {block_size}"
        )
    return block_size // int(ratio) if ratio > 0 else block_size * -int(ratio)
