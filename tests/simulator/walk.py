# SPDX-License-Identifier: Apache-2.0
"""Draws arguments by walking over signatures, so that a new call or option needs no line here.

A parameter is drawn by its name if `NAMES` lists it, otherwise by its annotation. An annotation that
is not listed raises LookupError, so a new kind of argument cannot be left out in silence.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
import typing
from collections.abc import Callable

import numpy as np

# Values that no argument accepts.
GARBAGE = (object(), 2**80, -(2**63), float("nan"), [object()], {"x": 1}, b"\xff", "\ud800")

TYPES: dict[str, Callable[[random.Random], object]] = {
    "bool": lambda r: r.random() < 0.5,
    "bool | None": lambda r: r.choice([None, True, False]),
    "int": lambda r: r.choice([0, 1, 2, 3, 5, 9, 17, 40]),
    "int | None": lambda r: r.choice([None, None, 0, 1, 4, 12]),
    "float": lambda r: r.choice([0.0, 0.0, 0.1, 1.0, 1e6]),
    "float | None": lambda r: r.choice([None, None, 0.0, 0.05, 1.0]),
    "str": lambda r: r.choice(["a", "b"]),
    "str | None": lambda r: r.choice([None, "a", "b"]),
    "str | int | None": lambda r: r.choice([None, "a", 1]),
    "Ids": lambda r: [r.randint(0, 3) for _ in range(r.randint(0, 3))],
    "Ids | None": lambda r: r.choice([None, [], [0]]),
    "Sequence[tuple[int, int, int, float | None]]": lambda r: [(0, 4, 35, None)],
}

_PARAMETERS: dict[Callable, list[inspect.Parameter]] = {}  # by function


def public_calls(owner: object) -> dict[str, Callable]:
    """Return the public methods of an object by name."""
    found = {}
    for name in dir(type(owner)):
        if not name.startswith("_") and callable(inspect.getattr_static(type(owner), name)):
            found[name] = getattr(owner, name)
    return found


def public_values(owner: object) -> list[str]:
    """Return the names of an object's public properties."""
    return [
        name
        for name in dir(type(owner))
        if not name.startswith("_")
        and isinstance(inspect.getattr_static(type(owner), name), property)
    ]


def drawn(
    rng: random.Random, owner: str, name: str, annotation: object, names: dict[str, Callable]
) -> object:
    """Draw a value for a parameter or field."""
    for key in (f"{owner}.{name}", name):
        if key in names:
            return names[key](rng)
    annotation = getattr(annotation, "__forward_arg__", annotation)
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    if text.startswith("Literal["):
        return rng.choice(typing.get_args(eval(text, {"Literal": typing.Literal})))
    if text not in TYPES:
        raise LookupError(f"no values for {owner}.{name}: {text}; add them to NAMES or TYPES")
    return TYPES[text](rng)


def arguments_of(
    rng: random.Random, call: Callable, names: dict[str, Callable]
) -> tuple[list, dict]:
    """Draw the arguments of a call. Optional ones are left out half of the time."""
    positional, keywords = [], {}
    key = getattr(call, "__func__", call)
    if key not in _PARAMETERS:
        _PARAMETERS[key] = [*inspect.signature(call).parameters.values()]
    for each in _PARAMETERS[key]:
        is_optional = each.default is not each.empty
        if is_optional and rng.random() < 0.5:
            continue
        if each.kind is each.VAR_KEYWORD:
            continue
        value = drawn(rng, call.__name__, each.name, each.annotation, names)
        if each.kind is each.VAR_POSITIONAL:
            positional.append(value)
        elif each.kind is each.KEYWORD_ONLY or is_optional:
            keywords[each.name] = value
        else:
            positional.append(value)
    return positional, keywords


def options_of(
    rng: random.Random, kind: type, names: dict[str, Callable], share: float, given: dict
) -> dict:
    """Draw a `share` of the fields of a dataclass of options, except those in `given`."""
    return {
        each.name: drawn(rng, kind.__name__, each.name, each.type, names)
        for each in dataclasses.fields(kind)
        if each.name not in given and rng.random() < share
    }


def shown(value: object) -> str:
    """Return a value as text for a script of calls."""
    if isinstance(value, np.ndarray):
        return repr(value.tolist())
    return repr(value)
