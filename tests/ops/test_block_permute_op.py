# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.machinery.backends import each_backend, each_device_backend
from tests.machinery.shared import sampled
from tests.machinery.switches import ids_from

DTYPES = [torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]
INT32 = torch.int32
VIEWS = ["plain", "layers in a block", "some heads", "half of each row"]


@dataclass(frozen=True)
class Case:
    """Layers that are views of one tensor with random bytes, and a description of the blocks
    received into them.
    """

    dtype: torch.dtype
    local: str  # NHD or HND
    view: str
    num_layers: int
    num_blocks: int
    block_size: int
    heads: int
    head_size: int
    remote_block_size: int
    remote: str
    seed: int = 0

    @property
    def group_size(self):
        return max(1, self.remote_block_size // self.block_size)

    def memory(self):
        heads = self.heads + (2 if self.view == "some heads" else 0)
        size = self.head_size * (2 if self.view == "half of each row" else 1)
        order = (self.block_size, heads) if self.local == "NHD" else (heads, self.block_size)
        shape = (self.num_layers, self.num_blocks, *order, size)
        if self.view == "layers in a block":
            shape = (self.num_blocks, self.num_layers, *order, size)
        numel = torch.Size(shape).numel() * torch.empty(0, dtype=self.dtype).element_size()
        generator = torch.Generator().manual_seed(self.seed)
        raw = torch.randint(0, 256, (numel,), generator=generator).to(torch.uint8)
        return raw, shape

    def layers(self, raw, shape):
        whole = raw.view(self.dtype).view(shape)
        if self.view == "layers in a block":
            whole = whole.transpose(0, 1)
        if self.local == "HND":
            whole = whole.transpose(2, 3)
        if self.view == "some heads":
            whole = whole[:, :, :, 1:-1]
        if self.view == "half of each row":
            whole = whole[..., self.head_size :]
        return list(whole)

    def indices(self):
        generator = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randperm(self.num_blocks, generator=generator).to(INT32)
        n = self.num_blocks // self.group_size
        n -= n > 2  # some blocks are not permuted
        return ids[: n * self.group_size].view(n, self.group_size)


def reference(case, cache, indices):
    """Permute each group of blocks: view its bytes in the remote layout, and write them back in the
    local layout.
    """
    for group in indices.tolist():
        blocks = cache[group]
        rows = blocks.transpose(1, 2) if case.local == "HND" else blocks
        size, heads = case.remote_block_size, case.heads
        if case.remote == "HND":
            received = rows.reshape(-1, heads, size, case.head_size).transpose(1, 2)
        else:
            received = rows.reshape(-1, size, heads, case.head_size)
        cache[group] = received.reshape(blocks.shape)


def offsets_of(layers):
    return torch.tensor([layer.data_ptr() - layers[0].data_ptr() for layer in layers])


def permute(backend, layers, indices, case, where="host"):
    if where == "device":
        indices = indices.to(backend.device)
    with ids_from(where):
        backend.ops.permute_blocks_(
            layers[0], offsets_of(layers), indices, case.remote_block_size, case.remote == "HND",
            layers[1:],
        )  # fmt: skip


def check(backend, case, where):
    raw, shape = case.memory()
    indices = case.indices()
    want = raw.clone()
    for layer in case.layers(want, shape):
        reference(case, layer, indices)
    got = raw.clone().to(backend.device)
    permute(backend, case.layers(got, shape), indices, case, where)
    assert torch.equal(got.cpu(), want)


@st.composite
def cases(draw):
    smaller, ratio = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 3, 4]))
    sizes = [smaller, smaller * ratio]
    local, remote = draw(st.permutations(sizes))
    return Case(
        dtype=draw(st.sampled_from(DTYPES)),
        local=draw(st.sampled_from(["NHD", "HND"])),
        view=draw(st.sampled_from(VIEWS)),
        num_layers=draw(st.integers(1, 3)),
        num_blocks=draw(st.integers(1, 13)),
        block_size=local,
        heads=draw(st.integers(1, 5)),
        head_size=draw(st.sampled_from([1, 2, 3, 5, 8, 16, 20, 64])),
        remote_block_size=remote,
        remote=draw(st.sampled_from(["NHD", "HND"])),
        seed=draw(st.integers(0, 2**31)),
    )


@each_backend
@given(case=cases(), where=st.sampled_from(["host", "device"]))
@example(Case(torch.bfloat16, "NHD", "half of each row", 2, 7, 4, 3, 8, 8, "HND"), "host")
@example(Case(torch.bfloat16, "HND", "some heads", 2, 7, 4, 3, 8, 2, "NHD"), "host")
def test_listed_blocks_match_reference_and_others_are_unchanged(backend, case, where):
    check(backend, case, where)


# Each case has (block size, heads, head size, remote block size), the local layout and the remote
# layout, and uses bf16. It is named after the kernel path that it covers. The kernel processes rows
# in slices of 128 bytes if a block's slices fit into 64 KiB of shared memory or into the shared
# memory of a thread block cluster. Without clusters, it uses slices of 64 bytes if these fit into
# 96 KiB.
SHAPES = {
    "one slice of shared memory": ((16, 8, 128, 16), "NHD", "HND"),
    "several slices": ((32, 8, 136, 32), "HND", "NHD"),
    "slices of a line": ((64, 8, 128, 64), "NHD", "HND"),
    "a cluster of two": ((128, 8, 128, 128), "NHD", "HND"),
    "a cluster of two, each with half a block": ((128, 8, 128, 128), "HND", "NHD"),
    "a cluster of two, rows of several blocks": ((16, 8, 128, 128), "NHD", "HND"),
    "a cluster of two, the second with fewer rows": ((131, 7, 72, 131), "NHD", "HND"),
    "a cluster of four, the last with fewer rows": ((223, 9, 64, 223), "HND", "NHD"),
    "a cluster of eight": ((256, 16, 64, 256), "NHD", "HND"),
    "rows below a line in a cluster": ((256, 8, 48, 256), "NHD", "HND"),
    "the last slice is narrow": ((64, 4, 100, 64), "NHD", "HND"),
    "shared memory that must be asked for": ((128, 8, 32, 128), "NHD", "HND"),
    "slices below a cache line": ((256, 8, 32, 256), "HND", "NHD"),
    "one vector of each row per slice": ((1024, 8, 16, 1024), "NHD", "HND"),
    "one element of each row per slice": ((1000, 17, 33, 1000), "HND", "NHD"),
    "runs of many rows": ((64, 8, 128, 16), "HND", "HND"),
    "a remote block of many": ((16, 4, 64, 128), "HND", "HND"),
    "too many rows for shared memory and scratch": ((1024, 16, 40, 1024), "NHD", "HND"),
    "too many rows, long cycles": ((1000, 17, 40, 1000), "HND", "NHD"),
    "too many rows, in several blocks": ((256, 18, 40, 1024), "NHD", "HND"),
}


@each_backend
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_of_every_size_are_permuted(backend, name, where):
    check_shape(backend, name, where)


@each_device_backend
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_of_every_size_are_permuted_without_clusters(backend, name, monkeypatch):
    """Devices older than sm_90 do not support clusters."""
    monkeypatch.setenv("KVCACHE_CLUSTERS", "0")
    check_shape(backend, name, "host")


def check_shape(backend, name, where):
    (block_size, heads, head_size, remote_size), local, remote = SHAPES[name]
    num_blocks = 2 * max(1, remote_size // block_size) + 1
    check(
        backend,
        Case(
            torch.bfloat16, local, "plain", 1, num_blocks, block_size, heads, head_size,
            remote_size, remote,
        ),
        where,
    )  # fmt: skip


@pytest.mark.slow
@each_backend
@pytest.mark.parametrize(
    ("remote_block_size", "num_blocks"), sampled([(6, 900), (6, 1900), (1, 1900), (2, 1900)])
)
def test_permutations_exceeding_one_launch_are_split(backend, remote_block_size, num_blocks):
    case = Case(torch.int8, "NHD", "plain", 66, num_blocks, 2, 2, 1, remote_block_size, "HND")
    check(backend, case, "host")


@each_backend
@pytest.mark.parametrize(
    "shape", [(0, 4, 2, 8), (3, 4, 0, 8), (3, 4, 2, 0), (3, 4, 1, 8), (3, 1, 2, 8)]
)
def test_permutation_without_rows_to_move_changes_nothing(backend, shape):
    cache = torch.ones(shape, device=backend.device)
    for ids in (torch.empty(0, 1, dtype=INT32), torch.zeros(min(shape[0], 1), 1, dtype=INT32)):
        backend.ops.permute_blocks_(cache, torch.tensor([0]), ids, 1, True)
    assert (cache == 1).all()


def arguments(backend, **changes):
    cache = torch.arange(3 * 4 * 2 * 8.0, device=backend.device).view(3, 4, 2, 8)
    call = {
        "cache": cache,
        "offsets": torch.tensor([0]),
        "indices": torch.tensor([[2], [0]], dtype=INT32),
        "remote_block_size": 2,
        "remote_is_hnd": True,
    }
    return {**call, **{name: change(call[name]) for name, change in changes.items()}}


BAD = {
    r"cache has shape \[3, 4, 16\]: expected \[num_blocks": {"cache": lambda t: t.flatten(2)},
    "cache has stride 2 in its last dimension": {"cache": lambda t: t[..., ::2]},
    r"cache has elements that share memory \(stride 0\)":
        {"cache": lambda t: t[:1].expand(3, 4, 2, 8)},
    r"cache has shape \[3, 0, 2, 8\]: expected tokens in a block": {"cache": lambda t: t[:, :0]},
    "offsets has dtype Int": {"offsets": lambda t: t.int()},
    r"offsets has shape \[1, 1\]: expected \[num_layers\]": {"offsets": lambda t: t[None]},
    "offsets is not contiguous": {"offsets": lambda t: torch.arange(4)[::2]},
    "offsets has layers at 0 and 0: expected layers that share no":
        {"offsets": lambda t: torch.tensor([0, 0])},
    "offsets has layers at 64 and 80": {"offsets": lambda t: torch.tensor([80, 0, 64])},
    "offsets has 17179869184: expected a layer in the memory of cache or of one of owners":
        {"offsets": lambda t: torch.tensor([2**34])},
    "offsets has -4: expected a layer in the memory": {"offsets": lambda t: t - 4},
    "offsets has 4: expected a layer in the memory": {"offsets": lambda t: t + 4},
    "indices has dtype Long: expected Int": {"indices": lambda t: t.long()},
    r"indices has shape \[2\]: expected \[n, local blocks": {"indices": lambda t: t[:, 0]},
    r"indices has shape \[1, 2\]: expected size 1 in dimension 1":
        {"indices": lambda t: t.view(1, 2)},
    "indices is not contiguous": {"indices": lambda t: torch.zeros(2, 2, dtype=INT32)[:, :1]},
    "indices, entry 1, is 3: expected 0 to 2":
        {"indices": lambda t: t * 0 + torch.tensor([[0], [3]], dtype=INT32)},
    "indices, entry 0, is -1: expected 0 to 2": {"indices": lambda t: t * 0 - 1},
    "indices, entry 1, is 2 again: expected each block once": {"indices": lambda t: t * 0 + 2},
    "remote_block_size is 3: expected a divisor or a multiple of the block size 4":
        {"remote_block_size": lambda n: 3},
    "remote_block_size is 6: expected a divisor or a multiple of the block size 4":
        {"remote_block_size": lambda n: 6},
    "remote_block_size is 0": {"remote_block_size": lambda n: 0},
    "remote_block_size is -4": {"remote_block_size": lambda n: -4},
    "expected less than 2 GiB in a block": {"remote_block_size": lambda n: 1 << 40},
}  # fmt: skip


def refused(backend, call, message):
    before = call["cache"].clone()
    with pytest.raises(RuntimeError, match=message):
        backend.ops.permute_blocks_(**call)
    assert torch.equal(call["cache"], before)


@each_backend
@pytest.mark.parametrize("message", BAD)
def test_invalid_argument_writes_nothing(backend, message):
    refused(backend, arguments(backend, **BAD[message]), message)


@each_backend
def test_layer_outside_its_owner_is_rejected(backend):
    call = arguments(backend)
    other = torch.zeros_like(call["cache"])
    call["offsets"] = torch.tensor([other.data_ptr() - call["cache"].data_ptr()])
    refused(backend, call, "offsets has -?[0-9]+: expected a layer in the memory of cache")
    call["owners"] = [other[1:]]  # the owner's whole memory is considered
    backend.ops.permute_blocks_(**call)
    call["offsets"] += 4
    refused(backend, call, "offsets has -?[0-9]+: expected a layer in the memory of cache")


@each_device_backend
@pytest.mark.parametrize(("ids", "message"), [
    ([0, 3], "indices, entry 1, is 3: expected 0 to 2"),
    ([-5, 0], "indices, entry 0, is -5: expected 0 to 2"),
    ([0, 1, 0], "indices, entry 2, is 0 again: expected each block once"),
])  # fmt: skip
def test_checked_mode_validates_device_ids(backend, ids, message, monkeypatch):
    monkeypatch.setenv("KVCACHE_CHECKED", "1")
    call = arguments(backend)
    call["indices"] = backend.tensor(ids, dtype=INT32)[:, None]
    with ids_from("device"):
        refused(backend, call, message)


@each_device_backend
@pytest.mark.parametrize("bad", [-1, 7, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("case", [
    Case(torch.float32, "HND", "plain", 1, 7, 2, 3, 5, 4, "HND"),
    # The blocks have too many rows for shared memory.
    Case(torch.float32, "NHD", "plain", 1, 7, 256, 30, 4, 512, "HND"),
], ids=["few rows", "many rows"])  # fmt: skip
def test_unchecked_group_with_invalid_id_is_skipped(backend, bad, case, monkeypatch):
    monkeypatch.delenv("KVCACHE_CHECKED", raising=False)
    raw, shape = case.memory()
    want = raw.clone()
    reference(case, case.layers(want, shape)[0], torch.tensor([[5, 1]]))
    got = raw.clone().to(backend.device)
    ids = torch.tensor([[0, bad], [5, 1], [bad, 2]], dtype=INT32)
    permute(backend, case.layers(got, shape), ids, case, "device")
    assert torch.equal(got.cpu(), want)


@each_device_backend
def test_too_many_host_ids_per_group_are_rejected(backend):
    cache = torch.zeros(1000, 1, 2, 4, device=backend.device)
    ids = torch.arange(1000, dtype=INT32)[None]
    with pytest.raises(RuntimeError, match="remote_block_size is 1000, 1000 local blocks"):
        backend.ops.permute_blocks_(cache, torch.tensor([0]), ids, 1000, True)


@pytest.mark.gpu
def test_device_indices_for_cpu_cache_are_rejected():
    from tests.machinery.backends import Backend

    call = arguments(Backend("cpu", "cpu"))
    call["indices"] = call["indices"].cuda()
    with pytest.raises(RuntimeError, match="indices is on cuda:0: expected cpu"):
        torch.ops.kvcache.permute_blocks_(**call)


@pytest.mark.gpu
def test_captured_graph_keeps_its_host_ids():
    case = Case(torch.bfloat16, "HND", "plain", 2, 64, 16, 4, 64, 8, "HND")
    raw, shape = case.memory()
    got, indices = raw.clone().cuda(), case.indices()
    layers = case.layers(got, shape)
    offsets = offsets_of(layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.kvcache.permute_blocks_(layers[0], offsets, indices, 8, True)
    want = raw.clone()
    for layer in case.layers(want, shape):
        reference(case, layer, indices)
    indices.zero_()
    graph.replay()
    assert torch.equal(got.cpu(), want)
