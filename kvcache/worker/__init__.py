"""The data plane: tables, storage and the moving of bytes. Needs torch."""

from kvcache.worker.apply import Worker
from kvcache.worker.block_table import BlockTable
from kvcache.worker.buffer import HostDeviceBuffer
from kvcache.worker.multi_group import MultiGroupBlockTable
from kvcache.worker.storage import KVStorage

__all__ = ["BlockTable", "HostDeviceBuffer", "KVStorage", "MultiGroupBlockTable", "Worker"]
