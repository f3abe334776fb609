# SPDX-License-Identifier: Apache-2.0
"""A scene for every public call: valid arguments and live objects, found by annotation or by name,
or made by hand.

A `World` makes each object once, so that the objects fit together: the request is admitted to the
manager, and the worker has applied the manager's plan. Objects not made by hand (`makers.py`) are
made by their constructor with valid arguments, which are found in the same way.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import inspect
import random
from collections.abc import Callable, Iterator
from operator import attrgetter

import torch

from kvcache import BlockPool, KVCacheManager
from kvcache.allocator import check_invariants
from kvcache.compat import BlockSpaceManager
from tests.machinery.hostile import surface
from tests.machinery.hostile.makers import MAKERS, ON
from tests.machinery.hostile.right import PLAIN, RIGHT, WITH
from tests.machinery.hostile.scenes import Call, Scene
from tests.machinery.hostile.state import state_of
from tests.machinery.hostile.values import draw


class Unmade(Exception):
    """Raised if no valid value is known for an argument, or if a class cannot be instantiated."""


class World:
    """Related objects on a device, each made on first use. `close` releases their resources."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._made: dict[str, object] = {}
        self._being_made: list[str] = []
        self.on_close: list[Callable[[], object]] = []

    def close(self) -> None:
        while self.on_close:
            self.on_close.pop()()
        self._made.clear()

    @property
    def made(self) -> dict[str, object]:
        """Return the objects made so far, by name."""
        return self._made

    @property
    def others(self) -> list[object]:
        """Return all objects made so far, to pass where an object of another type is expected."""
        return list(self._made.values())

    def get(self, name: str) -> object:
        """Return the instance of a class, or the object made by the maker of this name."""
        if name not in self._made:
            if name in self._being_made:
                raise Unmade(f"a {name} requires another {name}")
            self._being_made.append(name)
            try:
                known = name in MAKERS
                made = self._made_of(MAKERS[name]) if known else self._construct(name)
                self._made[name] = made
            finally:
                self._being_made.pop()
        return self._made[name]

    def _construct(self, name: str) -> object:
        found = _classes().get(name)
        if found is None:
            raise Unmade(f"no class {name} is public, and no maker creates one")
        target, of = found
        return of(**self.arguments(target))

    def instance(self, target: surface.Target) -> object:
        """Return the object to call a method on."""
        key = target.name if target.name in ON else target.owner.__name__
        return ON[key](self) if key in ON else self.get(key)

    def arguments(self, target: surface.Target) -> dict[str, object]:
        """Return valid values for the required parameters of a call, by name."""
        wanted = [each for each in target.parameters if each.is_required]
        further = next((WITH[key] for key in _keys(target) if key in WITH), ())
        wanted += [surface.Parameter(name, "", False) for name in further]
        return {each.name: self.value(target, each) for each in wanted}

    def value(self, target: surface.Target, parameter: surface.Parameter) -> object:
        """Return a valid value for a parameter. Raises Unmade if none is known."""
        for key in (*(f"{key}.{parameter.name}" for key in _keys(target)), parameter.name):
            if key in RIGHT:
                return self._made_of(RIGHT[key])
        if not parameter.annotation:
            raise Unmade(f"{target.full_name}: {parameter.name} has no annotation")
        with contextlib.suppress(SyntaxError):
            return self._of_type(ast.parse(parameter.annotation, mode="eval").body)
        raise Unmade(f"{target.full_name}: {parameter.name} is a {parameter.annotation!r}")

    def _made_of(self, value: object) -> object:
        """Return a new value: a constant, an object of this world, or what a function makes."""
        if isinstance(value, str) and value.startswith("@"):
            name, _, path = value[1:].partition(".")
            return attrgetter(path)(self.get(name)) if path else self.get(name)
        is_maker = inspect.isfunction(value) or isinstance(value, functools.partial)
        return self._placed(value(self) if is_maker else copy.deepcopy(value))

    def _placed(self, value: object) -> object:
        """Copy tensors to the device, with the same strides."""
        if self.device == "cpu" or not isinstance(value, torch.Tensor | list | dict):
            return value
        if isinstance(value, list):
            return [self._placed(each) for each in value]
        if isinstance(value, dict):
            return {key: self._placed(each) for key, each in value.items()}
        strides = value.stride()
        place = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=self.device)
        return place.copy_(value)

    def _of_type(self, node: ast.expr) -> object:
        if isinstance(node, ast.BinOp):
            sides = [node.left, node.right]
            node = next(each for each in sides if not _is_none(each))
            return self._of_type(node)
        if isinstance(node, ast.Subscript):
            name = ast.unparse(node.value).rpartition(".")[2]
            inner = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            if name == "Literal":
                return ast.literal_eval(inner)
            if name in ("dict", "Mapping"):
                return {}
            if name == "Callable":
                return lambda *args, **options: None
            make = {"tuple": tuple, "set": set, "frozenset": frozenset}.get(name, list)
            return make([self._of_type(inner)])
        name = ast.unparse(node).rpartition(".")[2]
        if name in PLAIN:
            return copy.deepcopy(PLAIN[name])
        return self.get(name)


def _keys(target: surface.Target) -> list[str]:
    """Return the names under which values for a call may be listed."""
    of = [each.__name__ for each in target.owner.__mro__] if target.owner else []
    return [target.name, *(f"{name}.{each}" for each in (target.attribute, "*") for name in of)]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _classes() -> dict[str, tuple[surface.Target, type]]:
    out = {}
    for full_name, value in surface.public_objects().items():
        if inspect.isclass(value):
            module, _, name = full_name.rpartition(".")
            parameters = surface.parameters_of(value)
            out[name] = (surface.Target(module, name, None, name, parameters), value)
    return out


class Walked(Scene):
    """A public call with valid arguments and the objects made for it."""

    spares_torch = True

    def __init__(self, target: surface.Target, device: str = "cpu") -> None:
        self.target, self.world = target, World(device)
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

    def calls(self) -> Iterator[Call]:
        yield self.name, lambda **given: finish(self.function(**given)), self.right

    def draw(self, rng: random.Random) -> tuple[str, Callable, dict[str, object], list[str]]:
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

    def queries(self) -> Iterator[Callable[[], object]]:
        yield self.state
        yield self.close

    def refusals(self) -> list[Callable[[], object]]:
        return [self._check]

    def _check(self) -> None:
        """Check the invariants of all managers and pools."""
        for each in self._watched:
            each = getattr(each, "manager", each)
            if isinstance(each, KVCacheManager):
                check_invariants(each)
            elif isinstance(each, BlockPool | BlockSpaceManager):
                each.check_invariants()

    def close(self) -> None:
        self.world.close()


def _set(instance: object, **values: object) -> None:
    for attribute, value in values.items():
        setattr(instance, attribute, value)


@functools.cache
def walked() -> dict[str, Callable[[], Walked]]:
    """Return a scene for each public call, by full name."""
    return {each.full_name: functools.partial(Walked, each) for each in surface.targets()}


def huge_calls(huge: int) -> Iterator[tuple[str, str, BaseException | None]]:
    """Replace each integer of each call, one at a time. Yield call, argument and error or None."""
    for call, make in walked().items():
        scene = make()
        known = {**scene.right}
        for name, parameter in scene._optional.items():
            with contextlib.suppress(Unmade):
                known[name] = scene.world.value(scene.target, parameter)
        for name, value in known.items():
            values = [*value] if type(value) in (list, tuple) else [value]
            if not values or any(type(each) is not int for each in values):
                continue
            wrong = huge if type(value) is int else [huge, *values[1:]]
            try:
                finish(scene.function(**{**scene.right, name: wrong}))
                yield call, name, None
            except Exception as error:
                yield call, name, error
        scene.close()


def right_call(name: str) -> None:
    """Make one call with only valid arguments, and clean up."""
    scene = walked()[name]()
    try:
        finish(scene.function(**scene.right))
    finally:
        scene.close()


def is_of_package(value: object) -> bool:
    return type(value).__module__.partition(".")[0].startswith("kvcache")


def finish(result: object) -> None:
    """Consume some values of an iterator, and close what can be closed."""
    if inspect.iscoroutine(result) or (is_of_package(result) and hasattr(result, "close")):
        result.close()
    elif inspect.isgenerator(result):
        for _ in zip(range(20), result):
            pass
        result.close()
