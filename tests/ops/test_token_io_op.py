# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.machinery.backends import each_backend, each_device_backend

DTYPES = [
    torch.int8,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
]
LAYOUTS = ["NHD", "HND"]


def random_tensor(shape, dtype, generator):
    """Return a tensor of random bytes, so that all bit patterns may occur, including NaN."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator)
    return raw.to(torch.uint8).view(dtype) if shape[-1] else torch.empty(shape, dtype=dtype)


def bits(tensor):
    return tensor.cpu().contiguous().flatten().view(torch.uint8)


def make_cache(shape, dtype, layout, generator):
    """Make a cache [..., num_blocks, block_size, heads, head_size] in which each block contains all
    layers.
    """
    *layers, num_blocks, block_size, heads, head_size = shape
    order = (block_size, heads) if layout == "NHD" else (heads, block_size)
    cache = random_tensor((num_blocks, *layers, *order, head_size), dtype, generator)
    cache = cache if layout == "NHD" else cache.transpose(-3, -2)
    return cache.transpose(0, 1) if layers else cache


def to_device(tensor, device):
    """Move a tensor and keep its strides, which `.to` does only for dense tensors."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)


def reference_write(tokens, cache, slots):
    cache = cache.clone()
    block_size = cache.shape[-3]
    for i, slot in enumerate(slots.tolist()):
        if slot >= block_size:  # neither -1 nor a slot of the null block
            cache[..., slot // block_size, slot % block_size, :, :] = tokens[..., i, :, :]
    return cache


def reference_gather(cache, slots):
    block_size = cache.shape[-3]
    tokens = cache.new_zeros((*cache.shape[:-4], len(slots), *cache.shape[-2:]))
    for i, slot in enumerate(slots.tolist()):
        if slot >= block_size:  # neither -1 nor a slot of the null block
            tokens[..., i, :, :] = cache[..., slot // block_size, slot % block_size, :, :]
    return tokens


@st.composite
def cases(draw):
    num_blocks, block_size = draw(st.integers(1, 6)), draw(st.integers(1, 17))
    heads, head_size, v_head_size = (
        draw(st.integers(1, 4)),
        draw(st.sampled_from([1, 2, 3, 5, 8, 16, 20, 64])),
        draw(st.sampled_from([1, 4, 7, 16, 32])),
    )
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS))
    layers = draw(st.sampled_from([(), (), (1,), (3,)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_slots = num_blocks * block_size
    num_tokens = draw(st.integers(0, min(num_slots, 24)))
    slots = torch.randperm(num_slots, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.2] = -1
    if draw(st.booleans()):  # in HND, the heads dimension precedes the tokens dimension
        shapes = [(*layers, heads, num_tokens, size) for size in (head_size, v_head_size)]
        key, value = (random_tensor(s, dtype, generator).transpose(-3, -2) for s in shapes)
        caches = [
            make_cache((*layers, num_blocks, block_size, heads, size), dtype, layout, generator)
            for size in (head_size, v_head_size)
        ]
        return key, value, *caches, slots
    # The tokens are a slice of wider rows, like those of a fused QKV projection.
    wide = heads * (head_size + v_head_size) + draw(st.integers(0, 3))
    rows = random_tensor((*layers, num_tokens, max(wide, 1)), dtype, generator)
    key = rows[..., : heads * head_size].unflatten(-1, (heads, head_size))
    value = rows[..., heads * head_size : heads * (head_size + v_head_size)]
    value = value.unflatten(-1, (heads, v_head_size))
    caches = [
        make_cache((*layers, num_blocks, block_size, heads, size), dtype, layout, generator)
        for size in (head_size, v_head_size)
    ]
    return key, value, *caches, slots


@each_backend
@given(case=cases())
def test_writes_change_only_their_slots_and_gather_reads_them(backend, case):
    key, value, key_cache, value_cache, slots = (to_device(t, backend.device) for t in case)
    backend.ops.write_kv(key, value, key_cache, value_cache, slots)
    written = [reference_write(*each, case[4]) for each in zip(case[:2], case[2:4])]
    assert torch.equal(bits(key_cache), bits(written[0]))
    assert torch.equal(bits(value_cache), bits(written[1]))
    slots = torch.roll(case[4], 1)
    backend.ops.gather_kv(key_cache, value_cache, slots.to(backend.device), key, value)
    assert torch.equal(bits(key), bits(reference_gather(written[0], slots)))
    assert torch.equal(bits(value), bits(reference_gather(written[1], slots)))


def arguments(backend, layers=(), **changes):
    def make(*shape, dtype=torch.float32):
        return torch.arange(
            1, 1 + torch.Size(shape).numel(), dtype=dtype, device=backend.device
        ).view(shape)

    call = {
        "key": make(*layers, 3, 2, 4),
        "value": make(*layers, 3, 2, 8),
        "key_cache": make(*layers, 2, 5, 2, 4),
        "value_cache": make(*layers, 2, 5, 2, 8),
        "slot_mapping": backend.tensor([5, -1, 9]),
    }
    return {**call, **{name: change(make) for name, change in changes.items()}}


BAD = {
    "key has dtype Double: expected Float as key_cache has":
        {"key": lambda make: make(3, 2, 4, dtype=torch.float64)},
    "value has dtype Half": {"value": lambda make: make(3, 2, 8, dtype=torch.float16)},
    "slot_mapping has dtype Int": {"slot_mapping": lambda make: make(3, dtype=torch.int32)},
    r"key has shape \[3, 8\]: expected \[num_tokens, num_kv_heads, head_size\]":
        {"key": lambda make: make(3, 8)},
    r"key has shape \[3, 4, 4\]: expected size 2 in dimension 1":
        {"key": lambda make: make(3, 4, 4)},
    r"value has shape \[3, 2, 4\]: expected size 8 in dimension 2":
        {"value": lambda make: make(3, 2, 4)},
    r"value has shape \[2, 2, 8\]: expected size 3": {"value": lambda make: make(2, 2, 8)},
    r"key_cache has shape \[2, 5, 8\]": {"key_cache": lambda make: make(2, 5, 8)},
    r"value_cache has shape \[3, 5, 2, 8\]: expected size 2":
        {"value_cache": lambda make: make(3, 5, 2, 8)},
    r"value_cache has shape \[2, 6, 2, 8\]: expected size 5":
        {"value_cache": lambda make: make(2, 6, 2, 8)},
    "key_cache has stride 2 in its last dimension":
        {"key_cache": lambda make: make(2, 5, 2, 8)[..., ::2]},
    "key has stride 2 in its last dimension: expected 1":
        {"key": lambda make: make(3, 4, 2).transpose(1, 2)},
    "slot_mapping is not contiguous":
        {"slot_mapping": lambda make: make(6, dtype=torch.int64)[::2]},
    r"key_cache has shape \[1, 1, 2, 5, 2, 4\]: expected .*, or with num_layers in front":
        {"key_cache": lambda make: make(1, 1, 2, 5, 2, 4)},
    r"key has shape \[3, 2, 4\]: expected \[num_layers, num_tokens, num_kv_heads, head_size\]":
        {"key_cache": lambda make: make(1, 2, 5, 2, 4)},
    r"key has shape \[2, 3, 2, 4\]: expected size 3 in dimension 0, the layers of the cache":
        {"key": lambda make: make(2, 3, 2, 4), "key_cache": lambda make: make(3, 2, 5, 2, 4)},
    r"value_cache has shape \[2, 5, 2, 8\]: expected as many dimensions as key_cache":
        {"key": lambda make: make(1, 3, 2, 4), "key_cache": lambda make: make(1, 2, 5, 2, 4)},
    r"value_cache has shape \[2, 2, 5, 2, 8\]: expected size 1 .* the layers of key_cache":
        {"key": lambda make: make(1, 3, 2, 4), "key_cache": lambda make: make(1, 2, 5, 2, 4),
        "value": lambda make: make(2, 3, 2, 8), "value_cache": lambda make: make(2, 2, 5, 2, 8)},
    r"slot_mapping has shape \[2\]: expected size 3":
        {"slot_mapping": lambda make: make(2, dtype=torch.int64)},
}  # fmt: skip


@each_backend
@pytest.mark.parametrize("op", ["write_kv", "gather_kv"])
@pytest.mark.parametrize("message", BAD)
def test_invalid_argument_writes_nothing(backend, op, message):
    call = arguments(backend, **BAD[message])
    before = {name: tensor.clone() for name, tensor in call.items()}
    with pytest.raises(RuntimeError, match=message):
        getattr(backend.ops, op)(**call)
    assert all(torch.equal(call[name], before[name]) for name in call)


@each_backend
def test_slot_count_beyond_31_bits_is_rejected(backend):
    call = arguments(backend)
    for name in ("key_cache", "value_cache"):  # a single block, expanded 2^29 times
        call[name] = call[name][:1].expand(2**29, -1, -1, -1)
    with pytest.raises(
        RuntimeError, match=r"key_cache has shape .*: expected fewer than 2\^31 slots"
    ):
        backend.ops.gather_kv(
            call["key_cache"], call["value_cache"], call["slot_mapping"], call["key"], call["value"]
        )


@each_backend
@pytest.mark.parametrize("op", ["write_kv", "gather_kv"])
@pytest.mark.parametrize("slot", [10, -2, 2**62])
def test_slot_out_of_range_writes_nothing(backend, op, slot, monkeypatch):
    monkeypatch.setenv("KVCACHE_CHECKED", "1")
    call = arguments(backend, slot_mapping=lambda make: backend.tensor([0, slot, 3]))
    before = {name: tensor.clone() for name, tensor in call.items()}
    with pytest.raises(RuntimeError, match=rf"slot_mapping\[1\] is {slot}: expected -1 .* to 9"):
        getattr(backend.ops, op)(**call)
    assert all(torch.equal(call[name], before[name]) for name in call)


@each_device_backend
@pytest.mark.parametrize("op", ["write_kv", "gather_kv"])
def test_unchecked_slot_out_of_range_is_skipped(backend, op, monkeypatch):
    monkeypatch.delenv("KVCACHE_CHECKED", raising=False)
    call = arguments(backend, slot_mapping=lambda make: backend.tensor([10, -7, 2**62]))
    before = {name: tensor.clone() for name, tensor in call.items()}
    getattr(backend.ops, op)(**call)
    assert all(torch.equal(call[name], before[name]) for name in call)


@each_backend
@pytest.mark.parametrize(
    ("op", "name"), [("write_kv", "key_cache"), ("write_kv", "value_cache"), ("gather_kv", "key")]
)
def test_self_overlapping_output_is_rejected(backend, op, name):
    call = arguments(backend)
    call[name] = call[name][:1].expand_as(call[name])
    with pytest.raises(RuntimeError, match=f"{name} has elements that share memory"):
        getattr(backend.ops, op)(**call)


@pytest.mark.parametrize(("key_at", "value_at"), [(0, 63), (64, 1), (64, 127), (65, 2)])
def test_caches_sharing_a_byte_are_rejected(key_at, value_at):
    """Elements are at odd addresses, so the last byte of one cache may be the first byte of the other."""
    memory = bytearray(256)
    caches = [
        torch.frombuffer(memory, dtype=torch.float16, count=32, offset=at).view(4, 2, 1, 4)
        for at in (key_at, value_at)
    ]
    tokens = torch.ones(1, 1, 4, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="value_cache shares memory with key_cache: expected"):
        torch.ops.kvcache.write_kv(tokens, tokens, *caches, torch.tensor([0]))
    assert not any(memory)


@each_backend
def test_tokens_sharing_an_element_are_rejected(backend):
    call = arguments(backend)
    wide = torch.zeros(3, 2, 10, device=backend.device).flatten(1)
    call["key"] = wide[:, :8].unflatten(1, (2, 4))
    call["value"] = wide[:, 4:20].unflatten(1, (2, 8))
    with pytest.raises(RuntimeError, match="value shares memory with key: expected separate"):
        backend.ops.gather_kv(**call)


@st.composite
def views_of_one_tensor(draw):
    """Draw two caches as (shape, strides, offset). Elements within each cache do not overlap."""
    num_blocks, block_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    views = []
    for _ in "kv":
        shape = (num_blocks, block_size, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        strides, extent = [0, 0, 0, 1], shape[3]
        for dim in draw(st.permutations(range(3))):
            strides[dim] = extent + draw(st.integers(0, 3))
            extent = strides[dim] * shape[dim]
        views.append((shape, strides, draw(st.integers(0, 20))))
    return views


@each_backend
@given(views=views_of_one_tensor())
def test_cache_overlap_test_is_exact(backend, views):
    addresses = torch.arange(4096)
    used = [set(addresses.as_strided(*view).flatten().tolist()) for view in views]
    whole = torch.zeros(4096, device=backend.device)
    caches = [whole.as_strided(*view) for view in views]
    tokens = [cache.new_ones(0, *cache.shape[2:]) for cache in caches]
    slots = backend.tensor([], dtype=torch.int64)
    if used[0] & used[1]:
        with pytest.raises(RuntimeError, match="value_cache shares memory with key_cache"):
            backend.ops.write_kv(*tokens, *caches, slots)
        backend.ops.gather_kv(*caches, slots, *tokens)  # reading overlapping caches is harmless
    else:
        backend.ops.write_kv(*tokens, *caches, slots)


def mla_caches(dtype, latent, rope, device):
    """Return a cache [3, 4, latent + rope] and its two parts, to be passed as key_cache and
    value_cache.
    """
    cache = torch.zeros(3, 4, latent + rope, dtype=torch.float32, device=device).to(dtype)
    return cache, cache[:, :, None, :latent], cache[:, :, None, latent:]


@each_backend
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (20, 4), (5, 3), (576, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_parts_of_an_mla_latent_may_be_columns_of_one_cache(backend, latent, rope, dtype):
    cache, *parts = mla_caches(dtype, latent, rope, backend.device)
    numbers = torch.randint(-8, 9, (5, 1, latent + rope), device=backend.device).bfloat16()
    tokens = [numbers[..., :latent].contiguous(), numbers[..., latent:].contiguous()]
    scales = [] if dtype == torch.bfloat16 else [backend.tensor([2.0])] * 2
    slots = backend.tensor([7, 4, -1, 11, 6])
    backend.ops.write_kv(*tokens, *parts, slots, *scales)
    held = cache.flatten(0, 1).float() * (2.0 if scales else 1.0)
    wanted = torch.zeros_like(held)
    wanted[slots[slots >= 0]] = numbers[slots >= 0, 0].float()
    assert torch.equal(held, wanted)
    back = [torch.ones_like(part) for part in tokens]
    backend.ops.gather_kv(*parts, slots, *back, *scales)
    tokens[0][2], tokens[1][2] = 0, 0
    assert torch.equal(back[0], tokens[0]) and torch.equal(back[1], tokens[1])


@each_backend
def test_k_and_v_may_have_different_head_counts(backend):
    call = arguments(
        backend, key=lambda make: make(3, 0, 4), key_cache=lambda make: make(2, 5, 0, 4)
    )
    before = call["value_cache"].clone()
    backend.ops.write_kv(**call)
    assert torch.equal(
        call["value_cache"], reference_write(call["value"], before, call["slot_mapping"])
    )


@each_backend
def test_dimension_of_size_one_may_have_any_stride(backend):
    call = arguments(backend)
    call["key"] = call["key"][:, :1].transpose(0, 1).contiguous().transpose(0, 1)
    call["value"] = call["value"][:, :1].contiguous()
    call["key_cache"] = call["key_cache"][:, :, :1]
    call["value_cache"] = call["value_cache"][:, :, :1]
    backend.ops.write_kv(**call)
    assert torch.equal(call["key_cache"][1, 0], call["key"][0])


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["write_kv", "gather_kv"])
def test_tensors_on_two_devices_are_rejected(op):
    from tests.machinery.backends import Backend

    call = arguments(Backend("cuda", "cuda"))
    call["key_cache"] = call["key_cache"].cpu()
    message = {
        "write_kv": "key is on cuda:0: expected cpu, where key_cache is",
        "gather_kv": "key_cache is host memory that is not pinned: expected one range of pinned",
    }
    with pytest.raises(RuntimeError, match=message[op]):
        getattr(torch.ops.kvcache, op)(**call)


def mla_arguments(backend):
    _, key_cache, value_cache = mla_caches(torch.float32, 5, 3, backend.device)
    call = arguments(backend)
    call["key"] = call["key"].flatten()[:15].view(3, 1, 5)
    call["value"] = call["value"].flatten()[:9].view(3, 1, 3)
    return {**call, "key_cache": key_cache, "value_cache": value_cache}


def fp8_arguments(backend, layers=()):
    call = arguments(backend, layers)
    scale = torch.ones(*layers, 2, device=backend.device)
    call["key_cache"] = call["key_cache"].to(torch.float8_e4m3fn)
    call["value_cache"] = call["value_cache"].to(torch.float8_e4m3fn)
    return {**call, "k_scale": scale, "v_scale": scale.clone()}


def group_arguments(backend, layers=()):
    """Return arguments with a cache of int8 whose scales are in the cache."""
    call = arguments(backend, layers)
    for name in ("key_cache", "value_cache"):
        call[name] = call[name].to(torch.int8)
    scales = (torch.ones(*layers, 2, 5, 2, 2, device=backend.device) for _ in "kv")
    return {**call, **dict(zip(("k_scale", "v_scale"), scales))}


FORMS = {
    "scales in the cache": group_arguments,
    "scales in the cache, all layers": lambda backend: group_arguments(backend, (3,)),
    "one layer": arguments,
    "all layers": lambda backend: arguments(backend, (3,)),
    "fp8": fp8_arguments,
    "fp8, all layers": lambda backend: fp8_arguments(backend, (3,)),
    "parts of one cache": mla_arguments,
}


@each_backend
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("op", "outputs"), [("write_kv", {"key_cache", "value_cache"}), ("gather_kv", {"key", "value"})]
)
def test_inputs_are_unchanged(backend, op, outputs, form):
    call = FORMS[form](backend)
    before = {name: bits(tensor).clone() for name, tensor in call.items()}
    getattr(backend.ops, op)(**call)
    changed = {name for name in call if not torch.equal(bits(call[name]), before[name])}
    if op == "write_kv" and "scales in the cache" in form:
        outputs = outputs | {"k_scale", "v_scale"}
    assert changed == outputs
