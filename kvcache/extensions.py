# SPDX-License-Identifier: Apache-2.0
"""Loads extensions that other packages declare as `kvcache.extensions` entry points."""

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
    imported. Extensions are imported when a name that is not built in is looked up, or when the names
    are listed. An extension that fails to import is skipped, and a warning is logged.

    Example:
        In the `pyproject.toml` of another package:

        ```toml
        [project.entry-points."kvcache.extensions"]
        my_kinds = "my_package.kinds"
        ```
    """
    global _is_loaded
    with _loading:  # reentrant, because an extension may look up names while it is imported
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
