# SPDX-License-Identifier: Apache-2.0
"""Stages: transfers of device memory between two processes on one device, with NIXL or TCP.

    python -m benchmarks.gpu.device_transfers nixl

Every transfer is checked: it must deliver the requested blocks and change no other byte. Before any
timing, each kind of transfer runs once, and its device work is counted. Rates are compared with a
contiguous copy of the same bytes. For NIXL, whose two processes share the device, this is a copy
within the device. For TCP, which stages data in host memory, it is a copy to and from pinned memory.
Over TCP, the same bytes are also transferred from host to host.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.gpu import machine, say, sizes
from benchmarks.gpu.timing import stream_seconds
from benchmarks.transports import Move, Pair

_TOTAL = 64 << 20  # bytes per transfer
_ROUNDS = 5
_LEAST_S = 3.0  # minimum time left to start a transfer


class Way(NamedTuple):
    """A kind of transfer.

    `options`: options of kvcache's transport, or None for the plain library. `device`: the device
    of both pools. `fragments`: sizes of scattered fragments in bytes. The same bytes are also moved
    as one contiguous piece.
    """

    options: Mapping[str, object] | None
    device: str
    fragments: tuple[int, ...]

    @property
    def is_staged(self) -> bool:
        """Whether kvcache packs device memory into pinned staging memory."""
        return self.options is not None and self.options.get("direct_bytes") is None


_SMALL = (4 << 10, 16 << 10, 64 << 10)
_WAYS = {
    "nixl": {
        # On this machine, "auto" transfers fragments of 256 KiB or more directly between devices.
        "direct": Way({"direct_bytes": 0}, "cuda:0", (*_SMALL, 256 << 10)),
        "packed": Way({"direct_bytes": None}, "cuda:0", (*_SMALL, 256 << 10)),
        "plain NIXL": Way(None, "cuda:0", _SMALL),
    },
    "tcp": {
        "staged": Way({}, "cuda:0", (4 << 10, 64 << 10)),
        "plain TCP on the host": Way(None, "cpu", ()),
    },
}


def main(arguments: list[str]) -> int:
    (name,) = arguments
    if (reason := why_not(name)) is not None:
        say.skipped(f"{reason}: its transfers of device memory were not checked")
        return say.exit_code()
    ways = _WAYS[name]
    total = sizes.scaled(_TOTAL, 4 * max(size for way in ways.values() for size in way.fragments))
    beside: dict[str, float] = {}
    with say.attempt("contiguous copies"):
        beside = contiguous_gb_per_s(name, total)
        say.row(kind="contiguous", bytes=total, gb_per_s=beside)
    with ExitStack() as stack:
        pairs = {}
        for label, way in ways.items():
            with say.attempt(f"{label}: its processes"):
                pair = Pair(name, way.options, way.device, 2 * total)
                pairs[label] = stack.enter_context(closing(pair))
        Transfers(ways, pairs, total).measure(beside)
    return say.exit_code()


def why_not(name: str) -> str | None:
    """Return why this transport cannot be measured here, or None if it can."""
    if name != "nixl":
        return None
    if not machine.has_module("nixl"):
        return "NIXL is not installed (pip install nixl)"
    if sizes.REHEARSAL:
        return "NIXL cannot reach the memory of a simulated device"
    return None


def contiguous_gb_per_s(name: str, total: int) -> dict[str, float]:
    """Return the rates of a contiguous copy: within the device, or to and from pinned memory."""
    on_device = torch.zeros(total, dtype=torch.uint8, device="cuda")
    if name == "nixl":
        other = torch.empty_like(on_device)
        copies = {"within the device": lambda: other.copy_(on_device)}
    else:
        host = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        copies = {
            "to pinned memory": lambda: host.copy_(on_device, non_blocking=True),
            "from pinned memory": lambda: on_device.copy_(host, non_blocking=True),
        }
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return {each: total / stream_seconds(copy, stream) / 1e9 for each, copy in copies.items()}


class Transfers:
    """All kinds of transfers between the started pairs of processes."""

    def __init__(self, ways: Mapping[str, Way], pairs: Mapping[str, Pair], total: int) -> None:
        self._ways, self._pairs, self._total = ways, pairs, total
        self._rng = np.random.default_rng(0)

    def measure(self, beside: Mapping[str, float]) -> None:
        """Check each kind of transfer once, then time the kinds that passed the check in turn."""
        wanted = [
            (label, size)
            for label in self._pairs
            for size in (self._total, *self._ways[label].fragments)
        ]
        seconds: dict[tuple[str, int], list[float]] = {}
        for kind in wanted:
            with say.attempt(self._text(*kind)):
                self._check(*kind)
                seconds[kind] = []
        say.learned(
            f"{len(seconds)} of {len(wanted)} kinds of transfers delivered the correct bytes"
        )
        for _ in range(sizes.repeats(_ROUNDS)):
            for kind in seconds:
                if say.seconds_left() > _LEAST_S:
                    with say.attempt(self._text(*kind)):
                        seconds[kind].append(self._move(*kind).seconds)
        for (label, size), taken in seconds.items():
            if taken:
                self._report(label, size, statistics.median(taken), len(taken), beside)
            else:
                say.failed(f"{self._text(label, size)}: not timed")

    def _check(self, label: str, size: int) -> None:
        """Connect and run one transfer. Raises AssertionError for wrong bytes or costly staging."""
        way, count = self._ways[label], self._total // size
        costs = self._move(label, size, counts=way.device != "cpu").costs
        say.row(
            kind="checked", way=label, fragment=size, fragments=count, bytes=self._total, **costs
        )
        if not way.is_staged:
            return
        if not costs:
            say.skipped(f"{self._text(label, size)}: correct; launches not counted: no CUPTI here")
            return
        say.learned(
            f"{self._text(label, size)}: ok; {costs['launches']} launches, {costs['copies']} copies, "
            f"{costs['pageable_copies']} of them of pageable memory"
        )
        assert costs["pageable_copies"] == 0, (
            f"{costs['pageable_copies']} copies of pageable memory"
        )
        submitted = costs["launches"] + costs["copies"]
        assert submitted <= 64 + count / 16, (
            f"{submitted} launches and copies for {count} fragments"
        )

    def _move(self, label: str, size: int, *, counts: bool = False) -> Move:
        if say.seconds_left() <= _LEAST_S:
            raise TimeoutError("no time left")
        pair, way = (
            self._pairs[label],
            "scattered" if self._ways[label].options is None else "kvcache",
        )
        if not pair.is_open:
            raise RuntimeError("its processes were ended after a failure")
        return pair.move(way, self._total // size, size, self._rng, counts=counts)

    def _report(
        self, label: str, size: int, seconds: float, rounds: int, beside: Mapping[str, float]
    ) -> None:
        rate = self._total / seconds / 1e9
        say.row(
            kind="transfer", way=label, fragment=size, bytes=self._total, gb_per_s=rate, rounds=rounds,
            contiguous_gb_per_s=dict(beside),
        )  # fmt: skip
        limits = ", ".join(f"{limit:.1f} {each}" for each, limit in beside.items())
        say.learned(f"{self._text(label, size)}: {rate:.2f} GB/s; one copy: {limits}")

    def _text(self, label: str, size: int) -> str:
        return f"{label}, {'contiguous' if size == self._total else f'{size >> 10:,} KiB'}"


if __name__ == "__main__":
    say.ready()
    sys.exit(main(sys.argv[1:]))
