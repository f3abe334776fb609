"""Scenes for every public call that the walk finds: one per class, one per module for its functions."""

from __future__ import annotations

import functools
import importlib
import inspect
import random
from collections.abc import Callable

from tests.wrong_calls import surface
from tests.wrong_calls.state import state_of
from tests.wrong_calls.values import draw
from tests.wrong_calls.world import Unmade, World


class Walked:
    """The calls of a class on a live instance, or the functions and constructors of a module.

    A call gets a world of its own where the one at hand has been changed: `calls` and `state` are those
    of the instance and of all that was made for it.
    """

    def __init__(self, targets: list[surface.Target]) -> None:
        self.targets, self.world = targets, World()

    def pick(self, rng: random.Random) -> tuple[str, Callable, dict[str, object], dict]:
        """A call: its name, the function, right arguments, and of optional ones a right value."""
        target = rng.choice(self.targets)
        function, arguments = self.call_of(target)
        optional = {}
        for each in target.parameters:
            if each.name not in arguments and each.name != "device":
                optional[each.name] = functools.partial(self._optional, target, each, rng)
        return target.full_name.removeprefix("kvcache."), function, arguments, optional

    def _optional(
        self, target: surface.Target, parameter: surface.Parameter, rng: random.Random
    ) -> object:
        try:
            return self.world.value(target, parameter)
        except Unmade:
            return draw(rng)

    def call_of(self, target: surface.Target) -> tuple[Callable, dict[str, object]]:
        """The function, and right arguments."""
        if target.owner is None:
            module = importlib.import_module(target.module)
            return getattr(module, target.attribute), self.world.arguments(target)
        instance = self.world.instance(target)
        if target.is_setter:
            arguments = {"value": getattr(instance, target.attribute)}
            return functools.partial(_set, instance, target.attribute), arguments
        return getattr(instance, target.attribute), self.world.arguments(target)

    def others(self) -> list[object]:
        return self.world.others

    def state(self) -> object:
        return state_of(self.world.made)

    def close(self) -> None:
        self.world.close()


def _set(instance: object, attribute: str, value: object) -> None:
    setattr(instance, attribute, value)


@functools.cache
def scenes() -> dict[str, Callable[[], Walked]]:
    """By name: a class, or a module for its functions and constructors."""
    groups: dict[str, list[surface.Target]] = {}
    for target in surface.targets():
        name = target.full_name.rpartition(".")[0] if target.owner is not None else target.module
        groups.setdefault(f"walk {name}", []).append(target)
    return {name: functools.partial(Walked, targets) for name, targets in groups.items()}


def right_call(target: surface.Target) -> None:
    """Makes one call with right arguments alone, and ends what it began."""
    scene = Walked([target])
    try:
        function, arguments = scene.call_of(target)
        finish(function(**arguments))
    finally:
        scene.close()


def finish(result: object) -> None:
    """Takes some of what an iterator yields, and closes what can be closed."""
    if inspect.iscoroutine(result):
        result.close()
    elif inspect.isgenerator(result):
        for _ in zip(range(20), result):
            pass
        result.close()
