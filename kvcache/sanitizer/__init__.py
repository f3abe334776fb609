# SPDX-License-Identifier: Apache-2.0
"""A sanitizer for KV caches, which finds reads of wrong KV. It does not need torch.

An engine reports its writes, copies and reads of slots (`Sanitizer.observe_write`, ...). The
sanitizer keeps a tag of the content of each slot in host memory and compares the slots that
attention reads with the tokens of the reading request. It never reads KV. See `docs/sanitizer.md`.
"""

from kvcache.sanitizer.groups import SanitizedGroup
from kvcache.sanitizer.record import RecordError
from kvcache.sanitizer.replay import replay_record
from kvcache.sanitizer.report import BlockEvent, Report, ReportKind, SanitizerError
from kvcache.sanitizer.sanitizer import Sanitizer

__all__ = [
    "BlockEvent",
    "RecordError",
    "Report",
    "ReportKind",
    "SanitizedGroup",
    "Sanitizer",
    "SanitizerError",
    "replay_record",
]
