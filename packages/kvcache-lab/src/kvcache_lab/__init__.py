# SPDX-License-Identifier: Apache-2.0
"""Replays recorded and generated workloads through the manager, with optional verification.

Torch is required only for verification.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
