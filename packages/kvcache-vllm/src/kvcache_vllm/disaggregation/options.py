# SPDX-License-Identifier: Apache-2.0
"""The connector's options, read from `kv_connector_extra_config`."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.checks import one_of
from kvcache_exchange.disaggregation.options import ConnectorOptions


@dataclass(frozen=True)
class Options(ConnectorOptions):
    """Options of the connector.

    Args:
        on_failure: How to handle a request whose load fails: "recompute", or "fail" to return an
            error.

    Raises:
        TypeError, ValueError: An option is unknown or out of range.
    """

    on_failure: str = "recompute"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.on_failure, "on_failure", ("recompute", "fail"))
