# SPDX-License-Identifier: Apache-2.0
"""Readers for common trace formats, with one file per format. Readers are registered by name."""

# The import order is the order in which the formats are tried on a line.
import kvcache.replay.traces.bailian
from kvcache.replay.traces.fields import TraceError
from kvcache.replay.traces.mooncake import read_mooncake
from kvcache.replay.traces.registry import (
    read_block_ids,
    read_trace,
    register_trace_form,
    trace_forms,
)

import kvcache.replay.traces.tokens  # isort: skip
import kvcache.replay.traces.text  # isort: skip
import kvcache.replay.traces.engine_logs  # noqa: F401  # isort: skip

__all__ = [
    "TraceError",
    "read_block_ids",
    "read_mooncake",
    "read_trace",
    "register_trace_form",
    "trace_forms",
]
