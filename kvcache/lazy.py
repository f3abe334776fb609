# SPDX-License-Identifier: Apache-2.0
"""Imports the public names of a package on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping


def lazy_names(
    package: str, home: Mapping[str, str], modules: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports its public names lazily.

    Args:
        package: Name of the package.
        home: Mapping from each public name to the module that defines it.
        modules: Public modules of the package.

    Example:
        >>> import kvcache.transfer
        >>> "plan_transfer" in dir(kvcache.transfer)
        True
    """

    def get(name: str) -> object:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home, *modules})

    return get, names
