"""The metrics of the host tier: vLLM's own of its tier in host memory, and some more."""

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
    """Name and kind of each."""
    return {
        HELD: OffloadingGaugeMetadata("Share of host chunks that transfers hold."),
        WRITTEN: OffloadingGaugeMetadata("Share of host chunks that are being stored."),
        READ: OffloadingGaugeMetadata("Share of host chunks that are being loaded."),
        CACHED: OffloadingGaugeMetadata("Share of host chunks that can be hit."),
        ALLOCATION_SIZE: OffloadingHistogramMetadata(
            "Host chunks that a store asks for.",
            buckets=(1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144),
        ),
        SKIPPED: OffloadingCounterMetadata(
            "Chunks not stored because too few requests had them (store='selective')."
        ),
        EVICTED: OffloadingCounterMetadata("Host chunks evicted for others."),
        FAILED_LOADS: OffloadingCounterMetadata(
            "Loads that failed; their requests computed the tokens anew."
        ),
    }
