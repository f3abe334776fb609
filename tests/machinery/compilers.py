# SPDX-License-Identifier: Apache-2.0
"""The C++ compiler that tests start. Imports neither torch nor the package."""

from __future__ import annotations

import shutil
from types import ModuleType


def cxx(rules: ModuleType) -> str:
    """Return the compiler's program, for example g++ for "ccache g++ -m64".

    Args:
        rules: `kvcache.native.build`.
    """
    return [word for word in rules.cxx_command() if shutil.which(word)][-1]
