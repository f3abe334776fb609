# SPDX-License-Identifier: Apache-2.0
"""Public names, which `__init__.py` imports on first use."""

from kvcache_exchange.transport.factory import make_transport as make_transport
