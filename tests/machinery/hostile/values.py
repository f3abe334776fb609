# SPDX-License-Identifier: Apache-2.0
"""Invalid arguments: values of the wrong type, out of range, or that misreport their size."""

from __future__ import annotations

import collections
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import fields, is_dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

HUGE = 2**40


class OwnError(Exception):
    """The error that hostile objects raise. A call may propagate it."""


class ClaimsMany(Sequence):
    """A sequence that claims to have 2**40 entries and returns a value for each of them."""

    def __len__(self) -> int:
        return HUGE

    def __getitem__(self, i: int) -> int:
        return 1


class ManyMembers(Set):
    """A set that claims to have 2**40 members."""

    def __len__(self) -> int:
        return HUGE

    def __contains__(self, value: object) -> bool:
        return True

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class WrongLength(list):
    """A sequence that claims to have more entries than it has."""

    def __len__(self) -> int:
        return 5


def _raising(name: str, *methods: str) -> type:
    """Return a class whose objects raise in these operations."""

    def of(method: str) -> Callable:
        def raises(self: object, *arguments: object, **options: object) -> None:
            raise OwnError(method)

        return raises

    return type(name, (), {method: of(method) for method in methods})


Raises = _raising("Raises", "__index__", "__len__", "__iter__", "__eq__", "__array__")
NoTruth = _raising("NoTruth", "__bool__", "__hash__")
Unprintable = _raising("Unprintable", "__repr__")


class WrongIndex:
    """An object whose __index__ does not return an integer."""

    def __index__(self) -> int:
        return "1"  # noqa: PLE0305


class NegativeLength(list):
    """A list with a negative length, which Python rejects."""

    def __len__(self) -> int:
        return -1  # noqa: PLE0303


class EqualsAll:
    """An object that compares equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def _endless() -> Iterator[int]:
    while True:
        yield 1


def _itself() -> list:
    out: list = []
    out.append(out)
    return out


def _deep() -> list:
    out: list = [1]
    for _ in range(100_000):
        out = [out]
    return out


def _readonly() -> np.ndarray:
    array = np.arange(3)
    array.setflags(write=False)
    return array


def _structured() -> np.ndarray:
    return np.zeros(2, [("a", "i4"), ("b", "f4")])


# Factories, so that each call gets a new object.
SCALARS = [
    lambda value=value: value
    for value in (
        *(-(2**63) - 1, -(2**63), -(2**31) - 1, -(2**31), -2, -1, 0, 1, 2, 3, 5, 8, 17, 100, 2**16),
        *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**57 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64),
        *(10**30, True, False, None, 0.0, 1.0, 1.5, -1.0, 1e300, float("nan"), float("inf")),
        *(Decimal(1), Decimal("nan"), Fraction(1, 1), Fraction(1, 2), 1j),
        *("", "1", "a", "\ud800", "\0", "x" * 10000, "lru", "cpu", "full_attention", b"", b"1"),
        *(bytes(32), int, object, print, ..., NotImplemented, range(3), range(HUGE), range(0)),
        *(np.int8(-1), np.int64(1), np.uint64(2**64 - 1), np.float32(1), np.bool_(True)),
        *(np.str_("a"), np.datetime64(1, "s"), np.array(1), np.array(1.5), torch.tensor(1)),
        *(torch.tensor(1.5), torch.float32, torch.complex64, torch.int64, torch.device("cpu")),
        *(torch.device("meta"), "meta", "cuda", "nonsense:7"),
        *(10**5000, -(10**5000), 5e-324, np.float16(1), np.float64("nan"), np.longdouble(1)),
        *(bytearray(b"ab"), memoryview(b"ab"), Path("a"), Path("."), b"/dev/null", "/dev/null"),
        *("a\r\nb", "\udcff", "\x1b[2J", "{}", "%s%n", "a" * 300 + "=1", "lru:a=nan", "1e400"),
    )
]
LISTS = [
    list, tuple, dict, set, lambda: [0], lambda: [1], lambda: [-1], lambda: [1, 1],
    lambda: [1, 2, 3], lambda: [True], lambda: [None], lambda: ["a"], lambda: [1.5],
    lambda: [2**31], lambda: [2**70], lambda: [Decimal(1)], lambda: [1, None], lambda: [[1]],
    lambda: [[1, 2], [3]], lambda: [(1, 2)], lambda: [object()], lambda: [Raises()],
    lambda: [Unprintable()], lambda: {1: 2}, lambda: {"a": 1}, lambda: {"window": 1.5}, lambda: {1},
    lambda: frozenset({1, 2}), lambda: iter([1]), lambda: (i for i in (1, 2)),
    lambda: [0] * 100_000, _endless, _itself, ClaimsMany, ManyMembers, lambda: WrongLength([1]),
    lambda: NegativeLength([1]), NoTruth, EqualsAll, _deep, lambda: collections.deque([1, 2]),
    lambda: {"a": float("nan")}, lambda: {1: [2], "b": None}, lambda: [("a", 1, 2), ("b",)],
    lambda: ["a", "a"], lambda: [b"a"], lambda: ["\ud800"], lambda: [float("nan")],
    lambda: [10**5000], lambda: bytes(2**20), Raises, WrongIndex, Unprintable, object,
]  # fmt: skip
ARRAYS = [
    lambda: np.zeros(0, np.int32), lambda: np.zeros((0, 2), np.int64),
    lambda: np.array([1], np.int32), lambda: np.array([1, 2, 3]), lambda: np.array([-1]),
    lambda: np.array([2**31]), lambda: np.array([2**63 - 1]),
    lambda: np.array([2**64 - 1], np.uint64), lambda: np.array([1.0]),
    lambda: np.array([float("nan")]), lambda: np.array([True]), lambda: np.array([None]),
    lambda: np.array(["a"]), lambda: np.array([1], np.complex64),
    lambda: np.array([1], "datetime64[s]"), lambda: np.array([1], ">i4"),
    lambda: np.zeros((1, 2), np.int32), lambda: np.zeros((2, 3), np.int32),
    lambda: np.ones((1, 1, 1), np.int64), lambda: np.arange(10, dtype=np.int32)[::-2],
    lambda: np.arange(10, dtype=np.int32)[::3], lambda: np.ma.masked_array([1, 2], [True, False]),
    lambda: np.matrix([1, 2]), _readonly, _structured,
    lambda: np.broadcast_to(np.int32(1), (HUGE,)), lambda: np.broadcast_to(np.int64(1), (HUGE,)),
    lambda: np.broadcast_to(np.uint8(1), (HUGE,)), lambda: np.broadcast_to(np.float32(1), (HUGE,)),
    lambda: np.broadcast_to(np.int32(1), (HUGE, 2)),
    lambda: np.broadcast_to(np.int32(1), (2, HUGE)),
]  # fmt: skip
TENSORS = [
    lambda: torch.zeros(0), lambda: torch.tensor([1]), lambda: torch.tensor([1], dtype=torch.int32),
    lambda: torch.tensor([-1]), lambda: torch.tensor([2**62]), lambda: torch.tensor([1.5]),
    lambda: torch.tensor([True]), lambda: torch.tensor([1j]),
    lambda: torch.tensor([1]).expand(HUGE),
    lambda: torch.tensor([1], dtype=torch.int32).expand(HUGE),
    lambda: torch.tensor([1.0]).expand(HUGE), lambda: torch.zeros(1, 1).expand(HUGE, 2),
    lambda: torch.zeros(1, 1, 1).expand(4, HUGE, 8), lambda: torch.zeros(3, 2, 8),
    lambda: torch.zeros(3, 2, 8, dtype=torch.bfloat16),
    lambda: torch.zeros(3, 2, 8, dtype=torch.complex64), lambda: torch.zeros(2, 3, 4, 2, 8),
    lambda: torch.zeros(3, device="meta"), lambda: torch.zeros(2, 2).to_sparse(),
    lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8),
    lambda: torch.zeros(3, requires_grad=True),
    lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged),
    lambda: torch.empty(0, 2**31, 4),
]  # fmt: skip
POOLS = (SCALARS, LISTS, ARRAYS, TENSORS)


def draw(rng: random.Random) -> object:
    """Return a random invalid value."""
    return rng.choice(rng.choice(POOLS))()


def variant(rng: random.Random, value: object, others: list) -> object:
    """Return an invalid value to use in place of a valid one. It is often similar to the valid
    value.
    """
    try:
        return _variant(rng, value, others)
    except Exception:  # no similar value for a huge integer, a nested tensor or an array of strings
        return draw(rng)


def _variant(rng: random.Random, value: object, others: list) -> object:
    chance = rng.random()
    if chance < 0.1 and others:
        return rng.choice(others)
    if chance < 0.5:
        return draw(rng)
    if isinstance(value, bool) or value is None:
        return draw(rng)
    if isinstance(value, int):
        return rng.choice([value - 1, value + 1, -value, value * 1.0, str(value), Decimal(value)])
    if isinstance(value, np.ndarray | torch.Tensor) and math.prod(value.shape) > 2**20:
        return draw(rng)  # the value was already drawn at random
    if isinstance(value, np.ndarray | torch.Tensor):
        of_kind = _array_variant if isinstance(value, np.ndarray) else _tensor_variant
        try:
            return of_kind(rng, value)
        except (TypeError, ValueError, RuntimeError, NotImplementedError):  # e.g. sparse tensors
            return draw(rng)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return _list_variant(rng, list(value), others)
    if is_dataclass(value) and not isinstance(value, type):
        name = rng.choice([each.name for each in fields(value) if each.init])
        other = variant(rng, getattr(value, name), others)
        return replace(value, **{name: other})
    return draw(rng)


def _list_variant(rng: random.Random, values: list, others: list) -> list:
    place = rng.randrange(len(values) + 1)
    if place == len(values) or rng.random() < 0.2:
        return [*values, draw(rng)] if rng.random() < 0.7 else values[:-1]
    values[place] = variant(rng, values[place], others)
    return values


def _array_variant(rng: random.Random, array: np.ndarray) -> object:
    change = rng.randrange(8)
    if change == 0:
        return array.astype(rng.choice([np.float64, np.bool_, np.uint64, np.int8, object, ">i4"]))
    if change == 1 and array.size:
        out = array.astype(np.int64)
        out.flat[rng.randrange(out.size)] = rng.choice([-2, -1, 0, 2**31, 2**62, -(2**63), 1000])
        return out
    if change == 2:
        return np.concatenate([array, array])
    if change == 3:
        return array[:-1]
    if change == 4:
        return array[None]
    if change == 5 and array.size and array.ndim:
        return np.broadcast_to(array[:1], (HUGE, *array.shape[1:]))
    if change == 6:
        return array[::-1]
    return torch.from_numpy(array.copy()) if array.dtype.kind in "if" else array.tolist()


def _tensor_variant(rng: random.Random, tensor: torch.Tensor) -> object:
    change = rng.randrange(9)
    if change == 0:
        return tensor.to(rng.choice([torch.float64, torch.bool, torch.int8, torch.float32]))
    if change == 1 and tensor.numel() and not tensor.is_floating_point():
        out = tensor.clone(memory_format=torch.contiguous_format)
        out.view(-1)[rng.randrange(out.numel())] = rng.choice([-2, -1, 0, 127, 100])
        return out
    if change == 2 and tensor.ndim:
        return torch.cat([tensor, tensor])
    if change == 3 and tensor.ndim:
        return tensor[:-1]
    if change == 4:
        return tensor[None]
    if change == 5 and tensor.ndim and tensor.numel():
        return tensor[:1].expand(HUGE, *tensor.shape[1:])
    if change == 6 and tensor.ndim > 1:
        return tensor.transpose(0, -1)
    if change == 7:
        return tensor.to("meta")
    return tensor.tolist() if tensor.numel() < 10_000 else draw(rng)
