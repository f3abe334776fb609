"""The data plane: tables, storage and the moving of bytes. Needs torch."""

from kvcache.worker.apply import Worker
from kvcache.worker.block_table import BlockTable, MultiGroupBlockTable
from kvcache.worker.buffer import HostDeviceBuffer
from kvcache.worker.storage import KVStorage

__all__ = ["BlockTable", "HostDeviceBuffer", "KVStorage", "MultiGroupBlockTable", "Worker"]
