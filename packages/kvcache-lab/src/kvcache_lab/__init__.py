# SPDX-License-Identifier: Apache-2.0
"""Replays recorded and generated workloads through the manager, with optional verification.

Torch is required only for verification.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

# Imported on first use, so that `kvcache --help` is fast.
_HOME = {
    "COMPARED": "kvcache_lab.comparison",
    "ChatShape": "kvcache_lab.chat",
    "Comparison": "kvcache_lab.comparison",
    "Mismatch": "kvcache_lab.mismatch",
    "ReplayReport": "kvcache_lab.report",
    "Replayer": "kvcache_lab.replayer",
    "Series": "kvcache_lab.replayer",
    "Service": "kvcache_lab.service",
    "TraceError": "kvcache_lab.traces",
    "WorkloadRequest": "kvcache_lab.workload",
    "chat_workload": "kvcache_lab.chat",
    "compare": "kvcache_lab.comparison",
    "comparison_table": "kvcache_lab.comparison",
    "optimum": "kvcache_lab.comparison",
    "read_mooncake": "kvcache_lab.traces",
    "read_trace": "kvcache_lab.traces",
    "register_trace_form": "kvcache_lab.traces",
    "trace_forms": "kvcache_lab.traces",
}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME)
