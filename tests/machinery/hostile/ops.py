# SPDX-License-Identifier: Apache-2.0
"""Fuzzes the ops with invalid arguments: values out of range, wrong shapes, and arguments that
share memory.

    python -m tests.machinery.hostile.ops LIBRARY [--calls N] [--seed N]

LIBRARY is a library of the CPU ops or of the emulated kernels, preferably built with AddressSanitizer
(`tests.machinery.emulation`). A rejected call must not change any tensor, and an accepted call must
stay within its tensors.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import functools
import random
import sys
import time

import torch

INT64_ENDS = [2**63 - 1, -(2**63), 2**62, -(2**62), 2**61, 2**32, 2**31, 2**31 - 1, -(2**31) - 1]
NEAR = [-2, -1, 0, 1, 2, 3, 7, 100]
DTYPES = [torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.float64]
SLOW_S = 2.0


NAMES = (
    "slot_mapping", "update_block_tables", "gather_block_tables", "attention_metadata", "write_kv",
    "rope_write_kv", "gather_kv", "gather_context", "copy_blocks", "permute_blocks_",
)  # fmt: skip


@functools.cache
def _schema(name: str) -> list:
    """Return the arguments of an op of the library that is loaded."""
    of_emulation = getattr(torch.ops.kvcache_emul, name, None)
    op = of_emulation or getattr(torch.ops.kvcache, name)
    return [each for each in op.default._schema.arguments if each.name != "owners"]


def arguments(name: str) -> list[str]:
    """Return the names of an op's arguments."""
    return [each.name for each in _schema(name)]


def written(name: str) -> list[int]:
    """Return the numbers of the arguments to which an op writes."""
    given = enumerate(_schema(name))
    return [i for i, each in given if each.alias_info and each.alias_info.is_write]


_STAYS = {"groups", "regions", "offsets"}  # arguments that ops accept only on the host


class Placed:
    """The arguments of an op, with tensors moved to a device.

    Tensors that share memory also share it on the device. With a seed, some tensors that may be on
    the host stay there.
    """

    def __init__(self, name: str, args: list, device: str, seed: int | None = None) -> None:
        from kvcache.ops import _ON_HOST  # not at the top, because `main` loads another library

        rng = random.Random(seed)
        schema = getattr(torch.ops.kvcache, name).default._schema.arguments
        self.memories: dict[tuple[bool, int], torch.Tensor] = {}
        self.args = []
        for i, arg in enumerate(args):
            if not isinstance(arg, torch.Tensor) or arg.layout != torch.strided:
                self.args.append(arg)
                continue
            may_stay = seed is not None and i in _ON_HOST[name] and rng.random() < 0.5
            stays = schema[i].name in _STAYS or may_stay
            self.args.append(self._placed(arg, "cpu" if stays else device, stays))

    def _placed(self, tensor: torch.Tensor, device: str, stays: bool) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = stays, storage.data_ptr()
        if key not in self.memories:
            whole = torch.empty(0, dtype=torch.uint8)
            whole.set_(storage, 0, (storage.nbytes(),), (1,))
            self.memories[key] = whole.clone() if device == "cpu" else whole.to(device)
        view = torch.empty(0, dtype=tensor.dtype, device=device)
        memory = self.memories[key].untyped_storage()
        return view.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())

    def contents(self) -> list[bytes]:
        return [bytes(memory.cpu().numpy()) for memory in self.memories.values()]


class Calls:
    """Draws valid calls, each with new tensors."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def draw(self) -> tuple[str, list]:
        """Draw an op and valid arguments. Return its name and the arguments."""
        name = self.rng.choice(NAMES)
        return name, getattr(self, name)()

    def ids(self, *shape: int, high: int = 8, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(0, max(high, 1), shape, generator=self.generator, dtype=dtype)

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        rows, sizes = self.rng.randint(1, 4), [(3, 4), (2, 8)][: self.rng.randint(1, 2)]
        fields, at = [], 0
        for g, (columns, block_size) in enumerate(sizes):
            fields.append([at, columns, block_size, 1, 0, 1, self.rng.choice([0, 5]), g])
            at += rows * columns
        return self.ids(at), torch.tensor(fields), rows

    def slot_mapping(self) -> list:
        tables, groups, rows = self.tables()
        n = self.rng.randint(0, 6)
        positions = self.ids(n, high=12, dtype=torch.int64)
        counts = torch.full((len(groups), rows), 3, dtype=torch.int32)
        counts = self.rng.choice([None, counts])
        dtype = self.rng.choice([torch.int64, torch.int32])
        out = torch.zeros(len(groups), n + 2, dtype=dtype)
        if self.rng.random() < 0.5:
            return [tables, groups, rows, self.ids(n, high=rows), None, positions, counts, out]
        starts = torch.tensor([0, n // 2, n], dtype=torch.int32)
        return [tables, groups, rows, self.ids(2, high=rows), starts, positions, counts, out]

    def update_block_tables(self) -> list:
        updates = torch.tensor([2, 0, 2, 7, 5, 1, 9, 4, 5, 6], dtype=torch.int32)
        return [self.ids(10), updates]

    def gather_block_tables(self) -> list:
        tables, groups, rows = self.tables()
        index = self.ids(rows, high=rows)
        computed = self.rng.choice([None, self.ids(rows, high=12)])
        return [tables, groups, rows, index, computed, 12, torch.zeros_like(tables)]

    def attention_metadata(self) -> list:
        tables, groups, rows = self.tables()
        n, num_groups = rows, len(groups)
        padded = n + self.rng.randint(0, 2)
        counts = torch.full((num_groups, rows), 3, dtype=torch.int32)
        columns = int(groups[:, 1].sum())

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32)

        lens = self.ids(n, high=10) + 2
        given = [tables, groups, rows, self.ids(n, high=rows), zeros(n) + 1, lens, counts, 12]
        out = [zeros(padded + 1), zeros(num_groups, padded), zeros(padded * columns)]
        out += [zeros(num_groups, padded + 1), zeros(padded * columns), zeros(num_groups, padded)]
        return given + out

    def token_io(self) -> tuple[torch.Tensor, ...]:
        blocks, size, heads, width, n = 4, 4, 2, 8, self.rng.randint(0, 5)
        fp8, is_nvfp4 = torch.float8_e4m3fn, self.rng.random() < 0.2
        dtype = torch.uint8 if is_nvfp4 else self.rng.choice([torch.float32, torch.bfloat16, fp8])
        wide = torch.float32 if dtype in (fp8, torch.uint8) else dtype
        layers = self.rng.choice([(), (2,)])
        caches = [self.floats(*layers, blocks, size, heads, width, dtype=dtype) for _ in range(2)]
        token_width = 2 * width if is_nvfp4 else width
        tokens = [self.floats(*layers, n, heads, token_width, dtype=wide) for _ in range(2)]
        scales: list = [None, None]
        if is_nvfp4:
            scales = [self.floats(*caches[0].shape[:-1], 2, dtype=fp8) for _ in range(2)]
        elif wide != dtype and self.rng.random() < 0.5:  # scales in the cache
            scales = [self.floats(*caches[0].shape[:-1], 2) for _ in range(2)]
        elif wide != dtype:
            scales = [self.floats(*layers, 1).abs() + 0.5 for _ in range(2)]
        slots = torch.randperm(blocks * size, generator=self.generator)[:n].contiguous()
        return (*tokens, *caches, slots, *scales)

    def write_kv(self) -> list:
        return [*self.token_io(), self.rng.randrange(4)]

    def rope_write_kv(self) -> list:
        key, value, *caches, slots, k_scale, v_scale = self.token_io()
        while key.ndim == 4:  # the op writes one layer
            key, value, *caches, slots, k_scale, v_scale = self.token_io()
        n, rotates_value = len(key), self.rng.random() < 0.5
        query = self.floats(n, 3, 8, dtype=key.dtype)
        weight, cos_sin = self.floats(8, dtype=key.dtype), self.floats(9, 6)
        outs = [self.rng.choice([None, torch.zeros_like(x)]) for x in (query, key, value)]
        if not rotates_value:
            outs[2] = None
        given = [self.ids(n, high=9, dtype=torch.int64), query, key, value, cos_sin, *caches, slots]
        options = [self.rng.randrange(4), self.rng.random() < 0.5, rotates_value]
        return [*given, k_scale, v_scale, *options, weight, weight.clone(), 1e-6, *outs]

    def gather_kv(self) -> list:
        key, value, key_cache, value_cache, slots, *scales = self.token_io()
        return [key_cache, value_cache, slots, key, value, *scales]

    def gather_context(self) -> list:
        key, value, key_cache, value_cache, _, *scales = self.token_io()
        n, rows, blocks = key.shape[-3], 3, key_cache.shape[-4]
        tables = self.ids(rows * 2, high=blocks).view(rows, 2)
        ends = sorted(self.rng.randint(0, n) for _ in range(rows))
        lens = torch.tensor([0, *ends], dtype=torch.int32)
        starts = self.rng.choice([None, self.ids(rows, high=4)])
        positions = self.rng.choice([None, self.ids(n, high=4) - 1])
        return [key_cache, value_cache, tables, lens, key, value, *scales, starts, positions]

    def copy_blocks(self) -> list:
        pages, size = 6, 32
        memory = [self.ids(pages * size * 2, high=255, dtype=torch.uint8) for _ in range(2)]
        regions = torch.tensor([[0, size, 0, size, size], [192, size, 192, size, size]])
        pairs = torch.tensor([[0, 3], [1, 4], [-1, 5]], dtype=torch.int32)
        source = self.rng.choice([None, *memory])
        if self.rng.random() < 0.25:
            # Page 3 is both read and written, which is rejected if both sides are the same memory.
            pairs[1, 0] = 3
        return [source, memory[1], regions, pairs, pages, pages, 0, 0, 0]

    def permute_blocks_(self) -> list:
        cache = self.floats(2, 6, 2, 4, 8)
        cache = cache.transpose(2, 3) if self.rng.random() < 0.5 else cache.view(2, 6, 4, 2, 8)
        offsets = torch.tensor([0, cache[1].data_ptr() - cache[0].data_ptr()])
        remote = self.rng.choice([2, 4, 8])
        indices = torch.randperm(6, generator=self.generator)[:4].to(torch.int32)
        k = max(remote // 4, 1)
        return [
            cache[0],
            offsets,
            indices.view(-1, k).contiguous(),
            remote,
            self.rng.random() < 0.5,
        ]


def make_wrong(rng: random.Random, name: str, args: list) -> int:
    """Make one argument in `args` invalid, and return its index."""
    place = rng.randrange(len(args))
    value = args[place]
    if isinstance(value, torch.Tensor) and place not in written(name) and rng.random() < 0.3:
        _alias(rng, name, args, place)
    elif isinstance(value, torch.Tensor):
        args[place] = _wrong_tensor(rng, value)
    elif isinstance(value, bool):
        args[place] = rng.choice([None, 2, "x", not value])
    elif isinstance(value, int):
        args[place] = rng.choice([*INT64_ENDS, *NEAR, None, 1.5, "1"])
    else:
        args[place] = rng.choice([torch.zeros(2, dtype=torch.int32), torch.ones(1), 1, "x"])
    return place


def _alias(rng: random.Random, name: str, args: list, place: int) -> None:
    """Move an argument into the memory of an argument to which the op writes."""
    value, target = args[place], args[rng.choice(written(name))]
    if not isinstance(target, torch.Tensor) or value is target:
        return
    if not 0 < value.numel() < 10_000:
        return
    memory = target.untyped_storage()
    item, needed = value.element_size(), value.numel() * value.element_size()
    if memory.nbytes() < needed:
        return
    start = rng.randrange((memory.nbytes() - needed) // item + 1)
    shared = torch.empty(0, dtype=value.dtype).set_(memory, start, tuple(value.shape))
    shared.copy_(value.clone())
    args[place] = shared


def _wrong_tensor(rng: random.Random, tensor: torch.Tensor) -> object:
    change = rng.randrange(12)
    if tensor.numel() > 10_000:  # the argument is already invalid
        return None
    if change <= 3 and tensor.numel() and not tensor.is_floating_point():
        out = tensor.clone(memory_format=torch.contiguous_format)
        info = torch.iinfo(out.dtype)
        values = [*NEAR, *INT64_ENDS, info.min, info.max]
        for _ in range(rng.randint(1, 2)):
            value = rng.choice(values)
            out.view(-1)[rng.randrange(out.numel())] = min(max(value, info.min), info.max)
        return out
    if change == 4:
        return torch.zeros(tensor.shape, dtype=rng.choice(DTYPES))
    if change == 5 and tensor.ndim:
        return tensor[:-1]
    if change == 6 and tensor.ndim:
        return torch.cat([tensor, tensor])
    if change == 7:
        return tensor[None]
    if change == 8 and tensor.ndim and tensor.numel():
        return tensor[:1].expand(rng.choice([3, 2**40]), *tensor.shape[1:])
    if change == 9 and tensor.ndim > 1:
        return tensor.transpose(rng.randrange(tensor.ndim), rng.randrange(tensor.ndim))
    if change == 10:
        return tensor.flatten()[::2] if tensor.numel() else tensor[None]
    return rng.choice([None, 3, "x", torch.empty(0), torch.empty(0, 2**31, 4)])


def contents(args: list) -> list[bytes]:
    """Return the current memory of all tensors."""
    tensors = [x for x in args if isinstance(x, torch.Tensor) and not x.is_sparse]
    memories = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    views = [torch.empty(0, dtype=torch.uint8).set_(m) for m in memories.values()]
    return [bytes(view.numpy()) for view in views]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument(
        "--seed", type=int, default=None, help="default: random; the seed is printed"
    )
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    torch.ops.load_library(options.library)
    emulated = "emul" in options.library.rpartition("/")[2]
    ops = torch.ops.kvcache_emul if emulated else torch.ops.kvcache
    torch.set_num_threads(1)
    kinds: collections.Counter = collections.Counter()
    faulthandler.enable()
    for at in range(options.first, options.first + options.calls):
        rng = random.Random(f"{seed}:{at}")
        name, args = Calls(rng).draw()
        place = make_wrong(rng, name, args)
        if rng.random() < 0.1:
            make_wrong(rng, name, args)
        before = contents(args)
        faulthandler.dump_traceback_later(30, exit=True)
        started = time.process_time()  # CPU time, because other processes may use the core
        try:
            getattr(ops, name)(*args)
            error = None
        except Exception as raised:
            error = raised
        faulthandler.cancel_dump_traceback_later()
        at_call = f"seed {seed}, call {at}: {name}, argument {arguments(name)[place]}"
        if time.process_time() - started > SLOW_S:
            kinds["slow"] += 1
            print(f"SLOW {at_call}", flush=True)
        if error is None:
            kinds["accepted"] += 1
            continue
        if contents(args) != before:
            kinds["changed"] += 1
            print(f"CHANGED {at_call}: {error}", flush=True)
        kinds["rejected"] += 1
    total = options.calls
    print(
        f"{total} calls: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    )
    return 1 if kinds["changed"] or kinds["slow"] else 0


if __name__ == "__main__":
    sys.exit(main())
