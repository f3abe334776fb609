# SPDX-License-Identifier: Apache-2.0
"""Public names, which `__init__.py` imports on first use."""

from kvcache_lab.chat import ChatShape as ChatShape
from kvcache_lab.chat import chat_workload as chat_workload
from kvcache_lab.comparison import COMPARED as COMPARED
from kvcache_lab.comparison import Comparison as Comparison
from kvcache_lab.comparison import compare as compare
from kvcache_lab.comparison import comparison_table as comparison_table
from kvcache_lab.comparison import optimum as optimum
from kvcache_lab.mismatch import Mismatch as Mismatch
from kvcache_lab.replayer import Replayer as Replayer
from kvcache_lab.replayer import Series as Series
from kvcache_lab.report import ReplayReport as ReplayReport
from kvcache_lab.service import Service as Service
from kvcache_lab.traces import TraceError as TraceError
from kvcache_lab.traces import read_mooncake as read_mooncake
from kvcache_lab.traces import read_trace as read_trace
from kvcache_lab.traces import register_trace_form as register_trace_form
from kvcache_lab.traces import trace_forms as trace_forms
from kvcache_lab.workload import WorkloadRequest as WorkloadRequest
