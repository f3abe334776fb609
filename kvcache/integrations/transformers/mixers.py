"""Recurrent layers (Mamba, gated delta rule): each request's state is read from a page and left there.

Such a layer takes its line of tokens for one sequence. While a `PagedModel` runs, it is called once for
each request of the batch, and once for all that compute a single token.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from kvcache.integrations.transformers.attention import CURRENT
from kvcache.integrations.transformers.layer_states import LayerStates
from kvcache.serving.batch import Batch

Forward = Callable[..., torch.Tensor]


def mixers_of(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """The modules that may keep a recurrent state, by layer.

    They take `cache_params`; since transformers 5.24 `cache`, as attention does, which takes
    `position_embeddings` besides.
    """
    found = {}
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            parameters = inspect.signature(type(module).forward).parameters
            is_new = "cache" in parameters and "position_embeddings" not in parameters
            if "cache_params" in parameters or is_new:
                found[module.layer_idx] = module
    return found


def wrap(module: torch.nn.Module) -> None:
    """Lets the module's calls go through pages while a `PagedModel` runs."""
    module.forward = functools.partial(_forward, module, module.forward)


def unwrap(module: torch.nn.Module) -> None:
    """Undoes `wrap`."""
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
        lambda hidden, cache: forward(hidden, **{name: cache}), hidden_states, states, reader.batch
    )


def _by_request(
    forward: Forward, hidden_states: torch.Tensor, states: LayerStates, batch: Batch
) -> torch.Tensor:
    pages = batch.state_pages(states.group)
    out = torch.empty_like(hidden_states)

    def compute(tokens: torch.Tensor, before: np.ndarray | None, after: np.ndarray) -> None:
        """Of tokens [b, t], places in the line; from the states in pages `before` to those in `after`."""
        cache = states.load(before, len(tokens))
        out[0, tokens] = forward(hidden_states[0, tokens], cache)
        states.store(cache, after)

    is_single = (batch.query_lens == 1) & (batch.starts > 0)
    single = np.flatnonzero(is_single)
    if len(single):
        tokens = torch.from_numpy(batch.query_start_loc[single][:, None]).to(out.device)
        compute(tokens, pages[single, 0], pages[single, 0])
    for i in np.flatnonzero(~is_single):
        first, stop = batch.query_start_loc[i : i + 2]
        line = torch.arange(first, stop, device=out.device)[None]
        known = int(batch.query_lens[i] - batch.num_drafts[i])
        begins = batch.starts[i] == 0
        compute(line[:, :known], None if begins else pages[i, :1], pages[i, :1])
        # The state after each draft is kept, in a page of its own.
        for j in range(batch.num_drafts[i]):
            compute(
                line[:, known + j : known + j + 1], pages[i, j : j + 1], pages[i, j + 1 : j + 2]
            )
    return out
