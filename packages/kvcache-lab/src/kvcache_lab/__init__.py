# SPDX-License-Identifier: Apache-2.0
"""Replays recorded and generated workloads through the manager, with optional verification.

Torch is required only for verification.
"""

from kvcache_lab.chat import ChatShape, chat_workload
from kvcache_lab.comparison import COMPARED, Comparison, compare, comparison_table, optimum
from kvcache_lab.curve import CURVE_POLICIES, HitRateCurve, curve_table, hit_rate_curve
from kvcache_lab.mismatch import Mismatch
from kvcache_lab.replayer import Replayer, Series
from kvcache_lab.report import ReplayReport
from kvcache_lab.service import Service
from kvcache_lab.traces import (
    TraceError,
    read_block_ids,
    read_mooncake,
    read_trace,
    register_trace_form,
    trace_forms,
)
from kvcache_lab.workload import WorkloadRequest

__all__ = [
    "COMPARED",
    "CURVE_POLICIES",
    "ChatShape",
    "Comparison",
    "HitRateCurve",
    "Mismatch",
    "ReplayReport",
    "Replayer",
    "Series",
    "Service",
    "TraceError",
    "WorkloadRequest",
    "chat_workload",
    "compare",
    "comparison_table",
    "curve_table",
    "hit_rate_curve",
    "optimum",
    "read_block_ids",
    "read_mooncake",
    "read_trace",
    "register_trace_form",
    "trace_forms",
]
