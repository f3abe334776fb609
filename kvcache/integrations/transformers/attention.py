"""The attention function that transformers models call: reads the contexts of a batch's requests.

It is registered as "kvcache" with transformers' own interface. Attention itself is that of transformers:
scaled-dot-product attention of PyTorch, or the model's own eager form where a layer has what that has
not (sinks, capped scores); FlashInfer's, where it was asked for. Outside of `PagedModel.forward` it is
the same over the model's own tensors, so an attached model still runs and generates by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvcache.integrations.transformers.flashinfer_attention import FlashInferAttention
from kvcache.serving.batch import Batch

NAME = "kvcache"


class Reader(Protocol):
    """The cache of the forward pass under way."""

    batch: Batch
    resumes: bool

    def attend(self, layer: int | None) -> int:
        """The attention of a module of this number begins; the layer that it reads."""

    def group_of(self, layer: int) -> int:
        """The cache group of a layer's K and V."""

    def parts_of(self, group: int) -> list[Part]:
        """How the batch is cut for attention in this group."""

    def kernels_of(self, layer: int) -> FlashInferAttention | None:
        """What computes the attention of a layer without its context; None: the context is gathered."""


# The cache that a `PagedModel.forward` reads and writes; None outside.
CURRENT: ContextVar[Reader | None] = ContextVar("kvcache_current", default=None)


class Part(NamedTuple):
    """Requests whose attention is computed in one call: b of them with q queries and k keys each.

    `queries`: int64[b, q], places in the line of the batch's tokens. `keys`: int64[b, k], places in the
    line of the group's context. `mask`: bool[b, 1, q, k], what each query sees; None: all.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None


def parts_of(batch: Batch, group: int) -> list[Part]:
    """Requests with one token each together, padded to the longest; each of the others alone."""
    context = batch.context(group)
    starts = context.ends - context.lengths
    single = np.flatnonzero(batch.query_lens == 1)
    device = batch.positions.device

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    parts = []
    for chosen in _by_length(single, context.lengths):
        lengths = context.lengths[chosen]
        width = int(lengths.max())
        columns = np.arange(width)
        keys = starts[chosen, None] + np.minimum(columns, lengths[:, None] - 1)
        is_padded = (lengths != width).any()
        mask = (columns < lengths[:, None])[:, None, None] if is_padded else None
        parts.append(
            Part(
                to_device(batch.query_start_loc[chosen][:, None]),
                to_device(keys),
                None if mask is None else to_device(mask),
            )
        )
    first_needed = batch.kind(group).first_needed_token
    for i in np.flatnonzero(batch.query_lens > 1):
        positions = np.arange(batch.starts[i], batch.seq_lens[i])
        seen = context.firsts[i] + np.arange(context.lengths[i])
        firsts = np.array([first_needed(int(position)) for position in positions])
        mask = (seen <= positions[:, None]) & (seen >= firsts[:, None])
        parts.append(
            Part(
                to_device(np.arange(*batch.query_start_loc[i : i + 2])[None]),
                to_device(np.arange(starts[i], context.ends[i])[None]),
                to_device(mask[None, None]),
            )
        )
    return parts


def _by_length(requests: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Requests with contexts of similar length: none is padded to more than twice its own."""
    sizes = np.frexp(lengths[requests].astype(np.float64))[1]
    return [requests[sizes == size] for size in np.unique(sizes)]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention as transformers calls it: query [1, heads, t, size]; key, value of all contexts."""
    reader = CURRENT.get()
    attend = _attention_of(module, options)
    if reader is None:
        return attend(module, query, key, value, attention_mask, **options)
    if attention_mask is not None and attention_mask.numel() != 1:
        raise RuntimeError(f"{type(module).__name__} attends with a mask of its own")
    layer = reader.attend(module.layer_idx)
    kernels = reader.kernels_of(layer)
    if kernels is not None:
        scale, softcap = options.get("scaling"), options.get("softcap")
        return kernels.attend(layer, query, scale, softcap), None
    num_tokens = query.shape[2]
    out = query.new_empty(num_tokens, query.shape[1], value.shape[-1])
    for queries, keys, mask in reader.parts_of(reader.group_of(layer)):
        q, k, v = (
            each[0][:, places].transpose(0, 1)
            for each, places in ((query, queries), (key, keys), (value, keys))
        )
        # [b, q, heads, size]
        out[queries] = attend(module, q, k, v, mask, **(options | {"is_causal": False}))[0]
    return out[None], None


def _attention_of(module: torch.nn.Module, options: dict[str, object]) -> Callable:
    if options.get("position_bias") is not None:
        raise ValueError(
            f"{type(module).__name__} passes a position_bias: such attention is not supported"
        )
    if options.get("softcap") is None and options.get("s_aux") is None:
        return sdpa_attention_forward
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ValueError(
            f"{type(module).__name__} caps scores or has sinks, and its module has no "
            "eager_attention_forward: such attention is not supported"
        )

    def attend(module, q, k, v, mask, **options):
        added = q.new_zeros(()) if mask is None else torch.zeros_like(mask, dtype=q.dtype)
        if mask is not None:
            added.masked_fill_(~mask, torch.finfo(q.dtype).min)
        return eager(module, q, k, v, added, **options)

    return attend


def _dense_mask(*args: object, **options: object) -> torch.Tensor:
    """The mask of a model that runs by itself, always there: the eager form knows no other."""
    return sdpa_mask(*args, **(options | {"allow_is_causal_skip": False}))


def register() -> None:
    """Makes "kvcache" an attention implementation of transformers."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, _dense_mask)
