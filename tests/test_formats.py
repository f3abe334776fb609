# SPDX-License-Identifier: Apache-2.0
"""Quantized formats with scales in the page: sizes, storages, copies, transfers and identities."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcache import LayerSpec, plan_cache
from kvcache.formats import TILE, KVFormat, format_named, format_names, register_format
from kvcache.layouts import backend
from kvcache.transfer import CacheDescription, plan_transfer
from kvcache.worker import KVStorage, Pages
from kvcache.worker.pages.page_copy import PageCopy
from tests.transfer.test_transfer_memory import move_runs

SPARSE = register_format(KVFormat("test_int4_groups", "uint8", group_size=8))
LAYOUTS = ["NHD", "HND"]


def layers_of(name, **changes):
    """Return two layers in a format, with sizes that it can hold."""
    if format_named(name).is_row:
        sizes = {"num_kv_heads": 1, "head_size": 256, "v_head_size": 32, "is_mla": True}
    elif "indexer" in name:
        sizes = {"num_kv_heads": 1, "head_size": 128, "v_head_size": 0}
    else:
        sizes = {"num_kv_heads": 4, "head_size": 64, "v_head_size": 32}
    sizes |= {"kv_format": name, **changes}
    return [LayerSpec(layer, "full_attention", 16, **sizes) for layer in "ab"]


def storage_of(layers, layout="NHD"):
    (storage,) = KVStorage.for_plan(plan_cache(layers, 2**20, max_model_len=64), layout=layout)
    storage.pages.memory.zero_()  # new pages have any content
    return storage


def tokens_of(storage, num_tokens=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = num_tokens, storage.num_kv_heads
    return [
        torch.randn((*shape, size), generator=generator).bfloat16() for size in storage.token_sizes
    ]


def write(storage, layer, slots, seed=0):
    key, value = tokens_of(storage, len(slots), seed)
    storage.write(layer, key, value if value.shape[2] else None, slots)
    return key, value


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", format_names())
def test_tokens_are_read_as_they_were_written(name, layout):
    storage = storage_of(layers_of(name), layout)
    slots = torch.randperm(60)[:9] + storage.block_size
    written = [write(storage, layer, slots, seed=layer) for layer in (0, 1)]
    step = {"int8": 0.01, "uint8": 0.14}.get(format_named(name).dtype, 0.07)
    step = 0.14 if "e5m2" in name else 0.2 if name == "nvfp4" else step
    for layer, given in enumerate(written):
        for got, want in zip(storage.gather(layer, slots), given):
            assert got.dtype == torch.bfloat16
            largest = want.float().abs().amax() if want.numel() else 0
            assert ((got.float() - want.float()).abs() <= step * largest).all()
    found = storage.gather(0, torch.tensor([-1, 3]))
    assert not any(part.any() for part in found)


@pytest.mark.parametrize("name", format_names())
def test_bytes_of_a_page_are_those_of_its_tokens(name):
    layers = layers_of(name)
    plan = plan_cache(layers, 2**20, max_model_len=64)
    assert plan.page_bytes == 2 * plan.groups[0].block_size * layers[0].bytes_per_token
    storage = storage_of(layers)
    sizes = format_named(name).stored(storage.num_kv_heads, *storage.token_sizes)
    data = storage.num_kv_heads * (sizes.head_size + sizes.v_head_size)
    assert layers[0].bytes_per_token == data + sizes.scale_bytes_per_token


def test_scales_of_an_indexer_follow_the_keys_of_their_block():
    storage = storage_of(layers_of("fp8_indexer"))
    page = storage.pages.layer(0)[2]
    keys, scales = page.split([storage.block_size * 128, storage.block_size * 4])
    write(storage, 0, torch.tensor([2 * storage.block_size + 3]))
    assert keys.view(-1, 128).any(1).nonzero().tolist() == [[3]]
    assert scales.view(torch.float32).nonzero().tolist() == [[3]]


@pytest.mark.parametrize("name", format_names())
def test_copied_pages_hold_the_scales(name):
    storage = storage_of(layers_of(name))
    size = storage.block_size
    write(storage, 1, torch.arange(2 * size, 2 * size + 5))
    PageCopy(storage.pages, storage.pages).copy(np.array([[2, 7]], np.int32))
    copied = storage.gather(1, torch.arange(7 * size, 7 * size + 5))
    original = storage.gather(1, torch.arange(2 * size, 2 * size + 5))
    assert all(torch.equal(a, b) and a.any() for a, b in zip(copied, original) if a.numel())


@pytest.mark.parametrize("name", [each for each in format_names() if not format_named(each).is_row])
def test_keys_without_values_are_written_and_read(name):
    """A latent of MLA has no V."""
    storage = KVStorage(4, 16, 1, 128, v_head_size=0, kv_format=name)
    key, slots = torch.randn(3, 1, 128), torch.tensor([17, 33, 19])
    storage.write(0, key, None, slots)
    found, value = storage.gather(0, slots, torch.float32)
    assert (found - key).abs().max() < 0.2 * key.abs().max() and value.shape == (3, 1, 0)


def described(layers, tp_size, layout):
    plan = plan_cache(layers, 2**20, max_model_len=64)
    order = "MLA" if layers[0].v_head_size == 0 or layers[0].is_mla else "FLASHINFER"
    return CacheDescription.of_group(
        plan.groups[0], plan.layers, engine_id="e", tp_size=tp_size, total_num_kv_heads=None,
        memory_order=backend(order).memory_order(layout),
    )  # fmt: skip


@pytest.mark.parametrize("layouts", [("NHD", "NHD"), ("HND", "NHD")])
@pytest.mark.parametrize("name", [n for n in format_names() if "indexer" not in n])
def test_tokens_arrive_from_ranks_of_another_size(name, layouts):
    is_row = format_named(name).is_row
    heads = 1 if is_row else 4
    mine, theirs = layers_of(name), layers_of(name, num_kv_heads=1 if is_row else 2)
    storage = storage_of(mine, layouts[0])
    sources = [storage_of(theirs, layouts[1]) for _ in range(2)]
    size = storage.block_size
    assert size == sources[0].block_size or is_row
    local, remote = described(mine, 1, layouts[0]), described(theirs, 2, layouts[1])
    plan = plan_transfer(local, remote, 0)
    slots = torch.arange(3 * size, 4 * size)
    for rank, source in enumerate(sources):
        write(source, 1, slots, seed=0 if is_row else rank)
    pages = np.full((1, plan.local_pages_per_group), 5)
    shaped = {r: np.full((1, plan.remote_pages_per_group), 3) for r in plan.remote_ranks}
    move_runs(plan, pages, shaped, (local, storage), (remote, sources))
    got = storage.gather(1, slots + 2 * size)
    want = [source.gather(1, slots) for source in sources[: heads // sources[0].num_kv_heads]]
    for part, found in enumerate(got):
        assert torch.equal(found, torch.cat([each[part] for each in want], 1)) and found.any()


def test_engines_with_different_formats_do_not_exchange_pages():
    one = described(layers_of("int4_token_head"), 1, "NHD")
    other = replace(one, kv_format=SPARSE.name)
    with pytest.raises(
        ValueError,
        match=r"local kv_format is .int4_token_head. .* remote kv_format is .test_int4_g",
    ):
        plan_transfer(one, other, 0)


def test_contents_of_pages_name_the_format():
    one, other = (
        storage_of(layers_of(name)).pages.contents for name in ("int8_token_head", "fp8_ds_mla")
    )
    assert "int8_token_head" in str(one) and "fp8_ds_mla" in str(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_format": "fp7"}, "kv_format is 'fp7': expected one of .*int8_token_head"),
        ({"kv_format": "int4_token_head", "head_size": 63}, "head_size is 63: expected a multiple of 2"),
        ({"kv_format": "nvfp4", "head_size": 72}, "head_size is 72: expected a multiple of 16 for"),
        ({"kv_format": "fp8_indexer"}, "head_size is 64: expected a multiple of 128 for format"),
        ({"kv_format": "fp8_ds_mla"}, "kv_format is 'fp8_ds_mla': expected is_mla"),
        ({"dtype": "float16"}, "dtype is 'float16': expected 'int8', from kv_format 'int8_token_head'"),
        ({"scale_bytes_per_token": 4}, "scale_bytes_per_token is 4: expected 64, from kv_format"),
        (
            {"kind": "recurrent", "num_kv_heads": 0, "head_size": 0, "state_bytes": 64},
            "kv_format is 'int8_token_head': expected None for kind 'recurrent'",
        ),
        (
            {"is_mla": True, "num_kv_heads": 1, "v_head_size": 32},
            "kv_format is 'int8_token_head' with is_mla and v_head_size 32: expected v_head_size 0",
        ),
        ({"num_kv_heads": 1, "head_size": 3, "block_size": 3}, "block_size is 3: expected a multiple"),
        (
            {"kv_format": "fp8_ds_mla", "is_mla": True, "num_kv_heads": 1, "head_size": 128,
             "v_head_size": 3},
            "head_size is 128 and v_head_size 3: expected sizes with which the scales .* are aligned",
        ),
    ],
)  # fmt: skip
def test_layers_that_a_format_cannot_hold_are_rejected(changes, message):
    given = {"kind": "full_attention", "block_size": 16, "num_kv_heads": 8, "head_size": 64}
    with pytest.raises(ValueError, match=message):
        LayerSpec("a", **{**given, "kv_format": "int8_token_head", **changes})


@pytest.mark.parametrize(("changes", "message"), [
    ({"head_size": 32}, r"key_cache is torch.int8\[9, 16, 4, 64\]: expected .*, 32\]"),
    ({"v_head_size": 0}, r"value_cache is torch.int8\[9, 16, 4, 32\]: expected .*, 0\]"),
    ({"scale_cache": None}, "scale_cache is None: expected a Tensor"),
])  # fmt: skip
def test_caches_of_other_sizes_are_rejected(changes, message):
    given = {
        "key_cache": torch.zeros(9, 16, 4, 64).char(),
        "value_cache": torch.zeros(9, 16, 4, 32).char(),
        "scale_cache": torch.zeros(9, 16, 32).byte(),
        "head_size": 64,
        "v_head_size": 32,
        "dtype": torch.bfloat16,
    }
    known = format_named("int8_token_head")
    assert known.parts(**given).v_scale.shape == (9, 16, 4, 1)
    with pytest.raises((TypeError, ValueError), match=message):
        known.parts(**given | changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_hold_their_rotary_part_in_bfloat16(dtype):
    storage = storage_of(layers_of("fp8_ds_mla"))
    key, value = (each.to(dtype) for each in tokens_of(storage))
    message = f"dtype of tokens is {dtype}: expected bfloat16"
    with pytest.raises(ValueError, match=message):
        storage.write(0, key, value, torch.arange(64, 69))
    with pytest.raises(ValueError, match=message):
        storage.gather(0, torch.arange(64, 69), dtype)


def test_rows_of_deepseek_have_656_bytes_and_groups_of_nvfp4_nine():
    sizes = format_named("nvfp4").stored(num_kv_heads=8, head_size=128, v_head_size=64)
    assert sizes == ("uint8", 64, 32, 8 * (8 + 4))
    layer = LayerSpec(
        "a", "full_attention", 16, num_kv_heads=1, head_size=16, v_head_size=16, kv_format="nvfp4"
    )
    assert layer.bytes_per_token == 2 * 9
    sizes = {"num_kv_heads": 1, "head_size": 512, "v_head_size": 64, "is_mla": True}
    layer = LayerSpec("a", "full_attention", 16, **sizes, kv_format="fp8_ds_mla")
    assert layer.bytes_per_token == 656 and layer.dtype == "uint8"


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 1)])
def test_devices_below_the_least_capability_are_refused(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda:0")
    format_named("int4_token_head").check_device(device)
    format_named("nvfp4").check_device(torch.device("cpu"))
    if capability >= (10, 0):
        return format_named("nvfp4").check_device(device)
    pages = Pages.allocate(4, [[16 * 4 * 72]])
    monkeypatch.setattr(Pages, "device", property(lambda self: device))
    message = (
        f"device is cuda:0, with compute capability {capability[0]}.{capability[1]}: expected 10"
    )
    with pytest.raises(ValueError, match=message):
        KVStorage.over(pages, 16, num_kv_heads=4, head_size=64, kv_format="nvfp4")
    assert pages.num_storages == 0


@pytest.mark.gpu
def test_nvfp4_on_this_device():
    plan = plan_cache(layers_of("nvfp4"), 2**20, max_model_len=64)
    if torch.cuda.get_device_capability() < (10, 0):
        with pytest.raises(ValueError, match=r"device is cuda.*, with compute capability"):
            KVStorage.for_plan(plan, device="cuda")
    else:
        assert KVStorage.for_plan(plan, device="cuda")[0].num_layers == 2


def test_storages_reject_what_their_format_defines():
    sizes = {"num_blocks": 4, "block_size": 16, "num_kv_heads": 4, "head_size": 64}
    storage = KVStorage(**sizes, kv_format="fp8_e4m3_token_head")
    with pytest.raises(ValueError, match="has format 'fp8_e4m3_token_head': expected none"):
        storage.set_scales(torch.ones(1, 1), torch.ones(1, 1))
    for changes, message in (
        ({"scale_bytes_per_token": 4}, "scale_bytes_per_token is 4: expected 0 with kv_format"),
        ({"dtype": "float32"}, r"dtype is torch\.float32: expected int8, from kv_format"),
        (
            {"block_size": 1, "num_kv_heads": 1, "head_size": 81},
            "block_size is 1: expected a multiple",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            KVStorage(**sizes | changes, kv_format="int8_token_head")
    pages = Pages.over([torch.zeros(4, 16 * 4 * (64 + 64 + 8) + 2, dtype=torch.uint8)])
    with pytest.raises(ValueError, match="expected a multiple of 4, and 8704 or more"):
        KVStorage.over(pages, 16, 4, 64, kv_format="int8_token_head")


def test_int8_with_given_scales():
    storage = KVStorage(4, 16, num_kv_heads=2, head_size=8, dtype="int8")
    storage.set_scales(torch.tensor([[0.5]]), torch.tensor([[0.25]]))
    key, value = torch.full((2, 1, 2, 8), 3.2).bfloat16()
    storage.write(0, key, value, torch.tensor([16]))
    found = storage.gather(0, torch.tensor([16]), "float32")
    assert [part.unique().tolist() for part in found] == [[3.0], [3.25]]


@pytest.mark.parametrize(("arguments", "message"), [
    (("", "int8"), "name is ''"),
    (("a", "bfloat16"), "dtype is 'bfloat16': expected one of float8_e4m3fn"),
    (("a", "uint8", 1), "scale_rule is 1: expected"),
    (("a", "uint8", 0, 3), "group_size is 3: expected a multiple of 2"),
    (("a", "int8", 0, 16, False, "float8_e4m3fn"),
     "scale_dtype is 'float8_e4m3fn': expected 'float32'"),
    (("a", "uint8", 0, 16, False, "float16"), "scale_dtype is 'float16': expected 'float32' or"),
    (("int8_token_head", "int8", TILE),
     "described has name .int8_token_head., which is already registered"),
])  # fmt: skip
def test_invalid_formats_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        register_format(KVFormat(*arguments))
