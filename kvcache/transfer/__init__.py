# SPDX-License-Identifier: Apache-2.0
"""KV transfers between engines: cache descriptions, transfer plans, transports and received blocks.

Names are imported on first use, so plans do not need torch. Only functions that move bytes import
torch.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
