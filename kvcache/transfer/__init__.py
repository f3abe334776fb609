"""Between engines: blocks copied to and from the host, received ones made local. Needs torch."""

from kvcache.transfer.blocks import copy_kv_blocks
from kvcache.transfer.receive import (
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive,
    permute_received_blocks,
)

__all__ = [
    "copy_kv_blocks",
    "kv_postprocess_blksize_and_layout_on_receive",
    "kv_postprocess_blksize_on_receive",
    "kv_postprocess_layout_on_receive",
    "permute_received_blocks",
]
