# SPDX-License-Identifier: Apache-2.0
"""A trial: a call on an object, and queries that reveal the object's state afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from enum import Enum

import numpy as np
import torch

BROKEN = "is broken: memory ran out within"


@dataclasses.dataclass
class Trial:
    """A fresh object and the call that must fail."""

    call: Callable[[], object]
    # Queries that together reveal the complete state. They may change the state, and may return
    # values of any type.
    state: Callable[[], Iterator[object]]
    # Calls that a broken object must reject. The first one must not change an intact object.
    refusals: list[Callable[[], object]]
    free: Callable[[], object] = lambda: None  # must also work for a broken object


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], Trial]
    spares_torch: bool = False  # whether torch's own allocations never fail


def plain(value: object) -> object:
    """Convert a value to lists, tuples and numbers, which can be compared."""
    if isinstance(value, BaseException):
        return type(value).__name__, str(value)
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.tolist()
    if isinstance(value, Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            (f.name, plain(getattr(value, f.name)))
            for f in dataclasses.fields(value)
            if not f.name.startswith("_")
        ]
    if isinstance(value, dict):
        return [(plain(k), plain(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def answer(call: Callable[[], object]) -> object:
    """Make the call. Return its result or the exception that it raised."""
    try:
        return plain(call())
    except Exception as error:
        return plain(error)
