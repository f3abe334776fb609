# SPDX-License-Identifier: Apache-2.0
"""Public names, for type checkers. `__init__.py` imports each name on first use."""

from kvcache_exchange.identity import KVIdentity as KVIdentity
