"""The data plane: tables, storage and the moving of bytes. Needs torch."""

from kvcache.worker.apply import StepTransfer, Worker
from kvcache.worker.attention_metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    GroupMetadata,
)
from kvcache.worker.block_table import BlockTable
from kvcache.worker.buffer import HostDeviceBuffer
from kvcache.worker.multi_group import MultiGroupBlockTable
from kvcache.worker.pages import Pages
from kvcache.worker.storage import KVStorage
from kvcache.worker.swap import SwapEngine
from kvcache.worker.swap_job import SwapError, SwapJob

__all__ = [
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "BlockTable",
    "GroupMetadata",
    "HostDeviceBuffer",
    "KVStorage",
    "MultiGroupBlockTable",
    "Pages",
    "StepTransfer",
    "SwapEngine",
    "SwapError",
    "SwapJob",
    "Worker",
]
