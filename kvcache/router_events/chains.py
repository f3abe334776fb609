"""Blocks in the order of their chains, so that a reader knows a block's parent before the block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvcache.router_events.wire import WireHash


def chains(parents: Mapping[WireHash, WireHash | None]) -> Iterator[list[WireHash]]:
    """Splits blocks, given with the parent of each, into runs in which each is the parent of the next.

    A run comes after the run that its parent is in. A block whose parent is not among them begins one.
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
