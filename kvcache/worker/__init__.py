# SPDX-License-Identifier: Apache-2.0
"""The data plane: block tables, storage and page copies. It needs torch."""

from typing import TYPE_CHECKING, NoReturn

from kvcache.lazy import fail_name
from kvcache.worker.pages.pages import Pages
from kvcache.worker.pages.storage import KVStorage
from kvcache.worker.swap.engine import SwapEngine
from kvcache.worker.swap.job import SwapError, SwapJob
from kvcache.worker.tables.attention_metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    GroupMetadata,
)
from kvcache.worker.tables.block_tables import BlockTables
from kvcache.worker.tables.buffer import HostDeviceBuffer
from kvcache.worker.tables.group_table import GroupTable
from kvcache.worker.tables.table_shape import TableShape, table_groups
from kvcache.worker.worker import PendingStep, Worker

__all__ = [
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "BlockTables",
    "GroupMetadata",
    "GroupTable",
    "HostDeviceBuffer",
    "KVStorage",
    "Pages",
    "PendingStep",
    "SwapEngine",
    "SwapError",
    "SwapJob",
    "TableShape",
    "Worker",
    "table_groups",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        fail_name(__name__, name)
