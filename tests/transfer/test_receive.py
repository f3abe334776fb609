# SPDX-License-Identifier: Apache-2.0
"""Conversion of received blocks: the guarantees of three specialized functions, and the general
function.
"""

import subprocess
import sys

import numpy as np
import pytest
import torch

from kvcache.compat import (
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive,
)
from kvcache.transfer import permute_received_blocks
from tests.machinery.shared import REPO

NB, BS, H, D = 11, 12, 3, 5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)


def cache_of(layout, device="cpu", seed=0, dtype=torch.bfloat16, shape=(NB, BS, H, D)):
    nb, bs, heads, size = shape
    order = (bs, heads) if layout == "NHD" else (heads, bs)
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randn(nb, *order, size, generator=generator).to(dtype).to(device)
    return cache if layout == "NHD" else cache.transpose(1, 2)


def memory_of(cache, layout, ids):
    """Return the elements of the blocks in memory order, one row per block."""
    blocks = cache[ids]
    return (blocks if layout == "NHD" else blocks.transpose(1, 2)).reshape(len(ids), -1)


def expected(cache, layout, ids, ratio):
    want = cache.cpu().clone()
    received = memory_of(want, layout, ids).view(len(ids), ratio, H, BS // ratio, D)
    want[ids] = received.permute(0, 1, 3, 2, 4).reshape(len(ids), BS, H, D)
    return want


# (function, local layout, whether the function takes a ratio)
FUNCTIONS = [
    (kv_postprocess_blksize_on_receive, "HND", True),
    (kv_postprocess_layout_on_receive, "NHD", False),
    (kv_postprocess_blksize_and_layout_on_receive, "NHD", True),
]
each_function = pytest.mark.parametrize(
    ("function", "layout", "takes_ratio"), FUNCTIONS, ids=lambda x: getattr(x, "__name__", None)
)


@each_device
@each_function
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 6, 12])
def test_listed_blocks_are_converted_and_others_unchanged(
    function, layout, takes_ratio, ratio, device
):
    ratio = ratio if takes_ratio else 1
    ids = [7, 0, 10, 3]
    cache = cache_of(layout, device)
    want = expected(cache, layout, ids, ratio)
    function(cache, ids, *[ratio] * takes_ratio)
    assert torch.equal(cache.cpu(), want)


@each_device
@each_function
def test_shapes_may_name_heads_before_tokens(function, layout, takes_ratio, device):
    """Some engines pass [block, head, token, element] tensors, however these are stored in memory."""
    ids, ratio = [7, 0, 10, 3], 3 if takes_ratio else 1
    for layers in (
        [cache_of(layout, device)],
        [cache_of(layout, device, seed) for seed in range(3)],
    ):
        want = [expected(layer, layout, ids, ratio) for layer in layers]
        shaped = [layer.transpose(1, 2) for layer in layers]
        function(shaped, ids, *[ratio] * takes_ratio, dims="HND")
        assert all(torch.equal(a.cpu(), b) for a, b in zip(layers, want, strict=True))


@pytest.mark.parametrize("shape", [(NB, BS, 1, D), (NB, 1, H, D)])
def test_ambiguous_order_of_dimensions_must_be_given(shape):
    """With a single head or token, the strides do not identify the dimensions."""
    bs = shape[1]
    for layout in ("NHD", "HND"):
        cache = cache_of(layout, shape=shape)
        want = cache.clone()
        k = 2
        permute_received_blocks(want, [0, 1, 4, 3], remote_block_size=k * bs)
        shaped = cache.transpose(1, 2)
        permute_received_blocks(shaped, [0, 1, 4, 3], remote_block_size=k * bs, dims="HND")
        assert torch.equal(cache, want)
        # If the blocks were read as 12 heads of one token, the result would differ.
        if layout == "NHD" and bs > 1:
            other = cache_of(layout, shape=shape)
            permute_received_blocks(other.transpose(1, 2), [0, 1, 4, 3], remote_block_size=k)
            assert not torch.equal(other, want)


@each_function
def test_unknown_order_of_dimensions_is_reported(function, layout, takes_ratio):
    cache = cache_of(layout)
    before = cache.clone()
    for dims in ("NDH", "hnd", None, 3):
        with pytest.raises(ValueError, match=r"^dims is .*: expected 'NHD' or 'HND'"):
            function(cache, [1], *[2] * takes_ratio, dims=dims)
    with pytest.raises(ValueError, match=r"cache is stored as .*dims='HND'"):
        function(cache, [1], *[2] * takes_ratio, dims="HND")
    assert torch.equal(cache, before)


@each_device
@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        np.array,
        lambda ids: np.array(ids, np.uint8),
        lambda ids: np.array([[i, -1] for i in ids])[:, 0],
        torch.tensor,
        lambda ids: torch.tensor(ids, dtype=torch.int32)[:, None],
        lambda ids: torch.tensor(ids, device="cuda" if torch.cuda.is_available() else "cpu"),
    ],
    ids=["list", "tuple", "array", "uint8", "strided", "tensor", "column", "on the device"],
)
def test_indices_may_have_any_integer_form(make, device):
    ids = [7, 0, 10]
    cache = cache_of("HND", device)
    want = expected(cache, "HND", ids, 2)
    kv_postprocess_blksize_on_receive(cache, make(ids), 2)
    assert torch.equal(cache.cpu(), want)


@each_function
@pytest.mark.parametrize("empty", [[], np.empty((0, 1), np.int64), torch.empty(0)[:0].long()])
def test_empty_indices_change_nothing(function, layout, takes_ratio, empty):
    cache = cache_of(layout)
    before = cache.clone()
    function(cache, empty, *[3] * takes_ratio)
    assert torch.equal(cache, before)


@each_device
@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(("function", "layout"), [(f, at) for f, at, ratio in FUNCTIONS if ratio])
def test_larger_remote_blocks_are_split(function, layout, k, flat, device):
    remote = torch.randn(2, H, k * BS, D)  # HND
    ids = [[8, 1, 4][:k], [0, 9, 2][:k]]
    cache = cache_of(layout, device, dtype=torch.float32)
    want = cache.cpu().clone()
    tokens = remote.transpose(1, 2).reshape(2, k, BS, H, D)
    for i in range(2):
        parts = remote[i].reshape(k, -1)  # received byte by byte, one local block at a time
        order = (BS, H) if layout == "NHD" else (H, BS)
        for j, block in enumerate(ids[i]):
            part = parts[j].view(*order, D)
            cache[block] = (part if layout == "NHD" else part.transpose(0, 1)).to(device)
            want[block] = tokens[i, j]
    function(cache, np.concatenate(ids) if flat else ids, -k)
    assert torch.equal(cache.cpu(), want)


def test_with_one_head_both_layouts_are_equal():
    mla = torch.randn(NB, BS, D)
    before = mla.clone()
    kv_postprocess_blksize_on_receive([mla], [1, 2], 3)
    kv_postprocess_layout_on_receive(mla, [1, 2])
    permute_received_blocks(mla, [1, 2], remote_block_size=4, remote_layout="NHD")
    assert torch.equal(mla, before)
    with pytest.raises(ValueError, match="indices, entry 0, is 11: expected 0 to 10"):
        kv_postprocess_layout_on_receive(mla, [NB])


# --- rejected arguments, which change nothing -----------------------------------------------------


def refused(message, call, *caches):
    before = [cache.clone() for cache in caches]
    with pytest.raises(ValueError, match=message):
        call()
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


@each_device
@each_function
def test_cache_stored_in_the_other_layout_is_rejected(function, layout, takes_ratio, device):
    other = {"NHD": "HND", "HND": "NHD"}[layout]
    cache = cache_of(other, device)
    message = rf"cache is stored as {other} \(strides .*\): expected {layout}"
    refused(message, lambda: function(cache, [1], *[2] * takes_ratio), cache)


@each_device
@each_function
@pytest.mark.parametrize(("ids", "message"), [
    ([1, 2, 1], "indices, entry 2, is 1 again: expected each block once"),
    ([1, NB], "indices, entry 1, is 11: expected 0 to 10"),
    ([-1], "indices, entry 0, is -1: expected 0 to 10"),
    ([2, 2**32], "indices holds 4294967296: expected blocks of the cache"),
    ([1.0], "indices has dtype float64: expected integers"),
    (torch.tensor([1.0]), "indices has dtype torch.float32: expected integers"),
    ([True], "indices has dtype bool: expected integers"),
    ([[1, 2]], r"indices has shape \[1, 2\]: expected \[n, 1\]"),
    (3, r"indices has shape \[\]: expected \[n, 1\]"),
])  # fmt: skip
@pytest.mark.parametrize("on_device", [False, True])
def test_invalid_indices_are_rejected(
    function, layout, takes_ratio, ids, message, on_device, device
):
    cache = cache_of(layout, device)
    if on_device and not isinstance(ids, torch.Tensor):
        ids, message = torch.tensor(ids, device=device), message.replace("float64", ".*float32")
    refused(message, lambda: function(cache, ids, *[2] * takes_ratio), cache)


@pytest.mark.parametrize(("function", "layout"), [(f, at) for f, at, ratio in FUNCTIONS if ratio])
@pytest.mark.parametrize(("ratio", "message"), [
    (5, "block_size_ratio 5 does not divide the block size 12"),
    (24, "block_size_ratio 24 does not divide the block size 12"),
    (0, "block_size_ratio is 0: expected the number of remote blocks"),
    (0.5, "block_size_ratio is 0.5: expected the number of remote blocks"),
    (True, "block_size_ratio is True"),
    (-2, r"indices has shape \[3\]: expected \[n, 2\] or n \* 2"),
])  # fmt: skip
def test_invalid_ratio_is_rejected(function, layout, ratio, message):
    cache = cache_of(layout)
    refused(message, lambda: function(cache, [1, 2, 3], ratio), cache)


@pytest.mark.parametrize(("given", "message"), [
    ({"remote_block_size": 5}, "remote_block_size is 5: expected a divisor or a multiple of the block"),
    ({"remote_block_size": 0}, "remote_block_size is 0"),
    ({"remote_block_size": 4.0}, "remote_block_size is 4.0: expected a number of tokens"),
    *(({"remote_block_size": size}, rf"remote_block_size is {size}: expected at most 132")
      for size in (144, 2**40 * 12, 2**61 * 3)),
    ({"remote_layout": "hnd"}, "remote_layout is 'hnd': expected 'HND' or 'NHD'"),
    ({"indices": torch.zeros(1, dtype=torch.int32, device="meta")},
     "indices is a meta tensor: expected one with values"),
])  # fmt: skip
def test_general_function_rejects_invalid_arguments(given, message):
    cache = cache_of("HND")
    refused(message, lambda: permute_received_blocks(cache, **{"indices": [1], **given}), cache)


def test_layers_with_different_shapes_or_dtypes_are_rejected():
    cache = cache_of("HND")
    for message, other in {
        r"layer 1 has shape \(10, 12, 3, 5\): expected \(11, 12, 3, 5\)": cache[:-1],
        r"layer 1 has strides .*: expected \(180, 5, 60, 1\)": cache_of("NHD"),
        "layer 1 has dtype torch.float16: expected torch.bfloat16": cache.half(),
        "layer 1 has device meta: expected cpu": cache.to("meta"),
        "layer 0 and layer 1 share memory: expected memory of their own": cache,
    }.items():
        call = lambda other=other: kv_postprocess_blksize_on_receive([cache, other], [1], 2)  # noqa: E731
        refused(message, call, cache)


def test_cache_with_an_invalid_form_is_rejected():
    whole = torch.randn(2, NB, BS, H, D)
    refused(
        r"cache has shape \[2, 11, 12, 3, 5\]",
        lambda: kv_postprocess_layout_on_receive(whole, [1]),
        whole,
    )
    refused(
        "cache has stride 2 in its last dimension",
        lambda: kv_postprocess_layout_on_receive(whole[0, ..., ::2], [1]),
        whole,
    )
    refused(
        "cache has elements that share memory",
        lambda: kv_postprocess_layout_on_receive(whole[0, :1].expand(NB, BS, H, D), [1]),
        whole,
    )
    with pytest.raises(TypeError, match="expected a Tensor"):
        permute_received_blocks({"layers.0": whole[0]}, [1])
    with pytest.raises(TypeError, match="layer 0 is on meta: expected a device with memory"):
        kv_postprocess_layout_on_receive(torch.zeros(NB, BS, H, D, device="meta"), [1])
    refused("empty sequence", lambda: kv_postprocess_layout_on_receive([], [1]))


def test_unrelated_errors_propagate_unchanged(monkeypatch):
    from kvcache.transfer import receive

    def fails(*args):
        raise RuntimeError("CUDA error: out of paper")

    monkeypatch.setattr(receive.ops, "permute_blocks_", fails)
    with pytest.raises(RuntimeError, match="out of paper"):
        kv_postprocess_layout_on_receive(cache_of("NHD"), [1])


# --- memory ---------------------------------------------------------------------------------------

# Prints how much one call with 64 MiB of payload increases the process's peak resident size, in
# MiB.
PEAK = """
import pathlib, torch
from kvcache.compat import *
torch.set_num_threads(2)
shape = (1024, 8, 32, 128)
cache = torch.ones(shape, dtype=torch.bfloat16).transpose(1, 2)
ids = torch.randperm(1024)
def peak():
    # getrusage is not used, because its maximum includes the process from which this one was forked.
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024
def plain(cache, ids):
    blocks = cache.index_select(0, ids).transpose(1, 2).reshape(-1, 2, 8, 16, 128)
    cache.index_copy_(0, ids, blocks.permute(0, 1, 3, 2, 4).reshape(-1, 32, 8, 128))
small = torch.ones(2, 8, 32, 128).transpose(1, 2)
kv_postprocess_blksize_on_receive(small, [0, 1], 2)
plain(small, torch.tensor([0]))
start = peak()
kv_postprocess_blksize_on_receive(cache, ids, 2)
ours = peak()
plain(cache, ids)
print(ours - start, peak() - ours)
"""


@pytest.mark.slow
def test_conversion_makes_no_temporary_copy_of_the_payload():
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours, plain = map(float, done.stdout.split())
    # The bound allows for the scratch memory of two threads and for one-time costs of the first
    # large call. The plain implementation shows that a temporary copy would be detected.
    assert ours < 4, f"{ours} MiB more for 64 MiB of payload"
    assert plain > 60


def test_default_device_does_not_affect_the_conversion():
    cache, other = cache_of("HND"), cache_of("HND")
    kv_postprocess_blksize_on_receive(other, [1], 2)
    torch.set_default_device("meta")
    try:
        kv_postprocess_blksize_on_receive(cache, [1], 2)
    finally:
        torch.set_default_device("cpu")
    assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))
