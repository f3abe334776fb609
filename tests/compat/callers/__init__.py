# SPDX-License-Identifier: Apache-2.0
"""Small schedulers and workers, each written for another engine's interface.

They import the original. `load` changes the module of this one import, and nothing else.
"""

from pathlib import Path
from types import ModuleType


def load(name: str, there: str, here: str) -> ModuleType:
    """Return the module `name` of this package, which imports from `here` instead of `there`."""
    path = Path(__file__).with_name(f"{name}.py")
    text = path.read_text()
    assert text.count(f"from {there} import ") == 1
    module = ModuleType(f"{name} of {here}")
    code = text.replace(f"from {there} import ", f"from {here} import ")
    exec(compile(code, str(path), "exec"), vars(module))
    return module
