"""A step and a handshake in the classes that vLLM passes between its processes."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvcache.disaggregation.steps import RankHandshake, Step


class Metadata(Step, KVConnectorMetadata):
    """What the scheduler's side tells the workers'."""


class Handshake(RankHandshake, KVConnectorHandshakeMetadata):
    """Of a worker, once."""
