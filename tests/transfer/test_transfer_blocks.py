# SPDX-License-Identifier: Apache-2.0
"""`copy_kv_blocks` with the tensors of any engine's backend, in both directions."""

import itertools
import random

import numpy as np
import pytest
import torch

from kvcache.compat import copy_kv_blocks
from kvcache.compat.kv_transfer import kv_blocks as blocks
from tests.machinery.shared import sampled
from tests.worker.test_pages import BACKENDS, engine_tensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def named(tensors):
    return {f"layers.{i}": tensor for i, tensor in enumerate(tensors)}


def on(device, tensor):
    """Move a tensor and keep its strides, which `.to` does only for dense tensors."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "pair"])
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_arrive_in_all_layers_and_no_other_changes(device, backend, layout, direction):
    here = engine_tensors(backend, layout)
    there = engine_tensors(backend, layout, num_blocks=8)
    if device == "cuda":
        here = [on("cuda", t) for t in here] if direction == "d2h" else here
        there = [on("cuda", t) for t in there] if direction == "h2d" else there
    before = [t.cpu().clone() for t in there]
    copy_kv_blocks(named(here), named(there), [5, 0, 2], np.array([7, 1, 0]), direction)
    for source, was, now in zip(here, before, there):
        dim = 1 if backend == "flash_attention" else 0
        source, was, now = (t.cpu().movedim(dim, 0) for t in (source, was, now))
        assert torch.equal(now[[7, 1, 0]], source[[5, 0, 2]])
        assert torch.equal(now[2:7], was[2:7])


def reordered(tensor, order, pad=()):
    """Return a tensor with the same content but another memory order, in which the dimensions in
    `pad` are padded.
    """
    sizes = [tensor.shape[d] + 3 * (d in pad) for d in order]
    dims = [order.index(d) for d in range(tensor.ndim)]
    made = torch.zeros(sizes, dtype=tensor.dtype).permute(dims)
    made = made[tuple(slice(n) for n in tensor.shape)]
    return made.copy_(tensor)


def memory_of(tensor):
    """Return the whole memory of a tensor, including padding."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // 4,), (1,), 0)


# (shape, block dimension) for K and V first, blocks first, and MLA.
FORMS = [((2, 6, 4, 3, 8), 1), ((6, 2, 4, 3, 8), 0), ((6, 4, 8), 0)]
CHANGES = [
    (form, order, pad)
    for form in FORMS
    for order in itertools.permutations(range(len(form[0]) - 1))
    for pad in ((), (len(form[0]) - 1,), (0, len(form[0]) - 2))
]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@pytest.mark.parametrize("share", sampled(range(7)))
def test_sides_may_differ_in_order_and_padding(share, direction, staged):
    """Covers every order of the outer dimensions and three kinds of padding, on one or both sides."""
    rng, generator = random.Random(share), torch.Generator().manual_seed(share)
    for (shape, dim), order, pad in CHANGES[share::7]:
        last = len(shape) - 1
        wide = shape if dim == 0 else (*shape[:dim], 9, *shape[dim + 1 :])
        wide = (9, *shape[1:]) if dim == 0 else wide
        here = [torch.randn(shape, generator=generator) for _ in range(2)]
        there = [torch.randn(wide, generator=generator) for _ in range(2)]
        other = [*rng.sample(range(last), last), last] if rng.random() < 0.3 else range(last + 1)
        src = {f"{i}": reordered(t, (*order, last), pad) for i, t in enumerate(here)}
        dst = {f"{i}": reordered(t, [*other]) for i, t in enumerate(there)}
        if rng.random() < 0.5:
            src = {f"{i}": reordered(t, [*other]) for i, t in enumerate(here)}
            dst = {f"{i}": reordered(t, (*order, last), pad) for i, t in enumerate(there)}
        whole = [memory_of(t).clone() for t in src.values()]
        bases = [memory_of(t) for t in dst.values()]
        masks = [torch.ones_like(base, dtype=torch.bool) for base in bases]
        for t, mask in zip(dst.values(), masks):  # value of the padding bytes
            mask.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(False)
        read, written = rng.sample(range(6), 4), rng.sample(range(9), 4)
        pairs = np.array([read, written]).T
        if staged:
            tensors = [*zip(src.values(), dst.values())]
            blocks._copy_staged(tensors, [dim] * 2, pairs, direction)
        else:
            copy_kv_blocks(src, dst, read, written, direction)
        for source, was, now in zip(here, there, dst.values()):
            expected = was.clone().movedim(dim, 0)
            expected[written] = source.movedim(dim, 0)[read]
            assert torch.equal(now.movedim(dim, 0), expected), (shape, order, pad)
        assert all(torch.equal(memory_of(t), was) for t, was in zip(src.values(), whole))
        assert all(not base[mask].any() for base, mask in zip(bases, masks)), "padding was written"


def test_staging_is_chunked(monkeypatch):
    here, there = torch.randn(6, 4, 3, 8), torch.zeros(8, 3, 4, 8).transpose(1, 2)
    monkeypatch.setattr(blocks, "_STAGED_BYTES", 2 * here[0].nbytes)
    pairs = np.array([[0, 7], [3, 1], [5, 2], [1, 0], [2, 6]])
    blocks._copy_staged([(here, there)], [0], pairs, "h2d")
    assert torch.equal(there[pairs[:, 1]], here[pairs[:, 0]])
    assert not there[[3, 4, 5]].any()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_sides_on_device_and_host_may_differ_in_order(direction, pinned):
    here, there = (named(engine_tensors("flash_attention", way)) for way in ("NHD", "HND"))
    expected = {name: t.clone() for name, t in there.items()}
    for name in expected:
        expected[name][:, [4, 1]] = here[name][:, [0, 5]]
    host, device = (here, there) if direction == "h2d" else (there, here)
    host = {name: on("cpu", t).pin_memory() if pinned else t for name, t in host.items()}
    device = {name: on("cuda", t) for name, t in device.items()}
    src, dst = (host, device) if direction == "h2d" else (device, host)
    copy_kv_blocks(src, dst, [0, 5], [4, 1], direction)
    torch.cuda.synchronize()
    assert all(torch.equal(dst[name].cpu(), expected[name]) for name in expected)


def test_engine_class_defines_the_block_dimension():
    class Engine:
        @staticmethod
        def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
            return (2, num_blocks, block_size, num_kv_heads, head_size)

    here, there = ({"a": torch.randn(2, 2, 4, 1, 8)} for _ in range(2))
    copy_kv_blocks(here, there, [1], [0], "h2d", backend=Engine)
    assert torch.equal(there["a"][:, 0], here["a"][:, 1])


def test_empty_ids_do_nothing():
    here, there = named(engine_tensors("mla", "NHD")), named(engine_tensors("mla", "NHD"))
    before = {name: t.clone() for name, t in there.items()}
    copy_kv_blocks(here, there, [], torch.empty(0, dtype=torch.int64), "h2d")
    assert all(torch.equal(there[name], before[name]) for name in there)


def without(caches, name):
    return {key: value for key, value in caches.items() if key != name}


CASES = {
    "direction is 'd2d': expected 'h2d' or 'd2h'": lambda a, b: (a, b, [1], [2], "d2d"),
    "src_block_ids has 2 entries, but dst_block_ids has 1: expected equal lengths": lambda a, b: (
        a, b, [1, 2], [2], "h2d",
    ),
    "src_kv_caches has layer 'layers.2': expected a layer that dst_kv_caches also has": lambda a, b: (
        a, without(b, "layers.2"), [1], [2], "h2d",
    ),
    "dst_kv_caches has layer 'layers.0': expected a layer that src_kv_caches also has": lambda a, b: (
        without(a, "layers.0"), b, [1], [2], "h2d",
    ),
    r"src_block_ids\[1\] is 6: expected 0 to 5": lambda a, b: (a, b, [1, 6], [2, 3], "h2d"),
    r"dst_block_ids\[0\] is -1: expected 0 to 5": lambda a, b: (a, b, [1, 2], [-1, 3], "d2h"),
    "dst_block_ids names block 3 twice: expected one write per page": lambda a, b: (
        a, b, [1, 2], [3, 3], "d2h",
    ),
    r"layer 'layers.1' is torch.float32\[.*\] in src_kv_caches, but torch.float16": lambda a, b: (
        {**a, "layers.1": a["layers.1"].float()}, b, [1], [2], "h2d",
    ),
    r"layer 'layers.1' is torch.float16\[2, 6, 4, 2, 7\] in src_kv_caches": lambda a, b: (
        {**a, "layers.1": a["layers.1"][..., :7]}, b, [1], [2], "h2d",
    ),
    "layer 0 has elements that share memory": lambda a, b: (
        {n: t[..., :1].expand(t.shape) for n, t in a.items()}, b, [1], [2], "h2d",
    ),
    r"src_block_ids\[0\] is 9: expected 0 to 5": lambda a, b: (
        a, named(engine_tensors("flash_attention", "HND")), [9], [2], "h2d",
    ),
    r"src_block_ids has dtype float64: expected integers": lambda a, b: (a, b, [1.5], [2], "h2d"),
    r"src_block_ids has shape \[1, 1\]: expected \[n\]": lambda a, b: (a, b, [[1]], [2], "h2d"),
    "layer 0 is on meta: expected a device with memory": lambda a, b: (
        {n: t.to("meta") for n, t in a.items()}, b, [1], [2], "d2h",
    ),
    "layer 0 is a lazily conjugated or negated view": lambda a, b: (
        {n: torch._neg_view(t) for n, t in a.items()}, b, [1], [2], "h2d",
    ),
    r"src_kv_caches\['layers.0'\] has no dimensions": lambda a, b: (
        {"layers.0": torch.ones(())}, {"layers.0": torch.zeros(())}, [0], [0], "h2d",
    ),
    "src_kv_caches is empty: expected one tensor per layer": lambda a, b: ({}, {}, [1], [2], "h2d"),
}  # fmt: skip


@pytest.mark.parametrize("message", CASES)
def test_invalid_arguments_move_nothing(message):
    here, there = (named(engine_tensors("flash_attention", "NHD")) for _ in range(2))
    arguments = CASES[message](here, there)
    before = {name: t.clone() for name, t in arguments[1].items()}
    with pytest.raises((ValueError, TypeError), match=message):
        copy_kv_blocks(*arguments)
    assert all(torch.equal(t, before[name]) for name, t in arguments[1].items())


def test_ambiguous_block_dimension_must_be_given():
    here, there = ({"a": torch.randn(2, 2, 4, 1, 8)} for _ in range(2))
    with pytest.raises(ValueError, match="which is ambiguous: pass a backend"):
        copy_kv_blocks(here, there, [1], [0], "h2d")
    with pytest.raises(ValueError, match=r"shape \[2, 2, 4, 1, 8\]: expected \[block, token, elem"):
        copy_kv_blocks(here, there, [1], [0], "h2d", backend="MLA")
    copy_kv_blocks(here, there, [1], [0], "h2d", backend="FLASH_ATTN")
    assert torch.equal(there["a"][:, 0], here["a"][:, 1])


def test_two_blocks_leave_the_block_dimension_ambiguous():
    here = {"a": torch.randn(2, 2, 4, 1, 8)}
    there = {"a": torch.randn(5, 2, 4, 1, 8)}
    copy_kv_blocks(here, there, [1], [4], "h2d")
    assert torch.equal(there["a"][4], here["a"][1])


def test_shared_memory_is_copied_or_rejected():
    caches = {"a": torch.arange(5 * 4 * 8.0).view(5, 4, 8)}
    before = caches["a"].clone()
    with pytest.raises(ValueError, match=r"pairs\[0\] reads page 2, which pairs\[1\] writes to"):
        copy_kv_blocks(caches, caches, [2, 3], [3, 2], "d2h")
    assert torch.equal(caches["a"], before)
    copy_kv_blocks(caches, caches, [2], [3], "d2h")
    assert torch.equal(caches["a"][3], before[2])


@pytest.mark.gpu
@pytest.mark.parametrize(("direction", "name"), [("h2d", "src"), ("d2h", "dst")])
def test_unsupported_direction_is_reported(direction, name):
    caches = {"a": torch.zeros(4, 5, 8, device="cuda")}
    with pytest.raises(ValueError, match=f"direction is '{direction}' and {name}_kv_caches is on"):
        copy_kv_blocks(caches, caches, [1], [0], direction)
