# SPDX-License-Identifier: Apache-2.0
"""Calls a model's `forward` without side effects and with only the arguments that `forward` names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import Cache, PreTrainedModel


def parameters_of(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of `forward`'s arguments, excluding those collected by `**kwargs`."""
    return frozenset(inspect.signature(type(model).forward).parameters)


def takes_positions(model: PreTrainedModel) -> bool:
    """Return whether a model's forward accepts `position_ids`, by name or through `**kwargs`."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    return any(each.name == "position_ids" or each.kind is each.VAR_KEYWORD for each in parameters)


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of `forward`'s argument for the cache, which is `cache` since transformers 5.24."""
    return "cache" if "cache" in parameters_of(model) else "past_key_values"


def call_arguments(
    model: PreTrainedModel, token_ids: torch.Tensor, start: int, *, cache: Cache | None
) -> dict[str, object]:
    """Return the arguments that `generate` would use to compute tokens [1, t] after `start` earlier
    tokens.

    Positions are passed only if `forward` names this argument. There is no mask, because there is no
    padding. If `cache` is None, the model computes all tokens without a cache.
    """
    arguments: dict[str, object] = {"input_ids": token_ids, "use_cache": cache is not None}
    if cache is not None:
        arguments[cache_argument(model)] = cache
    if "position_ids" in parameters_of(model):
        stop = start + token_ids.shape[1]
        arguments["position_ids"] = torch.arange(start, stop, device=token_ids.device)[None]
    return arguments


@contextmanager
def undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Run a model for a check. The state of the random generators is restored afterwards."""
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.inference_mode():
        yield
