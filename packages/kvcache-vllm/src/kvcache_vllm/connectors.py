# SPDX-License-Identifier: Apache-2.0
"""Checks that a KV connector uses only those parts of vLLM's KV cache manager that kvcache's has.

vLLM passes the manager and its block pool to connectors. The source code of a connector shows which
attributes it reads of them. Attributes that the check misses raise an error when they are read.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvcache_vllm import private

# The methods with which vLLM passes the manager and its parts to connectors, and these parts.
_BINDS = {"bind_kv_cache_manager": "", "bind_gpu_block_pool": "block_pool"}
_STATES = "boundary_state_offloads"
_PARTS = ("", "block_pool", "coordinator")
# Attributes that a connector of vLLM reads only if this option is true.
_ONLY_WITH = {
    "SimpleCPUOffloadConnector": ("block_pool.free_block_queue", "lazy_offload"),
    "OffloadingConnector": (
        "coordinator.find_longest_cache_hit_per_group",
        "_bounding_group_ids",
    ),
}
_UNREAD = "in a form that this check does not follow"


def what_it_lacks(connector: Any, manager: Any) -> str:
    """Return why a connector cannot be used with kvcache's manager, or "" if it can."""
    options = private.transfer_config(connector).kv_connector_extra_config or {}
    bounds = {"_bounding_group_ids": private.bounding_groups(connector)}
    return what_connector_lacks(type(connector), {**options, **bounds}, manager)


def each_connector(connector: Any) -> list[Any]:
    """Return a list of the connector or, for a MultiConnector, of the connectors that it combines."""
    if connector is None:
        return []
    if "MultiConnector" not in _of_vllm(type(connector)):
        return [connector]
    inner = private.combined_connectors(connector)
    is_own = type(connector).__module__.startswith("vllm.")
    return [
        *([] if is_own else [connector]),
        *(one for each in inner for one in each_connector(each)),
    ]


def _of_vllm(connector: type) -> set[str]:
    """Return the names of vLLM's classes from which a class is derived."""
    return {each.__name__ for each in connector.__mro__ if each.__module__.startswith("vllm.")}


def what_connector_lacks(connector: type, options: Mapping[str, Any], manager: Any) -> str:
    """Return why a connector class cannot be used with kvcache's manager, or "" if it can.

    Args:
        connector: The class.
        options: The connector's kv_connector_extra_config, and attributes that act as options.
        manager: kvcache's manager.
    """
    try:
        modules = [*_modules_of(connector)]
        used = {each for module in modules for each in _Uses(module).found}
    except (OSError, TypeError, SyntaxError):
        return "has no source code, which would show what it reads of vLLM's KV cache manager"
    missing = {_missing(manager, name) for name in used} - {None}
    known = [_ONLY_WITH[name] for name in _of_vllm(connector) & _ONLY_WITH.keys()]
    missing -= {name for name, option in known if not options.get(option)}
    for name in _BINDS:
        method, inherited = getattr(connector, name), getattr(base.KVConnectorBase_V1, name)
        if method is not inherited and not (
            inspect.isfunction(method)
            and method.__name__ == name
            and method.__code__.co_argcount > 1
            and sys.modules[method.__module__] in modules
        ):
            missing.add(f"{name} {_UNREAD}")
    if missing:
        return f"uses {', '.join(sorted(missing))} of vLLM's own KV cache manager"
    if manager.copies_states and _stores_states(connector):
        return f"stores states at block boundaries ({_STATES}, with mamba_cache_mode 'align')"
    return ""


def _stores_states(connector: type) -> bool:
    """Return whether a connector stores the states that vLLM's manager hands over in each step.

    kvcache's manager hands over none.
    """
    modules = {*_modules_of(connector)}
    for module in list(modules):
        classes = [each for each in vars(module).values() if inspect.isclass(each)]
        modules |= {sys.modules[each.__module__] for each in classes}
    parts = "vllm.", f"{connector.__module__.partition('.')[0]}."
    return any(
        _STATES in inspect.getsource(module)
        for module in modules
        if module.__name__.startswith(parts) and not module.__name__.startswith("vllm.v1.core.")
    )


def _modules_of(connector: type) -> Iterator[ModuleType]:
    """Yield the modules of a connector and of the objects to which it passes the manager's parts."""
    found = {}
    for each in connector.__mro__:
        module = sys.modules[each.__module__]
        is_connector = issubclass(each, base.KVConnectorBase_V1)
        if module is base or not (is_connector or not _BINDS.keys().isdisjoint(vars(each))):
            continue
        found[module] = None
        for other in list(vars(module).values()):
            if inspect.isclass(other) and not _BINDS.keys().isdisjoint(vars(other)):
                found[sys.modules[other.__module__]] = None
    found.pop(base, None)
    yield from found


def _missing(manager: Any, name: str) -> str | None:
    """Return the part of a name, such as "block_pool.blocks[].ref_cnt", up to the first attribute that
    the manager does not have. None: it has all of them.
    """
    if name.endswith((_UNREAD, "()")):
        return name
    here, parts = manager, name.split(".")
    for i, part in enumerate(parts):
        if not hasattr(here, attribute := part.removesuffix("[]")):
            return ".".join(parts[: i + 1])
        here = getattr(here, attribute)
        if part != attribute:
            here = here[0]
    return None


class _Uses:
    """The attributes of the manager and its parts that a module reads, relative to the manager.

    A part that the module passes to a function, which may read anything, is listed as
    "PART in FUNCTION()", and any other use of a part, such as an entry of a list, as not followed.
    """

    def __init__(self, module: ModuleType) -> None:
        self.found: set[str] = set()
        # The base class of connectors keeps the manager in this attribute.
        self._attributes = {"_kv_cache_manager": ""}
        tree = ast.parse(inspect.getsource(module))
        functions = [
            each
            for scope in ast.walk(tree)
            if isinstance(scope, ast.Module | ast.ClassDef)
            for each in scope.body
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        for _ in range(2):  # an attribute may be used above the method that sets it
            for each in functions:
                self._read(each)

    def _read(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._names = {}
        if function.name in _BINDS and len(function.args.args) > 1:
            self._names[function.args.args[1].arg] = _BINDS[function.name]
        for _ in range(2):  # `ast.walk` does not visit the nodes in the order of execution
            for node in ast.walk(function):
                self._note_target(node)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and (part := self._part(node)):
                self.found.add(part)
            if isinstance(node, ast.Call):
                self._note_call(node)
        followed = {id(each) for node in ast.walk(function) for each in _followed(node)}
        for node in ast.walk(function):
            is_read = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
            if is_read and id(node) not in followed and (part := self._part(node)) in _PARTS:
                self.found.add(f"{part or 'the manager'} {_UNREAD}")

    def _note_target(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            targets, value, entry = node.targets, node.value, ""
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets, value, entry = [node.target], node.value, ""
        elif isinstance(node, ast.For | ast.comprehension):
            targets, value, entry = [node.target], node.iter, "[]"
        else:
            return
        part = self._part(value)
        for target in targets if part is not None else ():
            if isinstance(target, ast.Name):
                self._names[target.id] = part + entry
            elif isinstance(target, ast.Attribute):
                self._attributes[target.attr] = part + entry

    def _note_call(self, call: ast.Call) -> None:
        function = call.func.attr if isinstance(call.func, ast.Attribute) else None
        function = call.func.id if isinstance(call.func, ast.Name) else function
        for value in [*call.args, *(each.value for each in call.keywords)]:
            part = self._part(value)
            if part in _PARTS and function not in (*_BINDS, "isinstance"):
                self.found.add(f"{part or 'the manager'} in {function}()")

    def _part(self, node: ast.AST) -> str | None:
        """Return which part of the manager an expression is, or None if it is not known to be one."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Subscript):
            part = self._part(node.value)
            return None if part is None else f"{part}[]"
        if not isinstance(node, ast.Attribute):
            return None
        part = self._part(node.value)
        if part is None:
            return self._attributes.get(node.attr)
        return f"{part}.{node.attr}" if part else node.attr


def _followed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the operands of a node whose use `_Uses` understands."""
    if isinstance(node, ast.Attribute | ast.Subscript):
        yield node.value
    elif isinstance(node, ast.Assign):
        if all(isinstance(each, ast.Name | ast.Attribute) for each in node.targets):
            yield node.value
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.value
    elif isinstance(node, ast.For | ast.comprehension):
        yield node.iter
    elif isinstance(node, ast.Call):
        yield from node.args
        yield from (each.value for each in node.keywords)
    elif isinstance(node, ast.Compare):
        yield from (node.left, *node.comparators)
    elif isinstance(node, ast.If | ast.IfExp | ast.Assert | ast.While):
        yield node.test
