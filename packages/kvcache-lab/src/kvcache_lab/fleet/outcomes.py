# SPDX-License-Identifier: Apache-2.0
"""The data that a simulation records for each request."""

from __future__ import annotations

import math
from array import array

import numpy as np

from kvcache_lab.running import Running
from kvcache_lab.workload import WorkloadRequest

HIT_FIELDS = ("device_hit_tokens", "host_hit_tokens", "store_hit_tokens", "peer_hit_tokens")
MOVED_FIELDS = ("loaded_bytes", "decode_hit_tokens", "transferred_bytes")


class Outcomes:
    """One entry per request, in order of arrival."""

    def __init__(self) -> None:
        names = ("arrival_ms", "prompt_tokens", "answer_tokens", *HIT_FIELDS)
        names = (*names, *MOVED_FIELDS)
        self._columns = {name: array("q") for name in names}
        self._first_ms = array("d")  # infinite until the request is served

    def __len__(self) -> int:
        return len(self._first_ms)

    @property
    def num_served(self) -> int:
        """Number of requests with a first token."""
        return int(np.isfinite(self.first_ms).sum())

    @property
    def first_ms(self) -> np.ndarray:
        """float64[n], the times of the first tokens. Infinite for requests that are not served."""
        return np.array(self._first_ms)

    @property
    def ms_to_first_token(self) -> np.ndarray:
        """float64, the times from arrival to first token of the served requests."""
        times = self.first_ms - self.column("arrival_ms")
        return times[np.isfinite(times)]

    def column(self, name: str) -> np.ndarray:
        """Return int64[n], the values of a field for all requests. Requests that are not served
        have zeros.
        """
        return np.array(self._columns[name])

    def arrive(self, item: WorkloadRequest) -> int:
        """Add a request, and return its position."""
        for name, column in self._columns.items():
            column.append(item.arrival_ms if name == "arrival_ms" else 0)
        self._first_ms.append(math.inf)
        return len(self) - 1

    def compute(self, place: int, served: Running) -> None:
        """Record a prompt's hits and loads."""
        on_device = served.num_hit - served.num_host_hit - served.num_store_hit
        self._set(place, "prompt_tokens", served.item.num_tokens)
        self._set(place, "device_hit_tokens", on_device)
        self._set(place, "host_hit_tokens", served.num_host_hit)
        self._set(place, "loaded_bytes", served.num_loaded_bytes)
        for link in ("store", "peer"):
            count = served.num_store_hit if link == served.link else 0
            self._set(place, f"{link}_hit_tokens", count)

    def answer(self, place: int, item: WorkloadRequest, served: Running) -> None:
        """Record the time of the first token and, if a decode replica serves the request, its hits
        and loads.
        """
        self._set(place, "answer_tokens", item.output_length)
        self._first_ms[place] = served.first_ms
        if served.item.num_tokens > item.num_tokens:
            self._set(place, "decode_hit_tokens", served.num_hit - served.num_store_hit)
            self._set(place, "transferred_bytes", served.num_loaded_bytes)

    def reject(self, place: int) -> None:
        """Record that a prompt does not fit into the decode replica."""
        for name, column in self._columns.items():
            column[place] *= name == "arrival_ms"

    def _set(self, place: int, name: str, value: int) -> None:
        self._columns[name][place] = value


def percentile(times: np.ndarray, percent: float) -> float:
    """Return the smallest entry that is greater than or equal to at least `percent` % of the
    entries.
    """
    return float(np.percentile(times, percent, method="inverted_cdf"))
