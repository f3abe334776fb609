# SPDX-License-Identifier: Apache-2.0
"""Valid arguments and live objects for every public call, found by annotation or by name, or made
by hand.

A `World` makes each object once, so that the objects fit together: the request is admitted to the
manager, and the worker has applied the manager's plan. Objects not made by hand (`makers.py`) are
made by their constructor with valid arguments, which are found in the same way.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Callable

from tests.machinery.wrong_calls import surface
from tests.machinery.wrong_calls.makers import MAKERS, ON
from tests.machinery.wrong_calls.right import PLAIN, RIGHT, WITH


class Unmade(Exception):
    """Raised if no valid value is known for an argument, or if a class cannot be instantiated."""


class World:
    """Related objects, each made on first use. `close` releases their resources."""

    def __init__(self) -> None:
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
                self._made[name] = MAKERS[name](self) if name in MAKERS else self._construct(name)
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
        wanted += [surface.Parameter(name, "", False) for name in WITH.get(target.name, ())]
        return {each.name: self.value(target, each) for each in wanted}

    def value(self, target: surface.Target, parameter: surface.Parameter) -> object:
        """Return a valid value for a parameter. Raises Unmade if none is known."""
        for key in (f"{target.name}.{parameter.name}", parameter.name):
            if key in RIGHT:
                return RIGHT[key](self)
        if not parameter.annotation:
            raise Unmade(f"{target.full_name}: {parameter.name} has no annotation")
        with contextlib.suppress(SyntaxError):
            return self._of_type(ast.parse(parameter.annotation, mode="eval").body)
        raise Unmade(f"{target.full_name}: {parameter.name} is a {parameter.annotation!r}")

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
            return PLAIN[name]()
        return self.get(name)


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
