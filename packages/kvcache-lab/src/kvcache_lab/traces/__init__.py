# SPDX-License-Identifier: Apache-2.0
"""Readers for common trace formats, with one file per format. Readers are registered by name."""

# The import order is the order in which the formats are tried on a line.
import kvcache_lab.traces.bailian
from kvcache_lab.traces.fields import TraceError
from kvcache_lab.traces.mooncake import read_mooncake
from kvcache_lab.traces.registry import read_trace, register_trace_form, trace_forms

import kvcache_lab.traces.tokens  # isort: skip
import kvcache_lab.traces.text  # isort: skip
import kvcache_lab.traces.engine_logs  # noqa: F401  # isort: skip

__all__ = [
    "TraceError",
    "read_mooncake",
    "read_trace",
    "register_trace_form",
    "trace_forms",
]
