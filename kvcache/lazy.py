# SPDX-License-Identifier: Apache-2.0
"""Imports the public names of a package on first use."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_IMPORT = re.compile(r"^from (\S+) import \(?\s*(\w+) as \2,?\s*\)?$", re.MULTILINE)


def lazy_names(
    package: str, file: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package that imports its public names lazily.

    The names are those that the package's stub imports. Type checkers read the same file.

    Args:
        package: Name of the package.
        file: File of the package, next to the stub `__init__.pyi`.

    Example:
        >>> import kvcache.transfer
        >>> "plan_transfer" in dir(kvcache.transfer)
        True
    """
    home = _names_in_stub(Path(file))

    def get(name: str) -> object:
        if name not in home:
            fail_name(package, name)
        if home[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return get, names, [*home]


def fail_name(package: str, name: str) -> NoReturn:
    """Raise AttributeError from `__getattr__`. The message says where names of other engines are."""
    message = f"module {package!r} has no attribute {name!r}"
    in_compat = _names_in_stub(Path(__file__).with_name("compat") / "__init__.py")
    home = in_compat.get(name, "kvcache.compat")
    if name in ("BlockTable", "MultiGroupBlockTable"):
        home = "kvcache.compat.vllm_block_table or kvcache.compat.ascend_block_table"
    if home == "kvcache.compat" or name == "KVCacheManager":
        raise AttributeError(message)
    # `from package import name` replaces the message of an AttributeError.
    is_import = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    kind = ImportError if is_import else AttributeError
    raise kind(f"{message}: expected an import from {home}", name=name)


@functools.cache
def _names_in_stub(file: Path) -> dict[str, str]:
    """Return the module of each public name. The module of a submodule is the package itself."""
    found = _IMPORT.findall(file.with_suffix(".pyi").read_text(encoding="utf-8"))
    return {name: module for module, name in found}
