"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping


def lazy_names(
    package: str, home: Mapping[str, str], modules: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`. home: by public name, the module that has it. modules:
    those of the package that are public.

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
