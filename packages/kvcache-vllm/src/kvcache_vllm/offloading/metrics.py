# SPDX-License-Identifier: Apache-2.0
"""The metrics of the host tier: vLLM's own, and additional ones."""

from __future__ import annotations

from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics

HELD = CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC
WRITTEN = CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC
READ = CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC
ALLOCATION_SIZE = CPUOffloadingMetrics.CPU_ALLOCATION_SIZE
SKIPPED = CPUOffloadingMetrics.STORES_SKIPPED
CACHED = "vllm:kv_offload_host_cached_perc"
EVICTED = "vllm:kv_offload_host_evicted_chunks"
FAILED_LOADS = "vllm:kv_offload_host_failed_loads"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the kind of each metric, keyed by name."""
    return {
        HELD: OffloadingGaugeMetadata("Fraction of host chunks held by transfers."),
        WRITTEN: OffloadingGaugeMetadata("Fraction of host chunks being stored."),
        READ: OffloadingGaugeMetadata("Fraction of host chunks being loaded."),
        CACHED: OffloadingGaugeMetadata("Fraction of host chunks that are cached."),
        ALLOCATION_SIZE: OffloadingHistogramMetadata(
            "Host chunks requested by stores.",
            buckets=(1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144),
        ),
        SKIPPED: OffloadingCounterMetadata(
            "Chunks not stored because too few requests used them (store='selective')."
        ),
        EVICTED: OffloadingCounterMetadata("Evicted host chunks."),
        FAILED_LOADS: OffloadingCounterMetadata(
            "Failed loads; their requests recompute the tokens."
        ),
    }
