# SPDX-License-Identifier: Apache-2.0
"""Orders blocks by their chains, so that a reader receives each parent before its children."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvcache_exchange.router_events.wire import WireHash


def chains(parents: Mapping[WireHash, WireHash | None]) -> Iterator[list[WireHash]]:
    """Split blocks into runs in which each block is the parent of the next.

    Args:
        parents: Maps the hash of each block to the hash of its parent.

    Yields:
        The hashes of each run. A run is yielded after the run that contains its first block's
        parent. A block whose parent is not in `parents` starts a run.
    """
    children: dict[WireHash | None, list[WireHash]] = {}
    heads = []
    for block, parent in parents.items():
        if parent in parents and parent != block:
            children.setdefault(parent, []).append(block)
        else:
            heads.append(block)
    heads.reverse()
    while heads:
        run = [heads.pop()]
        while following := children.pop(run[-1], None):
            heads.extend(following[1:])
            run.append(following[0])
        yield run
