# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.machinery.backends import each_backend, each_device_backend
from tests.machinery.switches import ids_from, parameters


@dataclass
class Side:
    """The source or destination of a copy: memory that contains pages.

    A page's fragment in a region starts at offsets[region] + page * strides[region].
    """

    memory: torch.Tensor  # uint8[n]
    offsets: list[int]
    strides: list[int]
    num_blocks: int

    def fragment(self, memory, region, page, size):
        start = self.offsets[region] + page * self.strides[region]
        return memory[start : start + size]


def make_side(draw, sizes, generator):
    """Draw a side with non-overlapping regions, separate or interleaved, with gaps and in any order."""
    num_blocks = draw(st.integers(1, 9))
    gap = draw(st.sampled_from([0, 0, 1, 16]))
    order = draw(st.permutations(range(len(sizes))))
    offsets, strides, end = [0] * len(sizes), [0] * len(sizes), draw(st.sampled_from([0, 16, 3]))
    if draw(st.booleans()):  # a page's regions are adjacent
        stride = sum(sizes) + gap
        for r in order:
            offsets[r], strides[r] = end, stride
            end += sizes[r]
        end += stride * num_blocks
    else:
        for r in order:
            offsets[r], strides[r] = end, sizes[r] + gap
            end += (sizes[r] + gap) * num_blocks
    raw = torch.randint(1, 256, (max(end, 1),), generator=generator)
    return Side(raw.to(torch.uint8), offsets, strides, num_blocks)


@st.composite
def cases(draw):
    # Some sizes are multiples of the vector width, some are not, and some exceed what a warp copies
    # at a time (4 KiB).
    sizes = draw(st.lists(st.sampled_from([0, 1, 6, 16, 48, 4096, 5008]), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    src = make_side(draw, sizes, generator)
    within = draw(st.booleans())
    dst = src if within else make_side(draw, sizes, generator)
    kind = draw(st.sampled_from(["any", "up", "down"]))
    destinations = draw(st.permutations(range(dst.num_blocks)))
    if kind == "any":
        targets = destinations[: draw(st.integers(0, dst.num_blocks))]
        free = [page for page in range(src.num_blocks) if not within or page not in targets]
        sources = [draw(st.sampled_from([-1, *free])) for _ in targets]
    else:  # a run of consecutive pages, some of which may be cleared
        n = draw(st.integers(0, min(src.num_blocks, dst.num_blocks) // (2 if within else 1)))
        sources = [page if draw(st.integers(0, 5)) else -1 for page in range(n)]
        targets = [page + dst.num_blocks - n for page in range(n)]
        if kind == "down":
            sources, targets = sources[::-1], targets[::-1]
    pairs = torch.tensor([sources, targets], dtype=torch.int32).T.contiguous()
    return sizes, src, dst, within, pairs


def reference(sizes, src, dst, within, pairs):
    """Return the expected content of the destination memory."""
    after = dst.memory.clone()
    for source, target in pairs.tolist():
        for r, size in enumerate(sizes):
            place = dst.fragment(after, r, target, size)
            place[:] = 0 if source < 0 else src.fragment(src.memory, r, source, size)
    return after


def table(sizes, src, dst):
    rows = [src.offsets, src.strides, dst.offsets, dst.strides, sizes]
    return torch.tensor(rows, dtype=torch.int64).T.contiguous()


def run(backend, case, where="host", **options):
    """Run the op. Return the memory of dst and src afterwards."""
    sizes, src, dst, within, pairs = case
    there = dst.memory.to(backend.device, copy=True)
    here = None if within else src.memory.to(backend.device, copy=True)
    with ids_from(where):
        backend.ops.copy_blocks(
            here, there, table(sizes, src, dst), pairs.to(backend.device) if where == "device"
            else pairs, src.num_blocks, dst.num_blocks, **options,
        )  # fmt: skip
    return there.cpu(), src.memory if here is None else here.cpu()


@each_backend
@given(case=cases())
def test_only_destination_pages_change(backend, case):
    found, source = run(backend, case)
    assert torch.equal(found, reference(*case))
    assert torch.equal(source, case[1].memory)


@each_device_backend
@given(
    case=cases(),
    where=st.sampled_from(["host", "device"]),
    num_thread_blocks=st.integers(1, 3),
    small_parameters=st.booleans(),
)
def test_pages_of_device_ids_are_copied_by_few_thread_blocks(
    backend, case, where, num_thread_blocks, small_parameters
):
    with parameters(small_parameters):
        found, _ = run(backend, case, where, num_thread_blocks=num_thread_blocks)
    assert torch.equal(found, reference(*case))


# Bytes per page of each region. The vector width differs between the regions.
MIXED = {
    "a small region among wide ones": [4096, 4, 8192, 4096],
    "each width": [16 * 300, 8 * 300, 4 * 300, 2 * 300, 300],
    "one vector of each width": [1, 2, 4, 8, 16],
    "all of 8 bytes": [8 * 257, 8 * 3],
    "a chunk exactly, and a byte more": [256, 257, 1024, 4096, 4097],
    "regions of as many chunks": [4096 * 2, 4096 + 16, 4096 * 2],
}


@each_backend
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("name", MIXED)
def test_each_region_moves_at_its_own_width(backend, name, where):
    sizes, num_blocks = MIXED[name], 5
    generator = torch.Generator().manual_seed(2)
    offsets, end = [], 0
    for size in sizes:  # each region starts at a multiple of 16 bytes
        offsets.append(end)
        end += -(-size * num_blocks // 16) * 16
    memory = torch.randint(1, 256, (end,), generator=generator).to(torch.uint8)
    src = Side(memory, offsets, sizes, num_blocks)
    dst = Side(memory.flip(0), offsets, sizes, num_blocks)
    case = (sizes, src, dst, False, ids([4, 0], [-1, 2], [1, 4], [0, 1]))
    assert torch.equal(run(backend, case, where)[0], reference(*case))


@each_device_backend
@given(case=cases(), pages_per_run=st.integers(0, 3))
def test_copy_engine_moves_the_same_bytes_as_the_kernel(backend, case, pages_per_run):
    *rest, pairs = case
    case = (*rest, pairs[pairs[:, 0] >= 0].contiguous())
    found, _ = run(backend, case, engine=1, pages_per_run=pages_per_run)
    assert torch.equal(found, reference(*case))


# Numbers of (pages, pairs, regions) below and above the capacity of one launch, with kernel
# parameters of 32 KiB and of 4 KiB.
MANY = {
    "more pairs than the small parameters hold": (700, 600, 3),
    "more pairs than the large parameters hold": (5000, 4500, 1),
    "more regions than the small parameters hold": (40, 30, 90),
    "more regions than the large parameters hold": (6, 5, 700),
    "more of both": (700, 600, 90),
}


@each_backend
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("small_parameters", [False, True])
@pytest.mark.parametrize("name", MANY)
def test_copies_exceeding_one_launch_are_split(backend, name, where, small_parameters):
    num_blocks, num_pairs, num_regions = MANY[name]
    generator = torch.Generator().manual_seed(0)
    sizes = [16] * num_regions
    memory = torch.randint(0, 256, (num_blocks * 16 * num_regions,), generator=generator)
    memory = memory.to(torch.uint8)
    starts = range(num_regions)
    src = Side(memory, [16 * num_blocks * r for r in starts], sizes, num_blocks)
    dst = Side(
        torch.zeros_like(memory), [16 * r for r in starts], [16 * num_regions] * num_regions,
        num_blocks,
    )  # fmt: skip
    pages = torch.randperm(num_blocks, generator=generator)
    pairs = torch.stack([pages, pages.flip(0)], 1).int()[:num_pairs].contiguous()
    with parameters(small_parameters):
        found, _ = run(backend, (sizes, src, dst, False, pairs), where)
    of_pages = memory.view(num_regions, num_blocks, 16).transpose(0, 1)
    expected = torch.zeros(num_blocks, num_regions, 16, dtype=torch.uint8)
    expected[pairs[:, 1].long()] = of_pages[pairs[:, 0].long()]
    assert torch.equal(found, expected.flatten())


@each_backend
def test_large_copies_bypass_caches_and_stay_in_bounds(backend):
    """Addresses are odd, and sizes exceed one thread's share. On the CPU, they are copied with
    streaming stores.
    """
    size, num_blocks = 70_001, 64
    if backend.name == "emulated":
        size, num_blocks = 7_001, 8
    generator = torch.Generator().manual_seed(1)
    memory = torch.randint(0, 256, (size * num_blocks + 8,), generator=generator).to(torch.uint8)
    src = Side(memory, [5], [size], num_blocks)
    dst = Side(torch.zeros_like(memory), [3], [size], num_blocks)
    pairs = torch.stack([torch.arange(num_blocks), torch.randperm(num_blocks)], 1).int()
    found, _ = run(backend, ([size], src, dst, False, pairs))
    rows = found[3 : 3 + size * num_blocks].view(num_blocks, size)
    assert torch.equal(rows[pairs[:, 1].long()], memory[5 : 5 + size * num_blocks].view(-1, size))
    assert not found[:3].any() and not found[3 + size * num_blocks :].any()


def arguments(backend, **changes):
    call = {
        "src": torch.arange(64, dtype=torch.uint8, device=backend.device),
        "dst": torch.full((96,), 200, dtype=torch.uint8, device=backend.device),
        "regions": torch.tensor([[0, 16, 0, 16, 8], [8, 16, 8, 16, 8]]),
        "pairs": torch.tensor([[1, 2], [3, 0]], dtype=torch.int32),
        "num_src_blocks": 4,
        "num_dst_blocks": 6,
    }
    return {**call, **changes}


def ids(*pairs):
    return torch.tensor(pairs, dtype=torch.int32)


BAD = {
    r"pairs\[1\] reads page 4: expected -1 \(zeros\) to 3": {"pairs": ids([1, 2], [4, 0])},
    r"pairs\[0\] reads page -2": {"pairs": ids([-2, 2])},
    r"pairs\[1\] writes to page 6: expected 0 to 5": {"pairs": ids([1, 2], [2, 6])},
    r"pairs\[0\] writes to page -1": {"pairs": ids([1, -1])},
    r"pairs\[0\] and pairs\[2\] both write to page 2: expected each page once": {
        "pairs": ids([1, 2], [1, 3], [3, 2])
    },
    r"pairs\[1\] reads page 2, which pairs\[0\] writes to: expected no page to be both": {
        "src": None, "pairs": ids([1, 2], [2, 3]), "num_src_blocks": 6,
    },
    r"pairs\[0\] reads page 5, which pairs\[0\] writes to": {
        "src": None, "pairs": ids([5, 5]), "num_src_blocks": 6,
    },
    r"pairs has shape \[2\]: expected \[num_pairs, 2\]": {"pairs": ids(1, 2)},
    r"pairs has shape \[1, 3\]: expected size 2 in dimension 1": {"pairs": ids([1, 2, 3])},
    "pairs has dtype Long: expected Int": {"pairs": torch.tensor([[1, 2]])},
    "pairs is not contiguous": {"pairs": ids([1, 2], [3, 4]).T},
    r"regions has shape \[5\]: expected \[num_regions, 5\]": {"regions": torch.zeros(5).long()},
    r"regions has shape \[1, 4\]: expected size 5": {"regions": torch.zeros(1, 4).long()},
    "regions has dtype Int: expected Long": {"regions": torch.zeros(1, 5).int()},
    r"regions\[0\] has -8 bytes: expected 0 or more": {
        "regions": torch.tensor([[0, 16, 0, 16, -8]])
    },
    r"regions\[1\] has pages at offset 57 of src that lie outside: expected memory of src, dst": {
        "regions": torch.tensor([[0, 16, 0, 16, 8], [57, 0, 0, 16, 8]])
    },
    r"regions\[0\] has pages at offset -1 of src that lie outside": {
        "regions": torch.tensor([[-1, 16, 0, 16, 8]])
    },
    r"regions\[0\] has pages at offset 0 of dst that lie outside": {
        "regions": torch.tensor([[0, 16, 0, 18, 8]])
    },
    r"regions\[0\] has pages at offset 80 of dst that lie outside": {
        "regions": torch.tensor([[0, 16, 80, -17, 8]])
    },
    r"regions\[0\] has pages at offset 17179869184 of dst": {
        "regions": torch.tensor([[0, 16, 2**34, 16, 8]])
    },
    r"engine is 4: expected 0 \(kernel\), 1 \(copy engine\), 2 .* or 3": {"engine": 4},
    "num_src_blocks is -1: expected 0 or more": {"num_src_blocks": -1},
    "num_dst_blocks is -1: expected 0 or more": {"num_dst_blocks": -1},
    "pages_per_run is -2: expected 0 or more": {"pages_per_run": -2},
    "num_thread_blocks is -1: expected 0 or more": {"num_thread_blocks": -1},
}  # fmt: skip


@each_backend
@pytest.mark.parametrize("message", BAD)
def test_invalid_argument_writes_nothing(backend, message):
    call = arguments(backend, **BAD[message])
    with pytest.raises(RuntimeError, match=message):
        backend.ops.copy_blocks(**call)
    assert (call["dst"] == 200).all()


@each_backend
def test_pages_in_separate_tensors_need_owners(backend):
    call = arguments(backend)
    other = torch.full((96,), 100, dtype=torch.uint8, device=backend.device)
    apart = other.data_ptr() - call["dst"].data_ptr()
    call["regions"] = torch.tensor([[0, 16, apart, 16, 8]])
    with pytest.raises(RuntimeError, match=r"regions\[0\] has pages at offset"):
        backend.ops.copy_blocks(**call)
    assert (other == 100).all()
    backend.ops.copy_blocks(**call, owners=[other])
    assert other[32:40].tolist() == list(range(16, 24)) and (call["dst"] == 200).all()


@each_device_backend
@pytest.mark.parametrize(("pairs", "message"), [
    (ids([1, 2], [4, 0]), r"pairs\[1\] reads page 4"),
    (ids([1, 2], [1, 7]), r"pairs\[1\] writes to page 7"),
])  # fmt: skip
def test_checked_mode_validates_device_ids(backend, pairs, message, monkeypatch):
    call = arguments(backend, pairs=pairs.to(backend.device))
    monkeypatch.setenv("KVCACHE_CHECKED", "1")
    with ids_from("device"), pytest.raises(RuntimeError, match=message):
        backend.ops.copy_blocks(**call)
    assert (call["dst"] == 200).all()
    monkeypatch.delenv("KVCACHE_CHECKED")
    with ids_from("device"):
        backend.ops.copy_blocks(**call)  # skips pairs with out-of-range pages
    assert call["dst"][32:48].tolist() == list(range(16, 32)) and (call["dst"][:32] == 200).all()


@each_device_backend
def test_copy_engine_cannot_clear_pages(backend):
    call = arguments(backend, pairs=ids([1, 2], [-1, 3]), engine=1)
    with pytest.raises(RuntimeError, match=r"pairs\[1\] clears a page: expected engine 0"):
        backend.ops.copy_blocks(**call)
    assert (call["dst"] == 200).all()


@pytest.mark.gpu
@pytest.mark.parametrize("side", ["src", "dst"])
def test_kernel_requires_pinned_host_memory(side):
    from tests.machinery.backends import Backend

    call = arguments(Backend("cuda", "cuda"))
    call[side] = call[side].cpu()
    with pytest.raises(RuntimeError, match=f"{side} is host memory that is not pinned: expected"):
        torch.ops.kvcache.copy_blocks(**call)
    torch.ops.kvcache.copy_blocks(**call, engine=1)
    torch.cuda.synchronize()
    assert call["dst"][32:48].tolist() == list(range(16, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("engine", [0, 1, 2])
@pytest.mark.parametrize("to_host", [True, False])
@given(case=cases())
def test_pages_are_copied_between_device_and_pinned_host(engine, to_host, case):
    sizes, src, dst, _, pairs = case
    dst = Side(dst.memory.clone(), dst.offsets, dst.strides, dst.num_blocks)
    pairs = pairs[pairs[:, 0] >= 0].contiguous()
    here, there = src.memory, dst.memory
    here, there = (
        (here.cuda(), there.pin_memory()) if to_host else (here.pin_memory(), there.cuda())
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.ops.kvcache.copy_blocks(
            here, there, table(sizes, src, dst), pairs, src.num_blocks, dst.num_blocks, engine
        )
    stream.synchronize()
    assert torch.equal(there.cpu(), reference(sizes, src, dst, False, pairs))


@pytest.mark.gpu
def test_captured_copy_reads_its_ids_at_each_replay():
    from tests.machinery.backends import Backend

    call = arguments(Backend("cuda", "cuda"), pairs=ids([1, 2]).cuda())
    torch.ops.kvcache.copy_blocks(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.kvcache.copy_blocks(**call)
    call["pairs"].copy_(ids([3, 5]))
    graph.replay()
    torch.cuda.synchronize()
    assert call["dst"][80:96].tolist() == list(range(48, 64))


@each_backend
def test_clearing_consecutive_pages_keeps_the_gaps(backend):
    dst = torch.full((6 * 64,), 7, dtype=torch.uint8, device=backend.device)
    # Each fragment occupies the first 32 bytes of every 64. The remaining 32 bytes must not be
    # cleared.
    regions = torch.tensor([[0, 0, 0, 64, 32]])
    pairs = torch.tensor([[-1, 1], [-1, 2], [-1, 3]], dtype=torch.int32)
    backend.ops.copy_blocks(None, dst, regions, pairs, 0, 6, 0, 0, 0)
    expected = torch.full((6, 64), 7, dtype=torch.uint8)
    expected[1:4, :32] = 0
    assert torch.equal(dst.cpu().view(6, 64), expected)
