# SPDX-License-Identifier: Apache-2.0
"""Extensions in other packages, found through the entry points of the group `kvcache.extensions`."""

from __future__ import annotations

import logging
import threading
from importlib.metadata import entry_points

GROUP = "kvcache.extensions"
_log = logging.getLogger(__name__)
_loading = threading.RLock()
_is_loaded = False


def load_extensions() -> None:
    """Import the extensions of all installed packages, once per process.

    An extension registers attention kinds, attention backends, trace formats or stores when it is
    imported. It is imported when a name is looked up that is not built in, or when the names are
    listed. An extension that fails to import is skipped with a logged warning.

    Example:
        In the `pyproject.toml` of another package:

        ```toml
        [project.entry-points."kvcache.extensions"]
        my_kinds = "my_package.kinds"
        ```
    """
    global _is_loaded
    with _loading:  # reentrant, because an import of an extension may look up names
        if _is_loaded:
            return
        _is_loaded = True
        for each in entry_points(group=GROUP):
            try:
                each.load()
            except Exception as error:
                package = each.dist.name if each.dist else "an unknown package"
                reason = f"{type(error).__name__}: {error}"
                _log.warning(
                    "extension %s = %s of %s is skipped: %s",
                    *(each.name, each.value, package, reason),
                )
