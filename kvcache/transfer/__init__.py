"""Between engines: what is received from another one, brought into the local layout. Needs torch."""

from kvcache.transfer.receive import (
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive,
    permute_received_blocks,
)

__all__ = [
    "kv_postprocess_blksize_and_layout_on_receive",
    "kv_postprocess_blksize_on_receive",
    "kv_postprocess_layout_on_receive",
    "permute_received_blocks",
]
