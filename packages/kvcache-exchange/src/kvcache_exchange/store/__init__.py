# SPDX-License-Identifier: Apache-2.0
"""A third cache tier, which keeps blocks in an external store: either a distributed store or a
local disk.

Names are imported on first use. `StoreTier` requires torch. `MooncakeStore` and `DiskStore` need
the packages that their extras install.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
