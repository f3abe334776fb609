# SPDX-License-Identifier: Apache-2.0
"""One scene for each public call found by the walk."""

from __future__ import annotations

import functools
import importlib
import inspect
import random
from collections.abc import Callable

from tests.machinery.wrong_calls import surface
from tests.machinery.wrong_calls.state import state_of
from tests.machinery.wrong_calls.values import draw
from tests.machinery.wrong_calls.world import Unmade, World


class Walked:
    """A public call with valid arguments and the objects made for it."""

    def __init__(self, target: surface.Target) -> None:
        self.target, self.world = target, World()
        self.name = target.full_name.removeprefix("kvcache.")
        self.function, self.right = self._call()
        self._watched = self.world.others
        self._optional = {
            each.name: each for each in target.parameters if each.name not in self.right
        }

    def _call(self) -> tuple[Callable, dict[str, object]]:
        target = self.target
        if target.owner is None:
            module = importlib.import_module(target.module)
            return getattr(module, target.attribute), self.world.arguments(target)
        instance = self.world.instance(target)
        if target.is_setter:
            arguments = {target.attribute: getattr(instance, target.attribute)}
            return functools.partial(_set, instance), arguments
        return getattr(instance, target.attribute), self.world.arguments(target)

    def draw(self, rng: random.Random) -> tuple[str, Callable, dict[str, object], list[str]]:
        """Return the call, its valid arguments, and the optional parameters that may be made
        invalid.
        """
        return self.name, self.function, self.right, [*self._optional]

    def right_value(self, name: str, rng: random.Random) -> object:
        """Return a valid value for an optional argument, or a random value if none is known."""
        try:
            return self.world.value(self.target, self._optional[name])
        except Unmade:
            return draw(rng)

    def others(self) -> list[object]:
        return self.world.others

    def state(self) -> object:
        return state_of([self._watched, self.right])

    def close(self) -> None:
        self.world.close()


def _set(instance: object, **values: object) -> None:
    for attribute, value in values.items():
        setattr(instance, attribute, value)


@functools.cache
def walked() -> dict[str, Callable[[], Walked]]:
    """Return a scene for each public call, by full name."""
    return {each.full_name: functools.partial(Walked, each) for each in surface.targets()}


def right_call(name: str) -> None:
    """Make one call with only valid arguments, and clean up."""
    scene = walked()[name]()
    try:
        finish(scene.function(**scene.right))
    finally:
        scene.close()


def _is_of_package(value: object) -> bool:
    return type(value).__module__.partition(".")[0].startswith("kvcache")


def finish(result: object) -> None:
    """Consume some values of an iterator, and close what can be closed."""
    if inspect.iscoroutine(result) or (_is_of_package(result) and hasattr(result, "close")):
        result.close()
    elif inspect.isgenerator(result):
        for _ in zip(range(20), result):
            pass
        result.close()
