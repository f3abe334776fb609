"""What is tried: a call on an object, and what the object says of itself after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from enum import Enum

import numpy as np
import torch

BROKEN = "is broken: memory ran out within"


@dataclasses.dataclass
class Trial:
    """A fresh object and the call that is to fail."""

    call: Callable[[], object]
    # Calls that show all of its state; they change it. The answers, in any form.
    state: Callable[[], Iterator[object]]
    # Calls that a broken object refuses; the first of them changes nothing of a sound one.
    refusals: list[Callable[[], object]]
    free: Callable[[], object] = lambda: None  # what a broken object still does


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], Trial]
    spares_torch: bool = False  # allocations of torch itself do not fail


def plain(value: object) -> object:
    """The same in lists, tuples and numbers, to be compared."""
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
    """What the call answers, or raises."""
    try:
        return plain(call())
    except Exception as error:
        return plain(error)
