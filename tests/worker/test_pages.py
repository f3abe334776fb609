# SPDX-License-Identifier: Apache-2.0
"""Every layout of the attention backends, viewed as pages and as the tensors that kernels use."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache import KVStorage, LayerSpec, Pages, plan_cache
from kvcache.transfer.description import CacheDescription
from kvcache.worker.pages.page_copy import PageCopy

PACKED = {"backend": "BLOCK_MAJOR", "cross_layers": True}
MLA = {"backend": "MLA", "num_kv_heads": 1}
FORMS = {
    "apart": {"backend": "FLASH_ATTN"},
    "blocks first": {"backend": "FLASHINFER"},
    "block-major": PACKED,
    "unequal": {"v_head_size": 4, "backend": "FLASH_ATTN"},
    "unequal, blocks first": {"v_head_size": 4, "backend": "TRITON_ATTN"},
    "unequal, block-major": {"v_head_size": 4, **PACKED},
    "side by side": {"v_head_size": 4, "backend": "FLASH_ATTN_DIFFKV"},
    "heads first": {"backend": "FLASH_ATTN", "cross_layers": True},
    "kv, heads, layers": {"backend": "FLASHINFER", "cross_layers": True},
    "scales": {"scale_bytes_per_token": 4, "backend": "FLASH_ATTN"},
    "scales, blocks first": {"scale_bytes_per_token": 4, "backend": "FLASHINFER"},
    "scales, block-major": {"scale_bytes_per_token": 4, **PACKED},
    "scales, side by side": {"scale_bytes_per_token": 4, "backend": "FLASH_ATTN_DIFFKV"},
    "mla": {"v_head_size": 4, **MLA},
    "mla, block-major": {"v_head_size": 4, "cross_layers": True, **MLA},
    "mla of one part": MLA,
}
EACH_FORM = [*itertools.product(FORMS, ("NHD", "HND"))]


def storage(form, layout, num_blocks=7, num_layers=3, dtype=torch.float16, **more):
    options = {"num_kv_heads": 2, "head_size": 8, **FORMS[form], **more}
    return KVStorage(num_blocks, 5, num_layers=num_layers, dtype=dtype, layout=layout, **options)


def fill(kv, generator=None):
    """Fill all blocks with random K, V and scales."""
    kv.pages.memory.random_(0, 256, generator=generator or torch.Generator().manual_seed(0))


def content(kv):
    """Return the contents of all views, per layer."""
    shown = []
    for layer in range(kv.num_layers):
        views = [kv.key_cache(layer), kv.value_cache(layer)]
        views += [kv.scale_cache(layer)] if kv._scale_caches else []
        shown.append([view.contiguous().view(torch.uint8).clone() for view in views])
    return shown


@pytest.mark.parametrize(("form", "layout"), EACH_FORM)
def test_views_show_every_byte_of_a_page_once(form, layout):
    kv = storage(form, layout)
    fill(kv)
    views = [view for layer in content(kv) for view in layer]
    assert sum(view.numel() for view in views) == kv.pages.num_bytes
    kv.pages.zero(np.array([3]))  # must clear only this block in each view
    for before, after in zip(views, (view for layer in content(kv) for view in layer)):
        assert not after[3].any()
        keep = [0, 1, 2, 4, 5, 6]
        assert torch.equal(before[keep], after[keep])


SHAPES = {
    "apart": [2, 7, 5, 2, 8],
    "blocks first": [7, 2, 5, 2, 8],
    "block-major": [7, 2, 5, 2, 8],
    "scales": [2, 7, 5, 2, 8],
    "mla": [7, 5, 12],
    "mla of one part": [7, 5, 8],
}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", SHAPES)
def test_views_have_the_backend_shapes(form, layout):
    kv = storage(form, layout)
    fill(kv)
    cache = kv.kv_caches[1]
    assert list(cache.shape) == SHAPES[form]
    if "mla" in form:
        both = torch.cat([kv.key_cache(1), kv.value_cache(1)], dim=3)
        assert torch.equal(cache.view(torch.uint8), both[:, :, 0].contiguous().view(torch.uint8))
        return
    key, value = cache.unbind(0 if form in ("apart", "scales") else 1)
    assert key.data_ptr() == kv.key_cache(1).data_ptr()
    assert value.data_ptr() == kv.value_cache(1).data_ptr()
    heads_inside = cache.stride(-2) < cache.stride(-3)
    assert heads_inside == (layout == "NHD")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("form", "layout"), EACH_FORM)
def test_tokens_are_written_and_gathered_in_every_layout(form, layout, device):
    kv = storage(form, layout, device=device)
    generator = torch.Generator().manual_seed(1)
    slots = torch.tensor([6, 34, -1, 5], device=device)
    for layer in range(kv.num_layers):
        key = torch.randn(4, kv.num_kv_heads, kv.head_size, generator=generator).half().to(device)
        value = (
            torch.randn(4, kv.num_kv_heads, kv.v_head_size, generator=generator).half().to(device)
        )
        kv.write(layer, key, value if kv.v_head_size else None, slots)
        found = kv.gather(layer, slots)
        key[2] = value[2] = 0
        assert torch.equal(found[0], key) and torch.equal(found[1], value)
        assert torch.equal(kv.key_cache(layer)[6, 4], key[1])
    assert not any(kv.key_cache(layer)[0].any() for layer in range(kv.num_layers))  # the null block


FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize(("form", "layout"), EACH_FORM)
def test_fp8_storage_applies_scales(form, layout, dtype, per_head):
    kv = storage(form, layout, dtype=dtype)
    heads = kv.num_kv_heads if per_head else 1
    scales = [torch.rand(3, heads) + 0.1 for _ in range(2)]
    kv.set_scales(*scales)
    slots = torch.tensor([6, 34, 5])
    key = torch.randn(3, 3, kv.num_kv_heads, kv.head_size).bfloat16() * 30
    value = torch.randn(3, 3, kv.num_kv_heads, kv.v_head_size).bfloat16() * 30
    most = torch.finfo(dtype).max
    for layer in range(3):
        kv.write(layer, key[layer], value[layer] if kv.v_head_size else None, slots)
        found = kv.gather(layer, slots, torch.bfloat16)
        for tokens, scale, read in zip((key, value), scales, found):
            factor = scale[layer].view(1, -1, 1)
            stored = (tokens[layer].float() / factor).clamp(-most, most).to(dtype)
            expected = (stored.float() * factor).bfloat16()
            assert torch.equal(read, expected)


INVALID_SCALES = [
    *((torch.ones(shape), r"v_scale is torch.float32\[.*\]: expected .*\[3, 1\] or")
      for shape in ((3,), (2, 1), (3, 3), (1, 3))),
    *((torch.tensor([[1.0], [value], [1.0]]), r"v_scale is .*: expected finite numbers above 0")
      for value in (0.0, -1.0, float("nan"), float("inf"))),
]  # fmt: skip


@pytest.mark.parametrize(("scale", "message"), INVALID_SCALES)
def test_invalid_scales_are_rejected(scale, message):
    kv = storage("apart", "NHD", dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=message):
        kv.set_scales(torch.ones(3, 1), scale)
    assert kv.k_scale is None
    with pytest.raises(
        ValueError, match=r"torch.bfloat16: expected float8_e4m3fn, float8_e5m2 or int8"
    ):
        storage("apart", "NHD", dtype=torch.bfloat16).set_scales(*torch.ones(2, 3, 1))


def test_page_of_a_packed_storage_is_one_fragment():
    fragments = {
        form: len(PageCopy(kv.pages, kv.pages.on_host(3)).regions)
        for form in FORMS
        for kv in [storage(form, "NHD", num_layers=4)]
    }
    assert fragments == {
        "apart": 8, "blocks first": 4, "block-major": 1, "unequal": 8, "unequal, blocks first": 4,
        "unequal, block-major": 1, "scales": 12, "scales, blocks first": 4, "scales, block-major": 1,
        "side by side": 4, "heads first": 1, "kv, heads, layers": 1, "scales, side by side": 4,
        "mla": 4, "mla, block-major": 1, "mla of one part": 4,
    }  # fmt: skip


# --- an engine's own tensors ----------------------------------------------------------------------


def engine_tensors(backend, layout, num_layers=3, num_blocks=6, dtype=torch.float16):
    """Return tensors as backends register them: with logical shape [.., block, head, element] and
    this order of strides.
    """
    size, heads, width = 4, 2, 8
    inner = [size, heads, width] if layout == "NHD" else [heads, size, width]

    def seen(tensor):
        return tensor if layout == "NHD" else tensor.transpose(-2, -3)

    made = []
    packed = torch.randn(num_blocks, num_layers, 2, *inner).to(dtype)
    for layer in range(num_layers):
        if backend == "flash_attention":
            made.append(seen(torch.randn(2, num_blocks, *inner).to(dtype)))
        elif backend == "flashinfer":
            made.append(seen(torch.randn(num_blocks, 2, *inner).to(dtype)))
        elif backend == "cross-layer":
            made.append(seen(packed[:, layer]))
        elif backend == "pair":
            value = torch.randn(num_blocks, *inner[:2], 3).to(dtype)
            made.append((seen(torch.randn(num_blocks, *inner).to(dtype)), seen(value)))
        else:
            made.append(torch.randn(num_blocks, size, width).to(dtype))
    return made


BACKENDS = ["flash_attention", "flashinfer", "cross-layer", "pair", "mla"]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_engine_tensors_are_used_without_copy(backend, layout):
    caches = engine_tensors(backend, layout)
    kv = KVStorage.from_tensors(caches)
    assert (kv.num_blocks, kv.block_size, kv.num_layers) == (6, 4, 3)
    assert kv.layout == ("NHD" if backend == "mla" else layout)
    flat = [t for each in caches for t in (each if isinstance(each, tuple) else [each])]
    num_bytes = sum(t.numel() * t.element_size() for t in flat)
    assert kv.pages.num_bytes == kv.num_bytes == num_bytes
    clones = [t.clone() for t in flat]
    host = kv.pages.on_host(5)
    PageCopy(kv.pages, host).copy(np.array([[5, 2], [1, 4]]))
    kv.pages.zero(np.array([1, 5]))
    PageCopy(host, kv.pages).copy(np.array([[2, 3]]))
    for now, was in zip(flat, clones):
        dim = 1 if backend == "flash_attention" else 0
        now, was = now.movedim(dim, 0), was.movedim(dim, 0)
        assert torch.equal(now[3], was[5]) and not now[[1, 5]].any()
        assert torch.equal(now[[0, 2, 4]], was[[0, 2, 4]])
    key = torch.ones(1, kv.num_kv_heads, 8).half()
    value = torch.ones(1, kv.num_kv_heads, kv.v_head_size).half()
    kv.write(2, key, value, torch.tensor([9]))
    assert (kv.key_cache(2)[2, 1] == 1).all()
    assert sum(int((t == 1).sum()) for t in flat) >= key.numel() + value.numel()


@st.composite
def strided(draw):
    """Draw a tensor that is a view of part of a larger one, with its dimensions in any memory order."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    wider = [n + draw(st.integers(0, 1)) for n in shape]
    order = draw(st.permutations(range(len(shape))))
    memory = torch.arange(1, 1 + int(np.prod(wider)), dtype=torch.int32)
    tensor = memory.view([wider[d] for d in order]).permute(*np.argsort(order))
    tensor = tensor[tuple(slice(0, n) for n in shape)]
    return tensor, draw(st.integers(0, len(shape) - 1))


@given(case=strided())
def test_tensors_with_any_strides_become_exact_regions(case):
    tensor, dim = case
    pages = Pages.over([tensor], dim)
    assert pages.num_bytes == tensor.numel() * 4
    found = [pages.fragment(r).contiguous().view(torch.int32) for r in range(len(pages.sizes))]
    for block in range(tensor.shape[dim]):
        held = sorted(x for fragment in found for x in fragment[block].tolist())
        assert held == sorted(tensor.select(dim, block).flatten().tolist())


# --- rejected arguments ---------------------------------------------------------------------------


def two(shape, *others):
    return [torch.zeros(shape), *(torch.zeros(other) for other in others)]


@pytest.mark.parametrize(("call", "message"), [
    (lambda: Pages.over([]), "there are no tensors: expected one or more per layer"),
    (lambda: Pages.over(two((4, 2), (5, 2))),
     "layer 1 has 5 blocks on cpu, but layer 0 has 4 on cpu"),
    (lambda: Pages.over(two((4, 2)), 2), r"block_dim is 2, and layer 0 has shape \[4, 2\]"),
    (lambda: Pages.over(two((4, 2)), [0, 0]), "block_dim has 2 entries: expected 1, one per"),
    (lambda: Pages.over([torch.zeros(1, 2).expand(4, 2)]),
     r"layer 0 has elements that share memory \(stride 0\): expected none"),
    (lambda: Pages.allocate(0, [[4]]), "num_blocks is 0: expected 1 to 2147483647"),
    (lambda: storage("apart", "NHD", num_blocks=0), "num_blocks is 0"),
    (lambda: storage("apart", "NHD", head_size=-1), "head_size is -1"),
    (lambda: storage("apart", "DNH"), "layout is 'DNH': expected 'NHD' or 'HND'"),
    (lambda: storage("apart", "NHD", num_layers=0), "num_layers is 0"),
    (lambda: storage("apart", "NHD").key_cache(3), "layer is 3: expected 0 to 2"),
    (lambda: Pages.allocate(2, [[4]]).on_host(0), "num_blocks is 0: expected 1 to 2147483647"),
    (lambda: KVStorage.from_tensors([]), "kv_caches is empty: expected one entry per layer"),
    (lambda: KVStorage.from_tensors([torch.zeros(2, 2, 4, 1, 8)]),
     r"kv_caches\[0\] has shape \[2, 2, 4, 1, 8\], which is ambiguous"),
    (lambda: KVStorage.from_tensors([torch.zeros(3, 2, 4, 1, 8)], backend="FLASH_ATTN"),
     r"kv_caches\[0\] has shape .*: expected \[2, block, token, head, element\] of backend"),
    (lambda: KVStorage.from_tensors([torch.zeros(3, 3, 4, 1, 8)]),
     r"kv_caches\[0\] has shape \[3, 3, 4, 1, 8\]: expected \[2, num_blocks"),
    (lambda: KVStorage.from_tensors([torch.zeros(3, 2, 4, 1, 8), torch.zeros(3, 2, 4, 1, 9)]),
     r"kv_caches\[1\] has blocks of torch.float32\[3, 4, 1, 9\] with strides"),
    (lambda: KVStorage.from_tensors([(torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 2, 8))]),
     "expected equal dtypes, and shapes that differ only in the last"),
    (lambda: KVStorage.from_tensors([(torch.zeros(3, 4, 8), torch.zeros(3, 4, 8))]),
     r"kv_caches\[0\] has shapes .*: expected a pair \(K, V\)"),
    (
        lambda: KVStorage.from_tensors(
            [torch.zeros(3, 2, 4, 2, 8), torch.zeros(3, 2, 2, 4, 8).transpose(2, 3)]
        ),
        r"kv_caches\[1\] has blocks .*: expected equal dtypes, shapes and orders in memory",
    ),
    (lambda: KVStorage.from_tensors([(torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 1, 8).half())]),
     r"has K of torch.float32\[3, 4, 1, 8\] and V of torch.float16"),
    (lambda: KVStorage.from_tensors([torch.zeros(3, 2, 4, 1, 16)[..., ::2]]),
     r"kv_caches\[0\] has stride 2 in its last dimension: expected 1"),
    (lambda: KVStorage.from_tensors([torch.zeros(3, 4, 8)], backend="FLASHINFER"),
     r"kv_caches\[0\] has shape \[3, 4, 8\]: expected \[block, 2, token, head, element\] of"),
    (lambda: KVStorage.from_tensors([torch.zeros(2, 0, 4, 2, 8)]),
     r"layer 0 has shape \[2, 0, 4, 2, 8\]: expected elements in a block"),
    (lambda: Pages.allocate(3, [[-4, 8]]),
     r"sizes\[0\]\[0\] is -4: expected 0 to 9223372036854775807"),
    (lambda: storage("apart", "NHD", backend="MLA"),
     "num_kv_heads is 2: expected 1 with the memory order .* which has no heads"),
    (lambda: storage("apart", "NHD", v_head_size=-1), "v_head_size is -1: expected 0 to"),
    (lambda: storage("heads first", "HND", scale_bytes_per_token=4),
     "scale_bytes_per_token is 4: expected 0 with the memory order .* not contiguous"),
    (lambda: storage("apart", "NHD", backend="SHARED"),
     "backend is 'SHARED': expected one of BLOCK_MAJOR, "),
    (lambda: KVStorage.over(Pages.allocate(3, [[512]]), 4, 1, 8, backend="FLASH_ATTN"),
     "backend is 'FLASH_ATTN': expected a backend that keeps K and V of a block together"),
    (
        lambda: KVStorage.from_tensors(
            [torch.zeros(3, 4, 1, 8)], backend="FLASH_ATTN_DIFFKV", v_head_size=8
        ),
        "v_head_size is 8: expected 0 to 7",
    ),
    (lambda: storage("apart", "NHD", scale_bytes_per_token=-1),
     "scale_bytes_per_token is -1: expected 0 to"),
    (lambda: storage("blocks first", "NHD", scale_bytes_per_token=1),
     "scale_bytes_per_token is 1: expected a value for which a block's scales"),
    (lambda: storage("apart", "NHD").scale_cache(0), "the storage has no scales: expected"),
    (lambda: storage("apart", "NHD").gather(0, torch.tensor([1]), torch.float32),
     "tokens are torch.float32, but the storage is torch.float16: expected the same dtype"),
])  # fmt: skip
def test_invalid_sizes_are_reported(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("v_head_size", [None, 2])
def test_engine_tensors_may_hold_k_and_v_in_one_dimension(v_head_size):
    caches = [torch.randn(3, 4, 2, 8) for _ in range(2)]
    kv = KVStorage.from_tensors(caches, backend="FLASH_ATTN_DIFFKV", v_head_size=v_head_size)
    split = 4 if v_head_size is None else 6
    assert (kv.num_blocks, kv.head_size, kv.v_head_size) == (3, split, 8 - split)
    assert torch.equal(kv.key_cache(1), caches[1][..., :split])
    assert torch.equal(kv.value_cache(1), caches[1][..., split:])


# --- memory with several owners -------------------------------------------------------------------


def separate(num_layers=4):
    """Return tensors in separate allocations, sorted by descending address."""
    made = [torch.randn(50, 3, 7) for _ in range(num_layers)]
    return sorted(made, key=lambda t: t.data_ptr(), reverse=True)


@pytest.mark.parametrize("downwards", [False, True])
def test_views_of_separate_tensors_alias_them(downwards):
    layers = separate()[:: 1 if downwards else -1]
    places = [t.data_ptr() for t in layers]
    pages = Pages.over(layers)
    for i, layer in enumerate(layers):
        expected = layer.view(50, -1).view(torch.uint8)
        assert torch.equal(pages.layer(i), expected) and torch.equal(pages.fragment(i), expected)
    assert [t.data_ptr() for t in layers] == places
    before = [t.clone() for t in layers]
    host = pages.on_host(5)
    PageCopy(pages, host).copy(np.array([[7, 2]]))
    PageCopy(host, pages).copy(np.array([[2, 9]]))
    assert all(torch.equal(now[9], was[7]) for now, was in zip(layers, before))


@pytest.mark.parametrize("make", [
    lambda m: [m, m],
    lambda m: [m[0:5], m[1:6]],
    lambda m: [m, m[:, 2:]],
    lambda m: [m[:, :5], m[:, 4:]],
])  # fmt: skip
def test_layers_that_share_memory_are_rejected(make):
    with pytest.raises(ValueError, match="share memory: expected memory of their own"):
        Pages.over(make(torch.randn(6, 8)))
    assert Pages.over([torch.randn(6, 8), torch.randn(6, 8)]).num_layers == 2


def test_strides_without_actual_overlap_are_accepted():
    with pytest.raises(ValueError, match="elements that share memory"):
        Pages.over([torch.zeros(100).as_strided((1, 3, 8), (1, 4, 1))])
    pages = Pages.over([torch.arange(100.0).as_strided((3, 3, 8), (28, 10, 1))])
    assert pages.num_bytes == 3 * 3 * 8 * 4


def test_aliased_memory_is_treated_as_one_region():
    memory = torch.arange(12.0).view(6, 2)
    one, two = Pages.over([memory]), Pages.over([memory])
    with pytest.raises(RuntimeError, match="reads page 2, which pairs"):
        PageCopy(one, two).copy(np.array([[1, 2], [2, 3]]))
    PageCopy(one, two).copy(np.array([[1, 2]]))
    assert memory[2].tolist() == [2, 3]
    with pytest.raises(
        ValueError, match="source and destination share memory: expected the same pages"
    ):
        PageCopy(Pages.over([memory[1:5]]), Pages.over([memory[:4]])).copy(np.array([[1, 2]]))


@pytest.mark.parametrize("other", [
    torch.zeros(6, 4, 2, 8).bfloat16(),
    torch.zeros(6, 8, 1, 8).half(),
    torch.zeros(6, 2, 4, 8).half().transpose(1, 2),
])  # fmt: skip
def test_pages_of_another_dtype_shape_or_order_are_rejected(other):
    mine, others = Pages.over([torch.zeros(6, 4, 2, 8).half()]), Pages.over([other])
    with pytest.raises(ValueError, match=r"tensor 0 has blocks of .dtype, shape, dimensions from"):
        PageCopy(mine, others).copy(np.array([[1, 2]]))


# --- storages of a plan ---------------------------------------------------------------------------


def hybrid_plan(**more):
    window = {"options": {"window": 32}}
    layers = [LayerSpec(f"full.{i}", "full_attention", 16, 2, 8, dtype="float16") for i in range(3)]
    layers += [LayerSpec("window", "sliding_window", 8, 2, 8, dtype="float16", **window)]
    layers += [LayerSpec("mla", "full_attention", 16, 1, 24, 0, dtype="bfloat16")]
    scaled = {"dtype": "float8_e4m3fn", "scale_bytes_per_token": 8}
    layers += [LayerSpec("fp8", "full_attention", 16, 2, 8, 4, **scaled)]
    layers += [LayerSpec("state", "recurrent", 1, dtype="float32", state_bytes=512)]
    return plan_cache(layers, 2**20, max_model_len=64, max_num_batched_tokens=16, **more)


@pytest.mark.parametrize("more", [{}, {"layer_page_bytes": 4096}], ids=["plain", "padded"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_plan_creates_one_storage_per_group_over_the_same_pages(layout, more):
    plan = hybrid_plan(**more)
    storages = KVStorage.for_plan(plan, layout=layout)
    assert len(storages) == len(plan.groups)
    pages = storages[0].pages
    assert pages.num_blocks == plan.num_pages and pages.page_bytes == plan.page_bytes
    assert all(kv.pages is pages for kv in storages)
    pages.memory.zero_()
    specs = {layer.name: layer for layer in plan.layers}
    for page, (group, kv) in enumerate(zip(plan.groups, storages), start=1):
        spec = specs[group.layers[0]]
        assert kv.num_layers == len(group.layers) and kv.layout == layout
        assert kv.block_size == (1 if spec.state_bytes else group.block_size)
        assert kv.dtype == getattr(torch, spec.dtype)
        key = torch.randn(1, kv.num_kv_heads, kv.head_size).to(kv.dtype)
        value = torch.randn(1, kv.num_kv_heads, kv.v_head_size).to(kv.dtype)
        slot = torch.tensor([page * kv.block_size + kv.block_size - 1])
        for layer in range(kv.num_layers):
            kv.write(layer, key, value, slot)
            found = kv.gather(layer, slot)
            assert torch.equal(found[0].float(), key.float())
            assert torch.equal(found[1].float(), value.float())
            written = pages.layer(layer)[page].count_nonzero()
            assert 0 < written <= plan.layer_page_bytes
            assert not pages.layer(layer)[page + 1].any()


def test_kernel_views_have_the_shape_of_their_layer_kind():
    plan = hybrid_plan()
    found = {g.layers[0]: kv for g, kv in zip(plan.groups, KVStorage.for_plan(plan))}
    n, mla, state = plan.num_pages, found["mla"], found["state"]
    assert list(found["window"].kv_caches[0].shape[1:]) == [2, found["window"].block_size, 2, 8]
    assert list(mla.kv_caches[0].shape) == [n, mla.block_size, 24]
    assert list(state.kv_caches[0].shape) == [n, 1, 128] and state.dtype == torch.float32
    fp8 = found["fp8"]
    assert [list(t.shape) for t in fp8.kv_caches[0]] == [[n, fp8.block_size, 2, d] for d in (8, 4)]
    assert list(fp8.scale_cache(0).shape) == [n, fp8.block_size, 8]
    before = (
        fp8.key_cache(0).view(torch.uint8).clone(),
        fp8.value_cache(0).view(torch.uint8).clone(),
    )
    fp8.scale_cache(0).fill_(7)
    assert torch.equal(fp8.key_cache(0).view(torch.uint8), before[0])
    assert torch.equal(fp8.value_cache(0).view(torch.uint8), before[1])


def test_unsupported_plans_are_rejected():
    with pytest.raises(TypeError, match=r"plan is \[.*: expected a CachePlan"):
        KVStorage.for_plan([])
    odd = [LayerSpec("s", "recurrent", 1, state_bytes=5)]
    with pytest.raises(ValueError, match="state_bytes is 5, of layer 's': expected whole elements"):
        KVStorage.for_plan(plan_cache(odd, 2**10, max_model_len=4))
    layers = [
        LayerSpec("a", "full_attention", 16, 2, 8),
        LayerSpec("b", "full_attention", 16, 1, 16),
    ]
    plan = plan_cache(layers, 2**20, max_model_len=64)
    with pytest.raises(
        ValueError, match=r"page_bytes is 1099511627776: expected 1 layers of plan.layer"
    ):
        KVStorage.for_plan(replace(plan, page_bytes=2**40))
    plan = replace(plan, groups=(replace(plan.groups[0], layers=("a", "b")),))
    with pytest.raises(
        ValueError, match="layer 'b' has num_kv_heads 1, but layer 'a' of its group has 2"
    ):
        KVStorage.for_plan(plan)


@pytest.mark.parametrize(("latent", "rotary", "dtype"), [
    (512, 64, torch.bfloat16), (576, 0, "bfloat16"), (576, None, torch.bfloat16),
])  # fmt: skip
def test_mla_sizes_agree_between_specs_and_storage(latent, rotary, dtype):
    """The latent has 512 elements and the rotary part 64. They are stored separately or as one
    vector.
    """
    described = CacheDescription(
        engine_id="a", num_layers=2, total_num_kv_heads=1, head_size=latent, block_size=16,
        v_head_size=rotary, is_mla=True, memory_order=("block", "token", "element"), dtype=dtype,
    )  # fmt: skip
    assert (described.head_size, described.v_head_size) == (576, 0)
    layer = LayerSpec("a", "full_attention", 16, 1, latent, rotary, dtype=dtype, is_mla=True)
    assert layer.page_bytes(16) == described.region_bytes[0] == 16 * 576 * 2
    plan = plan_cache([layer], 2**20, max_model_len=64)
    options = {"v_head_size": layer.v_head_size, "dtype": "bfloat16", "backend": "MLA"}
    alone = KVStorage(plan.num_pages, 16, 1, layer.head_size, **options)
    for found in (alone, *KVStorage.for_plan(plan)):
        assert found.kv_caches[0].shape == (plan.num_pages, 16, 576)
        assert found.dtype == torch.bfloat16


@pytest.mark.parametrize(("wrong", "message"), [
    ({"num_kv_heads": 2}, "is_mla is True, num_kv_heads 2"),
    ({"dtype": "int3"}, "dtype is 'int3': expected one of float32"),
    ({"dtype": torch.int64}, "dtype is 'int64': expected one of float32"),
])  # fmt: skip
def test_wrong_mla_layers_are_rejected(wrong, message):
    with pytest.raises(ValueError, match=message):
        LayerSpec(
            "a",
            "full_attention",
            16,
            **{"num_kv_heads": 1, "head_size": 8, "is_mla": True, **wrong},
        )


STORAGE, ONE = KVStorage(4, 16, 1, 8, dtype=torch.float32), torch.ones(1, 1, 8)
SLOTS = torch.tensor([17])


@pytest.mark.parametrize(("call", "message"), [
    (lambda: KVStorage(4, 16, 1, 8, dtype=3), r"dtype is 3: expected a torch\.dtype or its name"),
    (lambda: KVStorage(4, 16, 1, 8, dtype="complex64"), "dtype is 'complex64': expected one of float32"),
    (lambda: KVStorage.over(Pages.allocate(4, [[4096]]), 16, 1, 8, dtype=torch.int64),
     "dtype is 'int64': expected one of float32"),
    (lambda: STORAGE.gather(0, SLOTS, torch.bool), "dtype is 'bool': expected one of float32"),
    (lambda: STORAGE.gather(0, [17]), r"slot_mapping is \[17\]: expected a Tensor"),
    (lambda: STORAGE.write(0, ONE, ONE, 17), "slot_mapping is 17: expected a Tensor"),
    (lambda: STORAGE.write(0, None, None, SLOTS), "key is None: expected a Tensor"),
    (lambda: STORAGE.write(0, ONE, [17], SLOTS), r"value is \[17\]: expected a Tensor"),
    (lambda: STORAGE.write(0, torch.tensor(1), None, SLOTS), "key has 0 dimensions"),
    (lambda: storage("apart", "NHD", backend=7), "backend is 7: expected a name, an AttentionBackend or"),
])  # fmt: skip
def test_wrong_dtypes_tokens_and_slots_are_rejected(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def separate_layers(num_layers=3, num_blocks=6, block_dim=1):
    """Return an engine's K and V tensors for each layer, in which all blocks have different
    contents.
    """
    shape = (2, num_blocks, 4, 3) if block_dim else (num_blocks, 2, 4, 3)
    return [
        torch.arange(float(np.prod(shape))).view(shape) + 10_000 * layer
        for layer in range(num_layers)
    ]


@given(
    pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12),
    as_tensor=st.booleans(),
    dim=st.integers(0, 1),
)
def test_copy_on_write_pairs_are_copied_in_order_over_all_layers(pairs, as_tensor, dim):
    layers = separate_layers(block_dim=dim)
    want = [layer.clone() for layer in layers]
    for source, destination in pairs:
        for layer in want:
            layer.select(dim, destination).copy_(layer.select(dim, source).clone())
    given_pairs = torch.tensor(pairs, dtype=torch.int32).view(-1, 2) if as_tensor else pairs
    Pages.over(layers, dim).copy(given_pairs)
    assert all(torch.equal(a, b) for a, b in zip(layers, want, strict=True))


@pytest.mark.parametrize(("pairs", "error", "message"), [
    ([(1, 2), (6, 3)], ValueError, r"^pairs\[1\] reads page 6: expected 0 to 5"),
    ([(-1, 3)], ValueError, r"^pairs\[0\] reads page -1: expected 0 to 5"),
    ([(1, 2), (2, -1)], ValueError, r"^pairs\[1\] writes to page -1: expected 0 to 5"),
    ([1, 2], ValueError, r"^pairs has shape \[2\]: expected \[n, 2\]"),
    ([(1.5, 2)], TypeError, r"^pairs has dtype float64: expected integers"),
    ([(0, 2**40)], ValueError, r"^pairs\[0\] writes to page 1099511627776"),
    (None, ValueError, r"^pairs has shape \[\]"),
])  # fmt: skip
def test_invalid_pairs_copy_nothing(pairs, error, message):
    layers = separate_layers()
    with pytest.raises(error, match=message):
        Pages.over(layers, 1).copy(pairs)
    assert all(torch.equal(a, b) for a, b in zip(layers, separate_layers(), strict=True))


def test_copies_of_engine_tensors_hold_no_references():
    import weakref

    layers = separate_layers()
    pages = Pages.over(layers, 1)
    pages.copy([(1, 2)])
    seen = weakref.ref(pages)
    del pages
    assert seen() is None  # the tensors are freed immediately, without garbage collection


def test_a_storage_that_fails_is_not_counted():
    pages = Pages.allocate(4, [[1024]])
    with pytest.raises(ValueError, match=r"layers\[0\] is 1: expected 0 to 0"):
        KVStorage.over(pages, 16, num_kv_heads=2, head_size=8, layers=[1])
    assert pages.num_storages == 0
    for number in range(2):
        assert KVStorage.over(pages, 16, num_kv_heads=2, head_size=8).scale_home == (pages, number)
    assert KVStorage(4, 16, 2, 8).pages.num_storages == 1
