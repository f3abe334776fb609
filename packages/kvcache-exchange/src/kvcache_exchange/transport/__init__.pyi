# SPDX-License-Identifier: Apache-2.0
"""Public names, for type checkers. `__init__.py` imports each name on first use."""

from kvcache_exchange.transport.factory import make_transport as make_transport
