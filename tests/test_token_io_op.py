import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.backends import each_backend, each_device_backend, each_real_backend
from tests.emulation import ASAN

DTYPES = [
    torch.int8,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
]


def random_tensor(shape, dtype, generator):
    """Random bytes, so that every bit pattern moves (also NaN, and fp8)."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator)
    return raw.to(torch.uint8).view(dtype) if shape[-1] else torch.empty(shape, dtype=dtype)


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.uint8)


def make_cache(num_blocks, block_size, heads, head_size, dtype, layout, generator):
    order = (block_size, heads) if layout == "NHD" else (heads, block_size)
    cache = random_tensor((num_blocks, *order, head_size), dtype, generator)
    return cache if layout == "NHD" else cache.transpose(1, 2)


def to_device(tensor, device):
    """Keeps strides, which `.to` would for dense tensors only."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)


def reference_write(tokens, cache, slots):
    cache = cache.clone()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = tokens[i]
    return cache


@st.composite
def cases(draw):
    num_blocks, block_size = draw(st.integers(1, 6)), draw(st.integers(1, 17))
    heads, head_size, v_head_size = (
        draw(st.integers(1, 4)),
        draw(st.sampled_from([1, 2, 3, 5, 8, 16, 20, 64])),
        draw(st.sampled_from([1, 4, 7, 16, 32])),
    )
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(["NHD", "HND"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_slots = num_blocks * block_size
    num_tokens = draw(st.integers(0, min(num_slots, 24)))
    slots = torch.randperm(num_slots, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.2] = -1
    # Tokens as a slice of a wider row, as a fused QKV projection gives them.
    wide = heads * (head_size + v_head_size) + draw(st.integers(0, 3))
    rows = random_tensor((num_tokens, max(wide, 1)), dtype, generator)
    key = rows[:, : heads * head_size].unflatten(1, (heads, head_size))
    value = rows[:, heads * head_size : heads * (head_size + v_head_size)]
    value = value.unflatten(1, (heads, v_head_size))
    caches = [
        make_cache(num_blocks, block_size, heads, size, dtype, layout, generator)
        for size in (head_size, v_head_size)
    ]
    return key, value, *caches, slots


@each_backend
@given(case=cases())
def test_writes_land_at_their_slots_and_nowhere_else(backend, case):
    key, value, key_cache, value_cache, slots = (to_device(t, backend.device) for t in case)
    backend.ops.write_kv(key, value, key_cache, value_cache, slots)
    key0, value0, key_cache0, value_cache0, slots0 = case
    assert torch.equal(bits(key_cache), bits(reference_write(key0, key_cache0, slots0)))
    assert torch.equal(bits(value_cache), bits(reference_write(value0, value_cache0, slots0)))


@each_backend
@given(case=cases())
def test_gather_reads_the_slots_and_zeroes_where_there_is_none(backend, case):
    key, value, key_cache, value_cache, slots = (to_device(t, backend.device) for t in case)
    backend.ops.gather_kv(key_cache, value_cache, slots, key, value)
    for out, cache in ((key, case[2]), (value, case[3])):
        for i, slot in enumerate(case[4].tolist()):
            want = torch.zeros_like(cache[0, 0])
            if slot >= 0:
                want = cache[slot // cache.shape[1], slot % cache.shape[1]]
            assert torch.equal(bits(out[i]), bits(want))


def arguments(backend, **changes):
    def make(*shape, dtype=torch.float32):
        return torch.arange(
            1, 1 + torch.Size(shape).numel(), dtype=dtype, device=backend.device
        ).view(shape)

    call = {
        "key": make(3, 2, 4),
        "value": make(3, 2, 8),
        "key_cache": make(2, 5, 2, 4),
        "value_cache": make(2, 5, 2, 8),
        "slot_mapping": backend.tensor([0, -1, 9]),
    }
    return {**call, **{name: change(make) for name, change in changes.items()}}


BAD = {
    "key has dtype Double: expected Float as key_cache has": {
        "key": lambda make: make(3, 2, 4, dtype=torch.float64)
    },
    "value has dtype Half": {"value": lambda make: make(3, 2, 8, dtype=torch.float16)},
    "slot_mapping has dtype Int": {"slot_mapping": lambda make: make(3, dtype=torch.int32)},
    r"key has shape \[3, 8\]: expected \[num_tokens, num_kv_heads, head_size\]": {
        "key": lambda make: make(3, 8)
    },
    r"key has shape \[3, 4, 4\]: expected size 2 in dimension 1": {
        "key": lambda make: make(3, 4, 4)
    },
    r"value has shape \[3, 2, 4\]: expected size 8 in dimension 2": {
        "value": lambda make: make(3, 2, 4)
    },
    r"value has shape \[2, 2, 8\]: expected size 3": {"value": lambda make: make(2, 2, 8)},
    r"key_cache has shape \[2, 5, 8\]": {"key_cache": lambda make: make(2, 5, 8)},
    r"value_cache has shape \[3, 5, 2, 8\]: expected size 2": {
        "value_cache": lambda make: make(3, 5, 2, 8)
    },
    r"value_cache has shape \[2, 6, 2, 8\]: expected size 5": {
        "value_cache": lambda make: make(2, 6, 2, 8)
    },
    "key_cache has stride 2 in its last dimension": {
        "key_cache": lambda make: make(2, 5, 2, 8)[..., ::2]
    },
    "key is not contiguous within a token": {"key": lambda make: make(3, 4, 2).transpose(1, 2)},
    "slot_mapping is not contiguous": {
        "slot_mapping": lambda make: make(6, dtype=torch.int64)[::2]
    },
    r"slot_mapping has shape \[2\]: expected size 3": {
        "slot_mapping": lambda make: make(2, dtype=torch.int64)
    },
}


@each_backend
@pytest.mark.parametrize("op", ["write_kv", "gather_kv"])
@pytest.mark.parametrize("message", BAD)
def test_a_wrong_argument_is_named_and_nothing_is_written(backend, op, message):
    call = arguments(backend, **BAD[message])
    before = {name: tensor.clone() for name, tensor in call.items()}
    with pytest.raises(RuntimeError, match=message):
        getattr(backend.ops, op)(**call)
    assert all(torch.equal(call[name], before[name]) for name in call)


@each_backend
@pytest.mark.parametrize("op", ["write_kv", "gather_kv"])
@pytest.mark.parametrize("slot", [10, -2, 2**62])
def test_a_slot_out_of_range_is_named_and_nothing_is_written(backend, op, slot, monkeypatch):
    monkeypatch.setenv("KVCACHE_CHECKED", "1")
    call = arguments(backend, slot_mapping=lambda make: backend.tensor([0, slot, 3]))
    before = {name: tensor.clone() for name, tensor in call.items()}
    with pytest.raises(RuntimeError, match=rf"slot_mapping\[1\] is {slot}: expected -1 .* to 9"):
        getattr(backend.ops, op)(**call)
    assert all(torch.equal(call[name], before[name]) for name in call)


@each_device_backend
@pytest.mark.parametrize("op", ["write_kv", "gather_kv"])
def test_an_unchecked_slot_out_of_range_is_skipped_on_a_device(backend, op, monkeypatch):
    monkeypatch.delenv("KVCACHE_CHECKED", raising=False)
    call = arguments(backend, slot_mapping=lambda make: backend.tensor([10, -7, 2**62]))
    before = {name: tensor.clone() for name, tensor in call.items()}
    getattr(backend.ops, op)(**call)
    assert all(torch.equal(call[name], before[name]) for name in call)


@each_backend
@pytest.mark.parametrize(
    ("op", "name"),
    [("write_kv", "key_cache"), ("write_kv", "value_cache"), ("gather_kv", "key")],
)
def test_an_output_whose_elements_share_memory_is_refused(backend, op, name):
    call = arguments(backend)
    call[name] = call[name][:1].expand_as(call[name])
    with pytest.raises(RuntimeError, match=f"{name} has elements that share memory"):
        getattr(backend.ops, op)(**call)


@each_backend
def test_heads_of_k_and_v_may_differ_in_number(backend):
    call = arguments(
        backend, key=lambda make: make(3, 0, 4), key_cache=lambda make: make(2, 5, 0, 4)
    )
    before = call["value_cache"].clone()
    backend.ops.write_kv(**call)
    assert torch.equal(
        call["value_cache"], reference_write(call["value"], before, call["slot_mapping"])
    )


@each_backend
def test_a_dimension_of_one_may_have_any_stride(backend):
    call = arguments(backend)
    call["key"] = call["key"][:, :1].transpose(0, 1).contiguous().transpose(0, 1)
    call["value"] = call["value"][:, :1].contiguous()
    call["key_cache"] = call["key_cache"][:, :, :1]
    call["value_cache"] = call["value_cache"][:, :, :1]
    backend.ops.write_kv(**call)
    assert torch.equal(call["key_cache"][0, 0], call["key"][0])


@each_real_backend
@pytest.mark.parametrize("name", ["key", "value_cache", "slot_mapping"])
def test_a_meta_tensor_among_real_ones_is_named(backend, name):
    call = arguments(backend)
    call[name] = call[name].to("meta")
    with pytest.raises(RuntimeError, match="expected one device"):
        torch.ops.kvcache.write_kv(**call)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["write_kv", "gather_kv"])
def test_tensors_on_two_devices_are_named(op):
    from tests.backends import Backend

    call = arguments(Backend("cuda", "cuda"))
    call["key_cache"] = call["key_cache"].cpu()
    with pytest.raises(RuntimeError, match="key is on cuda:0: expected cpu, where key_cache is"):
        getattr(torch.ops.kvcache, op)(**call)


@pytest.mark.skipif(ASAN, reason="opcheck is about the op, not the kernel")
@each_real_backend
@pytest.mark.parametrize("op", ["write_kv", "gather_kv"])
def test_opcheck(backend, op):
    call = arguments(backend)
    torch.library.opcheck(getattr(torch.ops.kvcache, op).default, (), call)
