# SPDX-License-Identifier: Apache-2.0
"""The ops on devices other than CPU and CUDA. They copy tensors to the host and run the CPU op
there.

The only requirement is that torch can create views of the device's tensors and copy them to and from the
host. Device addresses are never dereferenced. The boxed CPU fallback of a torch backend cannot be used,
because it would pass the CPU op a copy of a single tensor, and raw offsets from that copy would be
invalid.

The storages of a call's tensors are mirrored in host memory at the same offsets and strides. The
operating system commits only the parts that are accessed. The CPU op performs all its checks before
any byte on the device changes. These ops are slow, because the host waits until all bytes have been
transferred over the bus.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import numpy as np
import torch

# Arguments that must be on the host for every op.
_ONLY_ON_HOST = {"groups", "regions", "offsets"}
_KEY = "CompositeExplicitAutograd"  # dispatch key of all backends without a kernel for the op
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # defined by Python 3.13 and newer
_libraries: list[torch.library.Library] = []  # deleting these objects removes the registrations


def register(on_host: dict[str, set[int]]) -> None:
    """Register the ops. `on_host`: by op, the positions of arguments that may be on the CPU."""
    library = torch.library.Library("kvcache", "IMPL")
    _libraries.append(library)
    for name, positions in on_host.items():
        # Another copy of kvcache in this process may already have registered the ops.
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"kvcache::{name}", _KEY):
            library.impl(name, _implementation(name, positions), _KEY)


def _implementation(name: str, on_host: set[int]) -> Callable[..., None]:
    op = getattr(torch.ops.kvcache, name).default
    arguments = op._schema.arguments
    run = _RUNS.get(name, _run_whole)

    def implementation(*args: object) -> None:
        given = {each.name: each.default_value for each in arguments}
        given.update(zip(given, args))
        # Allow writes to tensors that require gradients or were created in inference mode, as the
        # CPU op does.
        with torch.inference_mode():
            call = _MirroredCall(op, given)
            call.check_places({arguments[i].name for i in on_host})
            run(call)

    return implementation


class _MirroredCall:
    """One call of an op, and the host memory that mirrors the storages of its tensors."""

    def __init__(self, op: torch._ops.OpOverload, given: dict[str, object]) -> None:
        self.given = given
        self.home = next(
            (each.device for each in self.tensors().values() if each.device.type != "cpu"),
            torch.device("cpu"),
        )
        self._op = op
        self._storages: dict[
            int, torch.UntypedStorage
        ] = {}  # keyed by the address of the mirrored storage

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, including tensors in lists."""
        found = {}
        for name, value in self.given.items():
            if isinstance(value, torch.Tensor):
                found[name] = value
            elif isinstance(value, list | tuple):
                found |= {f"{name}[{i}]": each for i, each in enumerate(value)}
        return found

    def check_places(self, on_host: set[str]) -> None:
        """Raise RuntimeError unless all tensors are dense and on a device that the op allows."""
        for each in self._op._schema.arguments:
            if str(each.type) == "Tensor" and self.given[each.name] is None:
                raise RuntimeError(f"{each.name} is None: expected a tensor")
        first = None
        for name, tensor in self.tensors().items():
            at = tensor.device
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
                raise RuntimeError(f"{name} is {tensor.layout} on {at}: expected a dense tensor")
            if at.type == "cpu" and name.partition("[")[0] in {*on_host, "owners"}:
                continue
            if name in _ONLY_ON_HOST:
                raise RuntimeError(f"{name} is on {at}: expected cpu")
            first = first or (name, at)
            if at != first[1]:
                raise RuntimeError(f"{name} is on {at}: expected {first[1]}, as for {first[0]}")
        for tensor in self.tensors().values():
            if tensor.device.type != "cpu":
                memory = tensor.untyped_storage()
                known = self._storages.get(memory.data_ptr())
                if known is None or known.nbytes() < memory.nbytes():
                    self._storages[memory.data_ptr()] = _lazy_memory(memory.nbytes())

    def mirror(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor's mirror, without copying its content. CPU tensors are unchanged."""
        if tensor.device.type == "cpu":
            return tensor
        memory = self._storages[tensor.untyped_storage().data_ptr()]
        place = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return place.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy the tensor's content to its mirror."""
        for d in range(tensor.ndim):  # torch cannot copy into an expanded dimension
            if tensor.stride(d) == 0 and tensor.shape[d] > 1:
                tensor = tensor.narrow(d, 0, 1)
        if tensor.device.type != "cpu":
            self.mirror(tensor).copy_(tensor)

    def write_back(self, tensor: torch.Tensor) -> None:
        """Copy the mirror's content back to the tensor."""
        if tensor.device.type != "cpu":
            tensor.copy_(self.mirror(tensor))

    def run(self, **changed: object) -> None:
        """Run the CPU op on the mirrors. `changed` replaces arguments."""

        def on_host(value: object) -> object:
            if isinstance(value, list | tuple):
                return [on_host(each) for each in value]
            return self.mirror(value) if isinstance(value, torch.Tensor) else value

        given = {**self.given, **changed}
        self._op(**{name: on_host(value) for name, value in given.items()})

    def storage_at(
        self, name: str, begin: int, end: int
    ) -> tuple[torch.UntypedStorage, int] | None:
        """Return the storage that holds bytes [begin, end), and the offset of these bytes in it.

        Bytes are counted from the first element of the named tensor. Returns None if none of the
        tensors that the op's offsets may refer to contains the bytes.
        """
        tensor = self.given[name]
        start = tensor.data_ptr()
        for other, each in self.tensors().items():
            if other.partition("[")[0] not in ("src", "dst", "cache", "owners"):
                continue
            memory = each.untyped_storage()
            shift = start + begin - memory.data_ptr()
            if each.device == tensor.device and 0 <= shift <= memory.nbytes() - (end - begin):
                return memory, shift
        return None

    def written(self) -> list[torch.Tensor]:
        """Return the tensors that the op writes."""
        infos = {each.name: each.alias_info for each in self._op._schema.arguments}
        names = [name for name, info in infos.items() if info is not None and info.is_write]
        return [self.given[name] for name in names if self.given[name] is not None]


def _run_whole(call: _MirroredCall) -> None:
    """Run an op on whole tables and metadata, which are small enough to copy completely."""
    for tensor in call.tensors().values():
        call.fill(tensor)
    call.run()
    for tensor in call.written():
        call.write_back(tensor)


def _caches(call: _MirroredCall) -> dict[str, torch.Tensor]:
    """Return the tensors of which only tokens are copied. Given scales are not part of the cache."""
    names = ("key_cache", "value_cache", "k_scale", "v_scale")
    found = {name: call.given[name] for name in names if call.given[name] is not None}
    return {name: each for name, each in found.items() if each.ndim >= 4}


def _write_kv(call: _MirroredCall) -> None:
    caches = _caches(call)
    for name, tensor in call.tensors().items():
        if name not in caches:
            call.fill(tensor)
    call.run()
    for cache in caches.values():
        for tokens in _tokens(cache, call.mirror(call.given["slot_mapping"])):
            call.write_back(tokens)


def _rope_write_kv(call: _MirroredCall) -> None:
    _write_kv(call)
    for name in ("query", "query_out", "key_out", "value_out"):
        if call.given[name] is not None:
            call.write_back(call.given[name])


def _gather_kv(call: _MirroredCall) -> None:
    caches = _caches(call)
    for name, tensor in call.tensors().items():
        if name not in (*caches, "key", "value"):
            call.fill(tensor)
    for cache in caches.values():
        for tokens in _tokens(cache, call.mirror(call.given["slot_mapping"])):
            call.fill(tokens)
    call.run()
    for tensor in call.written():
        call.write_back(tensor)


def _gather_context(call: _MirroredCall) -> None:
    caches = _caches(call)
    for name, tensor in call.tensors().items():
        if name not in (*caches, "key", "value"):
            call.fill(tensor)
    tables = call.mirror(call.given["block_tables"])
    for cache in caches.values():
        if cache.numel() and tables.dtype == torch.int32:
            num_blocks = cache.shape[-4]
            for block, count in _runs(tables.long(), 1, num_blocks, num_blocks):
                call.fill(cache.narrow(-4, block, count))
    call.run()
    for tensor in call.written():
        call.write_back(tensor)


def _tokens(cache: torch.Tensor, slot_mapping: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of runs of tokens at these slots, without the null block."""
    if cache.ndim not in (4, 5) or cache.numel() == 0 or not _holds_ids(slot_mapping, torch.int64):
        return
    num_blocks, block_size = cache.shape[-4], cache.shape[-3]
    for slot, count in _runs(slot_mapping, block_size, num_blocks * block_size, block_size):
        block, first = divmod(slot, block_size)
        yield cache.select(-4, block).narrow(-3, first, count)


def _holds_ids(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.is_contiguous()


def _runs(ids: torch.Tensor, least: int, end: int, cut: int) -> list[tuple[int, int]]:
    """Return (first, count) of runs of ids in [least, end), which end at multiples of `cut`."""
    array = np.unique(ids.numpy())
    array = array[(array >= least) & (array < end)]
    begins = np.flatnonzero((np.diff(array, prepend=-2) != 1) | (array % cut == 0))
    counts = np.diff(begins, append=len(array))
    return [(int(array[at]), int(count)) for at, count in zip(begins, counts)]


def _copy_blocks(call: _MirroredCall) -> None:
    given = call.given
    regions, pairs, sides = given["regions"], given["pairs"], ["src", "dst"]
    call.fill(pairs)
    nowhere = torch.empty(0, dtype=torch.uint8, device="cpu")
    # Without regions, the CPU op checks the pairs and copies nothing.
    changed = {"dst": nowhere}
    if regions.ndim and regions.is_contiguous():
        changed["regions"] = regions[:0]
    if given["src"] is None:
        sides = ["dst", "dst"]
    else:
        changed["src"] = nowhere
    if "owners" in given:
        changed["owners"] = []
    call.run(**changed)
    counts = given["num_src_blocks"], given["num_dst_blocks"]
    runs = _runs_of_pairs(call.mirror(pairs).numpy())
    work = [
        [
            _Fragments(call, i, side, *row[2 * s : 2 * s + 2], row[4], counts[s])
            for s, side in enumerate(sides)
        ]
        for i, row in enumerate(regions.tolist())
        if row[4] != 0
    ]
    is_shared = False
    for i, (source, destination) in enumerate(work):
        for name in ("regions", "pairs"):
            destination.check_apart(name, given[name], i)
        is_shared |= destination.shares_pages(source, i)
    if is_shared and given["src"] is not None:  # check that no page is both read and written
        call.run(**{**changed, "src": None})
    for source, destination in work:
        for first, to, count in runs:
            pages = destination.pages(to, count)
            if first < 0:
                pages.zero_()
            else:
                pages.copy_(source.pages(first, count))


class _Fragments:
    """One side of a region. Raises RuntimeError unless its pages are in the call's tensors."""

    def __init__(
        self,
        call: _MirroredCall,
        i: int,
        side: str,
        offset: int,
        stride: int,
        size: int,
        count: int,
    ) -> None:
        last = offset + max(count - 1, 0) * stride
        found = call.storage_at(side, offset, last + size)
        if found is None or size < 0 or stride < 0:
            raise RuntimeError(
                f"regions[{i}] has pages of {size} bytes starting at byte {offset} of {side}, {stride} "
                "bytes apart, but not all of them are in the memory of the call's tensors: expected "
                f"them there, because the op cannot access other memory on {call.home}"
            )
        self._storage, self._shift = found
        self._stride, self._size = stride, size
        self._device = call.given[side].device
        self._count, self._end = count, self._shift + last - offset + size

    def check_apart(self, name: str, tensor: torch.Tensor, region: int) -> None:
        """Raise RuntimeError if the pages share memory with an argument that the op reads."""
        if tensor.device != self._device or tensor.numel() == 0:
            return
        if tensor.untyped_storage().data_ptr() != self._storage.data_ptr():
            return
        begin = tensor.storage_offset() * tensor.element_size()
        if begin < self._end and self._shift < begin + tensor.nbytes:
            raise RuntimeError(
                f"dst in regions[{region}] shares memory with {name}: expected memory of its own"
            )

    def shares_pages(self, source: _Fragments, region: int) -> bool:
        """Return whether both sides share pages. Raises RuntimeError if pages partially overlap."""
        if source._storage.data_ptr() != self._storage.data_ptr():
            return False
        if source._shift >= self._end or self._shift >= source._end:
            return False
        shift, stride = self._shift - source._shift, self._stride
        are_alike = source._count == self._count == 1
        are_alike |= source._stride == stride and stride >= self._size
        is_between = bool(stride) and self._size <= shift % stride <= stride - self._size
        if are_alike and (shift == 0 or is_between):
            return shift == 0
        raise RuntimeError(
            f"regions[{region}] has pages of dst that partially overlap pages of src: expected disjoint "
            "pages, or the same pages on both sides"
        )

    def pages(self, first: int, count: int) -> torch.Tensor:
        """Return a view uint8[count, size]."""
        place = torch.empty(0, dtype=torch.uint8, device=self._device)
        start = self._shift + first * self._stride
        return place.set_(self._storage, start, (count, self._size), (self._stride, 1))


def _runs_of_pairs(pairs: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (first source page, first destination page, number of pages) for each run of pairs.

    Within a run, both page IDs increase by one. If pages are zeroed, only the destination ID
    increases.
    """
    if len(pairs) == 0:
        return []
    steps = np.diff(pairs, axis=0)
    cleared = pairs[:, 0] < 0
    goes_on = (steps[:, 1] == 1) & (cleared[1:] == cleared[:-1])
    goes_on &= cleared[1:] | (steps[:, 0] == 1)
    begins = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    counts = np.diff(begins, append=len(pairs))
    return [(*map(int, pairs[at]), int(n)) for at, n in zip(begins, counts)]


def _permute_blocks(call: _MirroredCall) -> None:
    cache, offsets, indices = (call.given[name] for name in ("cache", "offsets", "indices"))
    call.fill(indices)
    indices, blocks = call.mirror(indices), []
    are_right = _holds_ids(offsets, torch.int64) and _holds_ids(indices, torch.int32)
    if cache.ndim == 4 and cache.numel() and offsets.ndim == 1 and are_right:
        layers = [_layer(call, cache, offset) for offset in offsets.tolist()]
        here = call.mirror(cache).data_ptr()
        places = [call.mirror(layer).data_ptr() - here for layer in layers]
        offsets = torch.tensor(places, dtype=torch.int64, device="cpu")
        num_blocks = cache.shape[0]
        for first, count in _runs(indices, 0, num_blocks, num_blocks):
            blocks += [layer.narrow(0, first, count) for layer in layers]
    for block in blocks:
        call.fill(block)
    call.run(offsets=offsets)
    for block in blocks:
        call.write_back(block)


def _layer(call: _MirroredCall, cache: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the layer `offset` bytes after the start of the cache. Raises RuntimeError."""
    item = cache.element_size()
    span = 1 + sum((n - 1) * step for n, step in zip(cache.shape, cache.stride()))
    found = call.storage_at("cache", offset, offset + span * item)
    if found is None or found[1] % item:
        raise RuntimeError(
            f"offsets has {offset}: expected a layer in the memory of the call's tensors, because the op "
            f"cannot access other memory on {call.home}"
        )
    place = torch.empty(0, dtype=cache.dtype, device=cache.device)
    return place.set_(found[0], found[1] // item, cache.shape, cache.stride())


def _lazy_memory(num_bytes: int) -> torch.UntypedStorage:
    """Allocate host memory that the operating system commits on first touch. Raises MemoryError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        mapping = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
    except OSError as error:
        raise MemoryError(f"{num_bytes:,} bytes of addresses: {error.strerror}") from error
    return torch.from_numpy(np.frombuffer(mapping, np.uint8)).untyped_storage()


_RUNS = {
    "write_kv": _write_kv,
    "rope_write_kv": _rope_write_kv,
    "gather_kv": _gather_kv,
    "gather_context": _gather_context,
    "copy_blocks": _copy_blocks,
    "permute_blocks_": _permute_blocks,
}
