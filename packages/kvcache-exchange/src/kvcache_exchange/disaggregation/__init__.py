# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill: offers, leases, loads, and recovery from failed loads.

Names are imported on first use. Only the ranks need torch; the connector does not.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
