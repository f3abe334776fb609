# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers (Mamba, gated delta rule) that read and write each request's state in pages.

Recurrent layers treat their input as a single sequence. While a `PagedModel` runs, a layer is therefore
called once for each request that computes several tokens, and once for all requests that compute a
single token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from kvcache_serve.engine.batch import Batch
from kvcache_serve.engine.transformers.attention import CURRENT
from kvcache_serve.engine.transformers.layer_states import LayerStates
from kvcache_serve.engine.transformers.segments import segments_of

Forward = Callable[..., torch.Tensor]


def wrap(module: torch.nn.Module) -> None:
    """Make the module read and write states in pages while a `PagedModel` runs."""
    module.forward = functools.partial(_forward, module, module.forward)


def unwrap(module: torch.nn.Module) -> None:
    """Undo `wrap`."""
    module.forward = module.forward.args[1]
    if module.forward == type(module).forward.__get__(module):
        del module.forward


def _forward(
    module: torch.nn.Module,
    forward: Forward,
    hidden_states: torch.Tensor,
    **options: object,
) -> torch.Tensor:
    reader, name = CURRENT.get(), "cache" if "cache" in options else "cache_params"
    if reader is None or options.get(name) is not reader:
        return forward(hidden_states, **options)
    states = reader.states[module.layer_idx]
    return _by_request(
        lambda hidden, cache: forward(hidden, **{name: cache}),
        hidden_states,
        states,
        reader.batch,
        resumes=reader.resumes,
    )


def _by_request(
    forward: Forward,
    hidden_states: torch.Tensor,
    states: LayerStates,
    batch: Batch,
    *,
    resumes: bool,
) -> torch.Tensor:
    pages = batch.state_pages(states.group)
    out = torch.empty_like(hidden_states)

    def compute(tokens: torch.Tensor, before: np.ndarray | None, after: np.ndarray) -> None:
        """Compute b sequences of t tokens, given as indices [b, t] into the batch.

        States are read from the pages `before` and written to the pages `after`.
        """
        cache = states.load(before, len(tokens))
        out[0, tokens] = forward(hidden_states[0, tokens], cache)
        states.store(cache.layers[-1], after)

    is_single = (batch.query_lens == 1) & (batch.starts > 0)
    single = np.flatnonzero(is_single)
    if len(single):
        tokens = torch.from_numpy(batch.query_start_loc[single][:, None]).to(out.device)
        compute(tokens, pages[single, 0], pages[single, 0])
    for i in np.flatnonzero(~is_single):
        for part in segments_of(batch, i, has_states=True, resumes=resumes):
            line = torch.arange(part.first, part.stop, device=out.device)[None]
            before = None if part.before is None else pages[i, part.before : part.before + 1]
            compute(line, before, pages[i, part.after : part.after + 1])
    return out
