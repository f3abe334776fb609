# SPDX-License-Identifier: Apache-2.0
"""A sanitizer for KV caches, which detects reads of wrong KV. It does not need torch.

An engine reports its writes, copies and reads of slots (`Sanitizer.observe_write`, ...). For each
slot, the sanitizer keeps a tag in host memory that identifies the slot's content, and checks that the
slots that a request's attention reads have the tags of the request's tokens. It never reads KV. See
`docs/sanitizer.md`.
"""

from kvcache.sanitizer.groups import SanitizedGroup
from kvcache.sanitizer.report import BlockEvent, Report, ReportKind, SanitizerError
from kvcache.sanitizer.sanitizer import Sanitizer

__all__ = ["BlockEvent", "Report", "ReportKind", "SanitizedGroup", "Sanitizer", "SanitizerError"]
