# SPDX-License-Identifier: Apache-2.0
"""Wraps steps and handshakes in classes that vLLM passes between its processes."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvcache_exchange.disaggregation.steps import RankHandshake, Step


class TransferMetadata(Step, KVConnectorMetadata):
    """A message from the scheduler side to the worker side."""


class Handshake(RankHandshake, KVConnectorHandshakeMetadata):
    """A message that each worker sends once to the scheduler side."""
