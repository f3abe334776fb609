# SPDX-License-Identifier: Apache-2.0
"""Proves the index mathematics for all sizes within the bounds that the code checks, with Z3:

    python -m tests.machinery.proofs

C++ is translated to Python (`translated`, which a test compares with compiled code), and Python is
executed as it is, both with `Value`s instead of numbers and once for each path. Each operation proves
that its result fits its C++ type, so Z3's unbounded integers are exact. Division is replaced by its
definition, after `division` has shown that `FastDivisor` divides.
"""

from __future__ import annotations

import operator
import re
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from inspect import signature
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import z3

from kvcache.transfer.plan import fragments, patterns
from tests.machinery.shared import REPO

LIMIT = 2**31
KINDS = ["int32_t", "uint32_t", "int64_t", "uint64_t"]  # the result of two types has the later one
RANGES = dict(zip(KINDS, [(-(2**31), 2**31), (0, 2**32), (-(2**63), 2**63), (0, 2**64)]))
z3.set_param("timeout", 60_000)  # ms


@cache
def linear(term: Any) -> Any:
    """Replace products of unknowns by unknowns. What follows then also follows from the term."""

    def replaced(each: Any) -> Any:
        parts = [replaced(child) for child in each.children()]
        if z3.is_mul(each):
            numbers = [part for part in parts if z3.is_int_value(part)]
            name = z3.Int(" * ".join(sorted(str(part) for part in parts if part not in numbers)))
            return numbers[0] * name if numbers else name
        return each.decl()(*parts) if parts else each

    return replaced(z3.simplify(term, som=True, mul_to_power=False))


def below(limit: Any, *values: Any, least: int = 0) -> z3.BoolRef:
    return z3.And(*(z3.And(least <= each, each < limit) for each in values))


def grows(x: Any, y: Any, factor: Any) -> z3.BoolRef:
    """An instance of the lemma of most proofs, which `growth` proves."""
    return z3.Implies(z3.And(x <= y, factor >= 0), x * factor <= y * factor)


class Proof:
    """Proves a theorem on one path. `waiting`: other paths, as what their first branches chose."""

    now: Proof  # the proof that runs

    def __init__(self, waiting: list[list[bool]]) -> None:
        Proof.now = self
        self.waiting, self.chosen, self.at, self.num_proved = waiting, waiting.pop(), 0, 0
        self.facts, self.lemmas, self.terms = [], [], [z3.IntVal(0)]
        self.quotients, self.dividends = [], []
        self.factors: tuple = ()

    def refutes(self, claim: z3.BoolRef, facts: list, quickly: bool = False) -> bool:
        """Whether the claim contradicts the facts. `quickly`: False if it is not clear."""
        solver, missed = z3.Solver(), [True]
        solver.add(*map(linear, (*facts, claim)))
        while missed and (found := solver.check()) == z3.sat:
            model = solver.model()
            missed = [each for each in self.lemmas if z3.is_false(model.eval(each, True))]
            solver.add(*missed)
        if found != z3.unsat and not quickly:
            solver = z3.Solver()
            solver.add(*facts, claim)
            found = solver.check()
            assert found != z3.unknown, f"no proof in time: {claim}"
            self.counterexample = solver.model() if found == z3.sat else None
        return found == z3.unsat

    def branch(self, condition: z3.BoolRef) -> bool:
        both = z3.Not(condition), condition
        if self.at == len(self.chosen):
            can = [not self.refutes(each, self.facts, quickly=True) for each in both]
            if all(can):
                self.waiting.append([*self.chosen, False])
            self.chosen.append(can[True])
        self.at += 1
        self.facts.append(both[self.chosen[self.at - 1]])
        return self.chosen[self.at - 1]

    def assume(self, *facts: z3.BoolRef) -> None:
        self.facts += facts

    def prove(self, claim: z3.BoolRef, *lemmas: z3.BoolRef, of: tuple = ()) -> z3.BoolRef:
        """Prove a claim, and keep it as a fact. `of`: the facts to use if all are too many for Z3."""
        assert all(any(each.eq(fact) for fact in self.facts) for each in of)
        is_proved = self.refutes(z3.Not(claim), [*(of or self.facts), *lemmas])
        assert is_proved, f"{claim} is false: {self.counterexample}"
        self.num_proved += 1
        self.facts.append(claim)
        return claim

    def compare(self, *terms: Any) -> None:
        """Let proofs use `grows` for each two of the terms so far, times each factor."""
        for x in terms:
            for y, factor in product(self.terms, self.factors):
                pairs = (x, y), (y, x), (x + 1, y), (y + 1, x)
                self.lemmas += [linear(grows(*pair, factor)) for pair in pairs]
            self.terms.append(x)

    def quotient(self, n: Any, divisor: Any) -> z3.ArithRef:
        """Divide as C++ and Python do, of numbers that are not negative."""
        self.prove(z3.And(n >= 0, divisor > 0))
        q = z3.Int(f"q{len(self.quotients)}")
        self.quotients.append(q)
        self.dividends.append(n)
        self.assume(q * divisor <= n, n < q * divisor + divisor, q >= 0, q <= n)
        self.compare(q, n)
        return q


def _operator(function: Callable) -> Callable:
    def apply(self: Value, other: Any) -> Any:
        found = function(self.term, getattr(other, "term", other))
        if z3.is_bool(found):
            return Proof.now.branch(found)
        kind = max(self.kind, getattr(other, "kind", self.kind), key=KINDS.index)
        return cast(kind)(Value(found, ""))

    return apply


class Value:
    """An integer of a C++ type, whose operations stay in the type and whose comparisons choose a path.
    It also stands for an array.
    """

    def __init__(self, term: Any, kind: str = "int64_t") -> None:
        self.term, self.kind, self.shape, self.ravel = term, kind, (1, 1), lambda: self

    __add__ = __radd__ = _operator(operator.add)
    __sub__, __mul__ = _operator(operator.sub), _operator(operator.mul)
    __truediv__ = __floordiv__ = _operator(lambda n, divisor: Proof.now.quotient(n, divisor))
    __rshift__ = _operator(lambda n, bits: Proof.now.quotient(n, 2**bits))
    __lt__, __gt__, __ne__ = map(_operator, (operator.lt, operator.gt, operator.ne))

    def __divmod__(self, other: Any) -> tuple[Value, Value]:
        quotient = self / other
        return quotient, self - quotient * other


def cast(kind: str) -> Callable:
    """Return the conversion to a C++ type, which must not change the number."""
    low, high = RANGES[kind]

    def convert(value: Any) -> Any:
        if not isinstance(value, Value):
            return (int(value) - low) % (high - low) + low
        if value.kind != kind:
            Proof.now.prove(z3.And(low <= value.term, value.term < high))
        return Value(value.term, kind)

    return convert


class Divisor:
    """A `FastDivisor`, which divides as `division` shows."""

    def __init__(self, divisor: Any) -> None:
        self.divisor = Value(divisor, "uint32_t") if z3.is_expr(divisor) else divisor

    def divide(self, n: Any) -> Any:
        if isinstance(n, Value):
            Proof.now.prove(below(LIMIT, n.term))
        return n // self.divisor


REWRITES = [
    (r"//.*|\b(const|auto) ", ""),
    (r"static_cast<(\w+)>", r"\1"),
    (r"\b(u?int\d+_t)\{([^{}]*)\}", r"\1(\2)"),
    (r"return \{([^{}]*)\}", r"return (\1)"),
    (r"return ([^;?]*) \? ([^;:]*) : ", r"return \2 if \1 else "),
    (r"\b(if|while) \((.*?)\) (?=return|\{|\+\+)", r"\1 \2: "),
    (r"\+\+(\w+)", r"\1 = \1 + 1"),
]


def text_of(path: str) -> str:
    return (REPO / path).read_text()


def body_of(path: str, name: str) -> tuple[str, str]:
    """Return the parameters and the body of a C++ function, up to the `}` with its indentation."""
    found = re.search(rf"^( *)\S.*\b{name}\((.*)\).* \{{\n((?:.*\n)*?)\1\}}", text_of(path), re.M)
    assert found, f"{path} has no function {name}"
    return found[2], found[3]


def translated(path: str, name: str, **members: Any) -> Callable:
    """Translate a C++ function to one of Z3's terms or numbers. `members`: the fields that it uses."""
    text = text_of(path)
    parameters, body = body_of(path, name)
    for pattern, replacement in REWRITES:
        body = re.sub(pattern, replacement, body)
    kinds = {variable: kind for kind, variable in re.findall(r"(\w+_t) (\w+) =", body)}
    cast_too = r"\1 = {}(\2)"
    for variable in {*re.findall(r"(\w+) = ", body)}:
        pattern = rf"(?:\w+_t )?\b({variable}) = ([^;]*)"
        body = re.sub(pattern, cast_too.format(kinds.get(variable, "")), body)
    typed = re.findall(r"(?:(\w+_t) |\w[\w*&]* )(\w+)(?:,|$)", parameters)
    lines, depth = ["def translation(" + ", ".join(parameter for _, parameter in typed) + "):"], 1
    for statement, end in re.findall(r"([^;{}]*)([;{}])", " ".join(body.split())):
        lines.append("  " * depth + statement.strip())
        depth += {"{": 1, ";": 0, "}": -1}[end]
    space = {kind: cast(kind) for kind in RANGES}
    for member, value in members.items():
        kind = re.search(rf"\b(FastDivisor|\w+_t) (?:\w+, )*{member}\b", text)
        space[member] = typed_as(kind[1] if kind else "", value)
    exec("\n".join(lines), space)

    def run(*arguments: Any) -> Any:
        kinds = (kind for kind, _ in typed)
        found = space["translation"](
            *(typed_as(*each) for each in zip(kinds, arguments, strict=True))
        )
        return getattr(found, "term", found)

    return run


def typed_as(kind: str, value: Any) -> Any:
    value = Value(value, kind if kind in RANGES else "int64_t") if z3.is_expr(value) else value
    return Divisor(value) if kind == "FastDivisor" else value


SLOTS, TABLES = "csrc/worker/slot_formula.h", "csrc/worker/host_tables.cpp"
PERMUTE, DIVISOR = "csrc/ops/block_permute.h", "csrc/worker/fast_divisor.h"


class Theorems(Proof):
    """The theorems, about all numbers that have the names of the parameters."""

    def growth(self, x, y, f) -> None:
        """Lemma: x <= y and f >= 0 imply x * f <= y * f."""
        self.prove(grows(x, y, f))

    def division(self, d, n, q) -> None:
        """FastDivisor: divide(n) = n // d for 1 <= d < 2^31 and 0 <= n < 2^31; its magic has 32 bits."""
        self.assume(bound := below(LIMIT, d, least=1))
        divisor, magic, shift = translated(DIVISOR, "fast_divisor")(d)
        m, scale = magic.term, 2**shift
        self.prove(divisor.term == d)
        fits = self.prove(below(2**32, m))
        near = self.prove(z3.And(m * d >= scale, m * d <= scale + d - 1, d - 1 < scale // LIMIT))
        self.assume(given := z3.And(below(LIMIT, n), q * d <= n, n < q * d + d, q >= 0, d >= 1))
        lemmas = grows(n, LIMIT - 1, d - 1), grows(m * d, scale + d - 1, n)
        excess = self.prove(n * (m * d) < n * scale + scale, *lemmas, of=(near, given))
        least = self.prove(n * (m * d) >= n * scale, grows(scale, m * d, n), of=(near, given))
        low = self.prove(q * scale <= n * m, grows(n * m, q * scale - 1, d), of=(least, given))
        lemma = grows((q + 1) * scale, n * m, d)
        high = self.prove(n * m < (q + 1) * scale, lemma, of=(excess, given))
        self.facts = [low, high, given, bound, fits]
        self.prove(translated(DIVISOR, "divide", magic=m, shift=shift)(n) == q)

    def _slot(self, k, i, w, rank, block, position) -> Any:
        """Return the slot of a token in a group with blocks of k * i tokens."""
        self.assume(below(LIMIT, k, i, w, k * i, k * i * w, least=1), below(w, rank))
        self.factors = i, w, i * w, k * i, k * i * w
        self.compare(z3.IntVal(LIMIT), block, k, k * w)
        divisors = {"by_column": k * i * w, "by_interleave": i, "by_world": w}
        slot = translated(SLOTS, "slot", **divisors, rank=rank, block_size=k * i)
        return slot(defaultdict(lambda: Value(block, "int32_t")), position)

    def slots(self, k, i, w, rank, p, q, a, b) -> None:
        """Slots: two tokens share a slot of a rank only in one block and at one offset of its columns,
        for V = block_size * w < 2^31, i | block_size, positions and blocks below 2^31. No overflow."""
        self.assume(below(LIMIT, p, q, a, b))
        one = self._slot(k, i, w, rank, a, p)
        c, d = self.quotients[0], len(self.quotients)
        two = self._slot(k, i, w, rank, b, q)
        if z3.is_expr(one) and z3.is_expr(two):  # otherwise, a token is on another rank
            offsets = p - c * k * i * w, q - self.quotients[d] * k * i * w
            self.prove(z3.Implies(one == two, z3.And(a == b, offsets[0] == offsets[1])))

    def inverse_of_slots(self, k, i, w, rank, column, a, turn, rest) -> None:
        """Slots, inverse: for each column, block, rank and offset l < block_size, the token at position
        column * V + (l // i * w + rank) * i + l % i has the slot block * block_size + l."""
        position = column * k * i * w + (turn * w + rank) * i + rest
        self.assume(below(LIMIT, column, a, position), below(i, rest), below(k, turn))
        self.assume(grows(turn + 1, k, w * i), grows(rank + 1, w, i))
        self.factors = i, w, i * w, k * i, k * i * w
        self.compare(column, turn * w + rank, turn)
        self.prove(self._slot(k, i, w, rank, a, position) == a * k * i + turn * i + rest)

    def kernel_blocks(self, b, c, r, s, j, i, p) -> None:
        """Kernel blocks: with ratio r and kernel blocks of s tokens, block b < 2^31 // r becomes the
        kernel blocks b * r + j below 2^31. Column c of kernel blocks is in column c // r of blocks."""
        self.assume(below(LIMIT, r, s, r * s, least=1), below(r, j, i), below(LIMIT, b, c, p))
        self.assume(b * r <= LIMIT - r, c * r <= LIMIT - r)
        text = re.search(r"int32_t>\((.*ids\[i\].*?)\);", text_of(TABLES))
        assert text, f"{TABLES} does not expand blocks"
        expand = eval(f"lambda ids, ratio, k, i: {text[1]}")
        found = [expand([Value(x, "int32_t")], Value(r), Value(y), 0) for x, y in ((b, j), (c, i))]
        one, two = (cast("int32_t")(each).term for each in found)
        self.factors = r, s, r * s
        self.compare(b, c)
        self.prove(below(b * r + r, one, least=b * r))
        self.prove(z3.Implies(one == two, z3.And(b == c, j == i)))
        column, whole = self.quotient(p, s), self.quotient(p, r * s)
        inner = self.quotient(column, r)
        self.compare(inner * r, inner * r + r - 1)
        self.prove(inner == whole)

    def tokens_of_groups(self, t, tokens, world, rank, k, i, w, k2, i2) -> None:
        """Transfer plans: each token of a local rank is matched with the remote rank, page and index
        that hold the same position, for block sizes, interleaves that divide them and world sizes below
        2^31, and positions below 2^62."""
        self.assume(below(LIMIT, world, k, i, w, k2, i2, k * i, k2 * i2, least=1), below(LIMIT, t))
        self.assume(below(world, rank), (t + i) * world < 2**62, below(2**62, tokens))
        self.factors = k * i, i, world, world * i, w, i2, w * i2, k2 * i2
        self.compare(t, rank, z3.IntVal(1))
        np = SimpleNamespace(arange=lambda n: Value(t), divmod=divmod)
        space = {"np": np, "lcm": lambda *_: Value(tokens), "TokensOfGroup": patterns.TokensOfGroup}
        names = "tokens_per_page", "cp_world_size", "block_size", "cp_interleave"
        sizes = (tokens, world, k * i, i), (tokens, w, k2 * i2, i2)
        both = (SimpleNamespace(**dict(zip(names, map(Value, each)))) for each in sizes)
        token = FunctionType(patterns.tokens_of_group.__code__, space)(*both, Value(rank))
        here, index, there, page, at = (each.term for each in token)
        position, n = (self.dividends[each] for each in (-3, -1))
        self.prove(z3.And(here * k * i + index == t, below(k * i, index)))
        self.prove(z3.And(below(w, there), below(k2 * i2, at), page >= 0, page * k2 * i2 + at == n))
        # Index l of a rank's tokens is at position (l // i * w + rank) * i + l % i.
        again = self.quotient(n, i2)
        self.prove((again * w + there) * i2 + n - again * i2 == position)

    def permutation(self, rows, columns, run, r) -> None:
        """BlockPermute: `source` is a permutation of a unit's rows, for units below 2^31 rows: its
        inverse transposes the matrix again."""
        unit = rows * columns * run
        self.assume(below(LIMIT, rows, columns, run, unit, least=1), below(unit, r))
        self.factors = rows, columns, run, rows * run, columns * run, rows * columns, unit
        self.compare(rows, columns, rows * columns)
        found = translated(PERMUTE, "source", run=run, columns=columns, matrix_rows=rows)(r)
        to, i = self.quotients
        j = to - i * columns
        self.compare(j, j * rows + i)
        self.prove(below(unit, found))
        one = self.quotient(found, run)
        self.prove(one == j * rows + i)
        two = self.quotient(one, rows)
        self.prove(two == j)
        self.prove(((one - two * rows) * columns + two) * run + found - one * run == r)

    def rows_of_units(self, inner, outer, num_bytes, step, leap, r, q) -> None:
        """BlockPermute: two rows of a block are at least `row_bytes` apart and inside the block, for
        strides that nest and blocks below 2 GiB."""
        rows = inner * outer
        self.assume(below(LIMIT, inner, outer, rows, least=1), below(rows, r, q), r != q)
        self.assume(num_bytes >= 1, step >= num_bytes, leap >= inner * step, outer * leap < LIMIT)
        self.factors = step, leap, inner, inner * step, rows
        self.compare(z3.IntVal(1), inner, outer)
        sizes = {"block_rows": rows, "inner_rows": inner, "block_stride": outer * leap}
        place = translated(PERMUTE, "place", **sizes, outer_stride=leap, inner_stride=step)
        unit, ids = (
            SimpleNamespace(first_id=0, first_row=0),
            defaultdict(lambda: Value(z3.IntVal(0))),
        )
        one, two = (place(unit, ids, each) for each in (r, q))
        _, a, _, b = self.quotients
        self.compare(r - a * inner, q - b * inner)
        self.prove(z3.Or(one - two >= num_bytes, two - one >= num_bytes))
        self.prove(below(outer * leap - num_bytes + 1, one))

    def pages_of_slots(self, size, step, leap, p, q) -> None:
        """TokenPages: the places of two slots below 2^31 are at least `offset_stride` apart, for blocks
        of any size and strides that nest, below 2^62 bytes in all."""
        self.assume(below(LIMIT, size, least=1), below(LIMIT, p, q), p != q, step >= 1)
        self.assume(leap >= size * step, below(2**62, p * leap, q * leap, LIMIT * step))
        self.factors = step, leap, size, size * step
        self.compare(size, z3.IntVal(LIMIT))
        strides = {"block_stride": leap, "offset_stride": step}
        place = translated("csrc/ops/token_io.h", "page_place", by_block=size, **strides)
        one, two = place(p), place(q)
        self.compare(*(n - a * size for n, a in zip((p, q), self.quotients)))
        self.prove(z3.Or(one - two >= step, two - one >= step))

    def pages_of_copies(self, base, offset, stride, page, num) -> None:
        """BlockCopy: if the first and the last page of a region are within 2^61 bytes, as `pages_span`
        checks, so are all pages; no address overflows for memory below 2^62."""
        last = (num - 1) * stride + offset
        self.assume(below(LIMIT, num, least=1), below(num, page), below(2**62, base))
        self.assume(
            below(2**61, offset, last, least=-(2**61)), below(2**62, stride, least=-(2**62))
        )
        self.factors = stride, -stride
        self.compare(page, num - 1)
        region = SimpleNamespace(destination=Value(offset), destination_stride=Value(stride))
        found = translated("csrc/ops/copy_pages.h", "to", destination=base)(region, page)
        low, high = z3.If(offset < last, offset, last), z3.If(offset < last, last, offset)
        self.prove(z3.And(base + low <= found, found <= base + high))

    def pages_of_transfers(self, stride, a, b, x, y, n) -> None:
        """Transfer plans: runs in two pages of a region do not overlap, if each run lies in its page;
        for page numbers below 2^31 and regions below 2^62 bytes."""
        self.assume(below(LIMIT, a, b), a != b, stride >= 1, n >= 1, LIMIT * stride < 2**62)
        self.assume(below(stride - n + 1, x, y))
        self.factors = (stride,)
        self.compare(a, b, z3.IntVal(LIMIT))
        runs = ((Value(page), None, Value(stride), Value(at)) for page, at in ((a, x), (b, y)))
        one, two = (fragments._addresses(*each).term for each in runs)
        self.prove(z3.Or(one + n <= two, two + n <= one))


NAMES = [name for name in vars(Theorems) if not name.startswith("_")]


def proved(name: str) -> int:
    """Prove a theorem on all paths. Return the number of claims that were proved."""
    waiting, num_proved = [[]], 0
    while waiting:
        path = Theorems(waiting)
        _, *parameters = signature(getattr(Theorems, name)).parameters
        getattr(path, name)(*map(z3.Int, parameters))
        num_proved += path.num_proved
    return num_proved


def main() -> None:
    for name in NAMES:
        start = time.monotonic()
        num_proved, text = proved(name), " ".join(getattr(Theorems, name).__doc__.split())
        print(f"{time.monotonic() - start:6.1f} s, {num_proved:4} claims: {text}", flush=True)


if __name__ == "__main__":
    main()
