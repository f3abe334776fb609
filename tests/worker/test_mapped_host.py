# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory that has different addresses on the device and on the host."""

import numpy as np
import pytest
import torch

import kvcache
from kvcache import Pages
from kvcache.ops import LOCATED
from kvcache.worker.pages.page_copy import PageCopy
from tests.machinery.emulation import emulated_ops

PAGES, BYTES = 8, 16


@pytest.fixture
def ops():
    found = emulated_ops()
    yield found
    found.map_host(0, 0, 0)


def ids(*pairs):
    return torch.tensor(pairs, dtype=torch.int32)


def sides():
    """Return host memory, the memory that the device sees at its address, and device memory."""
    host = torch.full((PAGES * BYTES,), 1, dtype=torch.uint8)
    seen = torch.arange(PAGES, dtype=torch.uint8).repeat_interleave(BYTES) + 10
    return host, seen, torch.zeros(PAGES * BYTES, dtype=torch.uint8)


TABLE = torch.tensor([[0, BYTES, 0, BYTES, BYTES]])


def copy(ops, source, destination, pairs, pages_per_run=0, table=TABLE):
    ops.copy_blocks(source, destination, table, pairs, PAGES, PAGES, 0, pages_per_run)


@pytest.mark.parametrize("into_host", [False, True])
def test_each_pinned_piece_has_its_own_address(ops, into_host):
    host, seen, device = sides()
    half = len(host) // 2  # the device maps the two halves in reverse order
    ops.map_host(host.data_ptr(), half, seen.data_ptr() + half)
    ops.map_host(host.data_ptr() + half, half, seen.data_ptr())
    pairs = ids([0, 7], [5, 1], [3, 4], [-1, 0])
    if into_host:
        device = torch.arange(PAGES, dtype=torch.uint8).repeat_interleave(BYTES)
        copy(ops, device, host, pairs, pages_per_run=PAGES // 2)
        assert seen.view(PAGES, BYTES)[:, 0].tolist() == [3, 11, 12, 0, 0, 5, 16, 17]
    else:
        device.fill_(5)
        copy(ops, host, device, pairs, pages_per_run=PAGES // 2)
        assert device.view(PAGES, BYTES)[:, 0].tolist() == [0, 11, 5, 5, 17, 5, 5, 14]
    assert (host == 1).all()


def test_pieces_with_different_addresses_are_rejected(ops):
    host, seen, device = sides()
    half = len(host) // 2
    ops.map_host(host.data_ptr(), half, seen.data_ptr() + half)
    ops.map_host(host.data_ptr() + half, half, seen.data_ptr())
    two = torch.tensor([[0, 8, 0, 8, 8], [half, 8, half, 8, 8]])
    with pytest.raises(RuntimeError, match=r"src has regions\[1\] outside the pinned range of"):
        copy(ops, host, device, ids([3, 0]), table=two)
    assert not device.any()


def test_located_regions_are_not_queried_again(ops):
    """The address of the first byte is queried by each call, so that pages in other memory are
    copied from there.
    """
    host, seen, device = sides()
    half = len(host) // 2
    two = torch.tensor([[0, 8, 0, 8, 8], [half, 8, half, 8, 8]])
    ops.map_host(host.data_ptr() + half, half, 0)  # if it is queried, the second region is rejected
    copy(ops, host, device, ids([3, 0]), LOCATED, two)
    assert device.view(2, PAGES, 8)[:, 0, 0].tolist() == [1, 1]
    ops.map_host(0, 0, 0)
    ops.map_host(host.data_ptr(), len(host), seen.data_ptr())
    copy(ops, host, device, ids([3, 1]), LOCATED, two)
    assert device.view(2, PAGES, 8)[:, 1, 0].tolist() == [11, 15]


def test_regions_are_queried_until_a_kernel_has_copied_them(monkeypatch):
    asked = []

    def copy_blocks(*args):
        asked.append(args[7] != LOCATED)
        if fails:
            raise RuntimeError("not pinned")

    monkeypatch.setattr(kvcache.ops, "copy_blocks", copy_blocks)
    fails = False
    device = Pages.allocate(4, [[8], [8]], device="meta")
    host = Pages.over([torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 8, dtype=torch.uint8)])
    page_copy = PageCopy(device, host)
    one, none = np.array([[1, 2]]), np.zeros((0, 2), np.int64)
    fails = True
    with pytest.raises(RuntimeError):
        page_copy.copy(one)
    fails = False
    del asked[:]
    page_copy.copy(none)  # an empty copy and a copy engine do not query regions
    page_copy.copy(one, engine=kvcache.ops.COPY_ENGINE)
    page_copy.copy(one)
    assert asked == [True, True, True]
    page_copy.copy(one)
    assert asked[-1] is False
    PageCopy(device, host).copy(one)  # another object may be for other memory
    assert asked[-1] is True


@pytest.mark.parametrize("side", ["src", "dst"])
def test_unpinned_region_is_reported(ops, side):
    """The unpinned region is in the same tensor as a pinned one."""
    host, _, device = sides()
    half = len(host) // 2
    ops.map_host(host.data_ptr() + half, half, 0)  # this half has no device address
    two = torch.tensor([[0, 8, 0, 8, 8], [half, 8, half, 8, 8]])
    source, destination = (host, device) if side == "src" else (device, host)
    with pytest.raises(
        RuntimeError, match=rf"{side}'s regions\[1\] is host memory that is not pin"
    ):
        copy(ops, source, destination, ids([3, 0]), table=two)
    assert not device.any() and (host == 1).all()
