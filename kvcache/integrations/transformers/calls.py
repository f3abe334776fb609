"""How a model is called: with those of the arguments that its forward names, and without a trace."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import Cache, PreTrainedModel


def parameters_of(model: PreTrainedModel) -> frozenset[str]:
    """The names of the arguments of a model's forward; what `**kwargs` swallows is not among them."""
    return frozenset(inspect.signature(type(model).forward).parameters)


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether a model's forward takes `position_ids`, be it to hand them on with other arguments."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    return any(each.name == "position_ids" or each.kind is each.VAR_KEYWORD for each in parameters)


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which a model takes its cache: `cache` since transformers 5.24."""
    return "cache" if "cache" in parameters_of(model) else "past_key_values"


def call_arguments(
    model: PreTrainedModel, token_ids: torch.Tensor, start: int, *, cache: Cache | None
) -> dict[str, object]:
    """The arguments with which `generate` has a model compute tokens [1, t] behind `start` others.

    Positions only where the forward names them, and no mask, as nothing is padded. `cache` None: the
    model computes all of them anew.
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
    """Runs a model for a check: without dropout, and with generators and flags as they were after it."""
    training = [module for module in model.modules() if module.training]
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.inference_mode():
        try:
            model.eval()
            yield
        finally:
            for module in training:
                module.training = True
