# SPDX-License-Identifier: Apache-2.0
"""Proves the index mathematics for all sizes within the bounds that the code checks, with Z3:

    python -m tests.machinery.proofs

The functions are read from the sources: C++ is translated to Python statement by statement
(`translated`), and Python is executed as it is. Both run with `Value`s instead of numbers, once for
each path. Each operation proves that its result fits its C++ type, so Z3's unbounded integers are
exact. Division by a known number is replaced by its definition, after the first theorem has shown
that `FastDivisor` divides. A test compares the translations with compiled code.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Iterator
from math import prod
from types import FunctionType, SimpleNamespace
from typing import Any

import z3

from kvcache.transfer.plan import fragments, patterns
from tests.machinery.shared import REPO

LIMIT, TIMEOUT_MS = 2**31, 60_000
CONVERSIONS = ["int32_t", "uint32_t", "int64_t", "uint64_t"]  # of two types, the later one
RANGES = dict(zip(CONVERSIONS, [(-(2**31), 2**31), (0, 2**32), (-(2**63), 2**63), (0, 2**64)]))
_now: Paths  # of the proof that runs
_linear: dict[int, tuple] = {}


class Paths:
    """Runs a function on all paths, under assumptions."""

    def __init__(self, *assumptions: z3.BoolRef) -> None:
        self.assumptions, self.num_fresh, self.num_proved = assumptions, 0, 0

    def run(self, function: Callable) -> Iterator[Any]:
        """Yield the result on each path. `prove` then proves claims about it."""
        global _now
        waiting: list[list[bool]] = [[]]
        while waiting:
            self.waiting, self.taken, self.at, _now = waiting, waiting.pop(), 0, self
            self.facts = [*self.assumptions]
            yield function()

    def refutes(self, claim: z3.BoolRef, facts: list, quickly: bool = False) -> bool:
        """Whether the claim contradicts the facts. `quickly`: False if it is not clear."""
        facts = [*facts, claim]
        for terms in ([linear(each) for each in facts], facts):
            solver = z3.Solver()
            solver.set("timeout", TIMEOUT_MS)
            solver.add(*terms)
            if (found := solver.check()) == z3.unsat:
                return True
            if quickly:
                return False
        assert found == z3.sat, f"no proof in time: {claim}"
        self.counterexample = solver.model()
        return False

    def branch(self, condition: z3.BoolRef) -> bool:
        if self.at == len(self.taken):
            both = condition, z3.Not(condition)
            can = [not self.refutes(each, self.facts, quickly=True) for each in both]
            if all(can):
                self.waiting.append([*self.taken, False])
            self.taken.append(can[0])
        taken = self.taken[self.at]
        self.at += 1
        self.facts.append(condition if taken else z3.Not(condition))
        return taken

    def prove(self, claim: z3.BoolRef, *lemmas: z3.BoolRef, of: tuple = ()) -> None:
        """Prove a claim on this path, and keep it as a fact. `lemmas`: instances of `grows`. `of`: the
        facts to use, because Z3 is slow with many products. Default: all.
        """
        assert all(any(each.eq(fact) for fact in self.facts) for each in of)
        facts = [*(of or self.facts), *lemmas]
        is_proved = self.refutes(z3.Not(claim), facts)
        assert is_proved, f"{claim} is false: {self.counterexample}"
        self.num_proved += 1
        self.facts.append(claim)

    def fresh(self, name: str = "x") -> z3.ArithRef:
        self.num_fresh += 1
        return z3.Int(f"{name}_{self.num_fresh}")

    def quotient(self, n: z3.ArithRef, divisor: z3.ArithRef) -> z3.ArithRef:
        q = self.fresh("q")
        self.facts += [q * divisor <= n, n < q * divisor + divisor, q >= 0, q <= n]
        return q


def linear(term: Any) -> Any:
    """Replace products of unknowns by unknowns. What follows from the result is also true of the
    term, and Z3 decides it at once.
    """

    def replaced(each: Any) -> Any:
        parts = [replaced(child) for child in each.children()]
        if z3.is_mul(each):
            numbers = [part.as_long() for part in parts if z3.is_int_value(part)]
            unknowns = [str(part) for part in parts if not z3.is_int_value(part)]
            return prod(numbers) * z3.Int(" * ".join(unknowns))
        return each.decl()(*parts) if parts else each

    if term.get_id() not in _linear:  # an id belongs to a term as long as the term exists
        _linear[term.get_id()] = term, replaced(z3.simplify(term, som=True, mul_to_power=False))
    return _linear[term.get_id()][1]


class Condition:
    """The result of a comparison. Python branches on it."""

    def __init__(self, term: z3.BoolRef) -> None:
        self.term = term

    def __bool__(self) -> bool:
        return _now.branch(self.term)


def _computed(function: Callable) -> Callable:
    def compute(self: Value, other: Any) -> Value:
        kinds = {self.kind, getattr(other, "kind", self.kind)}
        found = Value(function(self.term, term_of(other)), "")
        return cast(max(kinds, key=CONVERSIONS.index))(found)

    return compute


def _compared(function: Callable) -> Callable:
    return lambda self, other: Condition(function(self.term, term_of(other)))


def _divided(n: Any, divisor: Any) -> Any:
    """Divide numbers that are not negative, as in C++."""
    _now.prove(z3.And(n >= 0, divisor > 0))
    return _now.quotient(n, divisor)


class Value:
    """An integer of a C++ type. Operations prove that they do not leave the type."""

    def __init__(self, term: Any, kind: str = "int64_t") -> None:
        self.term, self.kind = term, kind

    __add__ = __radd__ = _computed(operator.add)
    __sub__, __mul__ = _computed(operator.sub), _computed(operator.mul)
    __truediv__ = __floordiv__ = _computed(_divided)
    __rshift__ = _computed(lambda n, bits: _divided(n, 2**bits))
    __lt__, __le__ = _compared(operator.lt), _compared(operator.le)
    __gt__, __ne__ = _compared(operator.gt), _compared(operator.ne)

    def __divmod__(self, other: Any) -> tuple[Value, Value]:
        quotient = self / other
        return quotient, self - quotient * other

    def ravel(self) -> Value:  # a value stands for an array, too
        return self


def term_of(value: Any) -> Any:
    return value.term if isinstance(value, Value) else value


def cast(kind: str) -> Callable:
    """Return the conversion to a C++ type, which must not change the number."""
    low, high = RANGES[kind]

    def convert(value: Any) -> Any:
        if not isinstance(value, Value):
            return (int(value) - low) % (high - low) + low
        if value.kind != kind:
            _now.prove(z3.And(low <= value.term, value.term < high))
        return Value(value.term, kind)

    return convert


class Divisor:
    """A `FastDivisor`, which divides according to `division`. `near`: numbers with which proofs
    compare quotients, apart from other quotients. `factors`: what they multiply.
    """

    def __init__(self, divisor: Any, near: tuple = (), factors: tuple = ()) -> None:
        self.divisor = Value(divisor, "uint32_t") if isinstance(divisor, z3.ExprRef) else divisor
        self.near, self.factors, self.found = near, factors, []

    def divide(self, n: Any) -> Any:
        if not isinstance(n, Value):
            return n // self.divisor
        _now.prove(z3.And(n.term >= 0, n.term < LIMIT))
        q = _now.quotient(n.term, self.divisor.term)
        for x in (*self.near, *self.found, n.term):
            _now.facts += compared(q, x, self.divisor.term, *self.factors)
        self.found.append(q)
        return Value(q, "uint32_t")


# Translation -----------------------------------------------------------------------------------------


def text_of(path: str) -> str:
    return (REPO / path).read_text()


def body_of(path: str, name: str) -> tuple[str, str]:
    """Return the parameters and the body of a C++ function."""
    text = text_of(path)
    found = re.search(rf"\b{name}\(([^()]*)\)(?: const)? \{{", text)
    assert found, f"{path} has no function {name}"
    return found[1], text[found.end() : _closing(text, found.end())]


def translated(path: str, name: str, **names: Any) -> Callable:
    """Translate a C++ function. `names`: the members that it uses."""
    parameters, body = body_of(path, name)
    listed = ", ".join(each.split()[-1].lstrip("*&") for each in parameters.split(","))
    space = {**{kind: cast(kind) for kind in RANGES}, "INT32_MAX": LIMIT - 1, **names}
    space["like"] = lambda old, new: cast(old.kind)(new) if isinstance(old, Value) else new
    exec(f"def {name}({listed}):\n" + _statements(body), space)
    return space[name]


def _statements(text: str) -> str:
    text = re.sub(r"//.*", "", text)
    text = re.sub(r"static_cast<(\w+)>\(", r"\1(", text)
    text = re.sub(r"\b(u?int\d+_t)\{([^{}]*)\}", r"\1(\2)", text)
    text = " ".join(re.sub(r"return \{([^{}]*)\}", r"return (\1)", text).split())
    lines, depth = [], 1
    for statement, end in re.findall(r"([^;{}]*)([;{}])", text):
        head = re.match(r"\s*(if|while) \(", statement)
        rest = statement.strip()
        if head:
            close = _closing(statement, head.end())
            lines.append("  " * depth + f"{head[1]} {_expression(statement[head.end() : close])}:")
            rest = statement[close + 1 :].strip()
        depth += end == "{"
        if rest:
            lines.append("  " * (depth + (head is not None and end == ";")) + _simple(rest))
        depth -= end == "}"
    return "\n".join(lines) + "\n"


def _closing(text: str, at: int) -> int:
    """Return the index of the bracket that closes the one before `at`."""
    depth = 1
    while depth:
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(text[at], 0)
        at += 1
    return at - 1


def _simple(text: str) -> str:
    if text.startswith("++"):
        return f"{text[2:]} = {text[2:]} + 1"
    if declared := re.match(r"(?:const )?(auto|u?int\d+_t) (\w+) = (.*)", text):
        kind = "" if declared[1] == "auto" else declared[1]
        return f"{declared[2]} = {kind}({_expression(declared[3])})"
    if changed := re.match(r"(\w+) = (.*)", text):
        return f"{changed[1]} = like({changed[1]}, {_expression(changed[2])})"
    assert text.startswith("return "), f"not understood: {text}"
    return f"return {_expression(text[7:])}"


def _expression(text: str) -> str:
    text = re.sub(r"\(([^()?]+) \? ([^()?:]+) : ([^()?:]+)\)", r"((\2) if (\1) else (\3))", text)
    text = re.sub(r"^([^?]+) \? ([^?:]+) : ([^?:]+)$", r"(\2) if (\1) else (\3)", text)
    return text.replace("&&", "and").replace("||", "or")


# Theorems --------------------------------------------------------------------------------------------

SLOTS, TABLES = "csrc/worker/slot_formula.h", "csrc/worker/host_tables.cpp"
PERMUTE, DIVISOR = "csrc/ops/block_permute.h", "csrc/worker/fast_divisor.h"


def integers(names: str) -> list[Any]:
    return [z3.Int(name) for name in names.split()]


def below(limit: Any, *values: Any, least: int = 0) -> z3.BoolRef:
    return z3.And(*(z3.And(least <= each, each < limit) for each in values))


def grows(x: Any, y: Any, factor: Any) -> z3.BoolRef:
    """An instance of the lemma of most proofs, which `growth` proves."""
    return z3.Implies(z3.And(x <= y, factor >= 0), x * factor <= y * factor)


def compared(x: Any, y: Any, *factors: Any) -> list[z3.BoolRef]:
    """Return lemmas that compare two numbers, times each factor."""
    pairs = (x, y), (y, x), (x + 1, y), (y + 1, x)
    return [grows(*pair, factor) for pair in pairs for factor in factors]


def growth() -> int:
    """Lemma: x <= y and f >= 0 imply x * f <= y * f."""
    paths = Paths()
    for _ in paths.run(lambda: None):
        paths.prove(grows(*integers("x y f")))
    return paths.num_proved


def division() -> int:
    """FastDivisor: divide(n) = n // d for 1 <= d < 2^31 and 0 <= n < 2^31; its magic has 32 bits."""
    d, n, q = integers("d n q")
    paths = Paths(below(LIMIT, d, least=1))
    make = translated(DIVISOR, "fast_divisor")
    for divisor, magic, shift in paths.run(lambda: make(Value(d))):
        m, scale = magic.term, 2**shift
        paths.prove(z3.And(m * d >= scale, m * d <= scale + d - 1, d - 1 < scale // LIMIT))
        paths.prove(divisor.term == d)
        near = paths.facts[-2]
        given = z3.And(below(LIMIT, n), q * d <= n, n < q * d + d, q >= 0, d >= 1)
        paths.facts.append(given)
        excess = n * (m * d) < n * scale + scale  # n * (m * d - scale) < scale
        some = (grows(n, LIMIT - 1, d - 1), grows(m * d, scale + d - 1, n))
        paths.prove(excess, *some, of=(near, given))
        least = n * (m * d) >= n * scale
        paths.prove(least, grows(scale, m * d, n), of=(near, given))
        exact = q * scale <= n * m, n * m < (q + 1) * scale
        paths.prove(exact[0], grows(n * m, q * scale - 1, d), of=(least, given))
        paths.prove(exact[1], grows((q + 1) * scale, n * m, d), of=(excess, given))
        paths.facts = [*exact, given, paths.facts[0], below(2**32, m)]
        names = {"magic": magic, "shift": shift}
        divide = translated(DIVISOR, "divide", **names)
        paths.prove(divide(Value(n, "uint32_t")).term == q)
    return paths.num_proved


class Group:
    """A `TableGroupView` with any block size k * I, interleave I and world size W that are checked."""

    def __init__(self) -> None:
        self.k, self.i, self.w, self.rank = integers("k I W rank")
        self.size = self.k * self.i
        self.width = self.size * self.w
        positive = below(LIMIT, self.k, self.i, self.w, self.size, self.width, least=1)
        self.bounds = (positive, below(self.w, self.rank))

    def function(self, name: str, near: tuple = ((), (), ())) -> Callable:
        return translated(
            SLOTS,
            name,
            by_column=Divisor(self.width, near[0]),
            by_interleave=Divisor(self.i, (*near[1], self.k * self.w)),
            by_world=Divisor(self.w, (*near[2], self.k), (self.i,)),
            rank=Value(self.rank, "uint32_t"),
            block_size=Value(self.size, "int32_t"),
        )

    def slot(self, blocks: list, positions: list, near: tuple = ((), (), ())) -> list:
        """Return (slot, column) of tokens in these blocks at these positions."""
        slot, found = self.function("slot", near), []
        for block, position in zip(blocks, positions):
            _now.facts.append(grows(block, LIMIT, self.size))
            row = Row(Value(block, "int32_t"))
            found.append((term_of(slot(row, Value(position, "uint32_t"))), row.column))
        return found


class Row:
    """A row of a table that has this block in the column that is read."""

    def __init__(self, block: Value) -> None:
        self.block, self.column = block, None

    def __getitem__(self, column: Value) -> Value:
        self.column = column.term
        return self.block


def slots() -> int:
    """Slots: two tokens share a slot of a rank only in one block and at one offset of its columns, for
    V = block_size * W < 2^31, I | block_size, positions and blocks below 2^31. No overflow.
    """
    group, (p, q, a, b) = Group(), integers("p q a b")
    paths = Paths(*group.bounds, below(LIMIT, p, q, a, b))
    for (one, c1), (two, c2) in paths.run(lambda: group.slot([a, b], [p, q])):
        if c1 is None or c2 is None:
            continue  # a token is on another rank
        size, width = group.size, group.width
        paths.prove(z3.Implies(one == two, a == b), *compared(a, b, size))
        offsets = p - c1 * width, q - c2 * width
        paths.prove(
            z3.Implies(one == two, offsets[0] == offsets[1]),
        )
    return paths.num_proved


def inverse_of_slots() -> int:
    """Slots, inverse: for each column, block, rank and offset l < block_size, the token at position
    column * V + (l // I * W + rank) * I + l % I has the slot block * block_size + l.
    """
    group, (column, a, rnd, rest) = Group(), integers("column a round rest")
    position = column * group.width + (rnd * group.w + group.rank) * group.i + rest
    bounds = below(LIMIT, column, a, position), below(group.i, rest), below(group.k, rnd)
    paths = Paths(*group.bounds, *bounds)
    near = (column,), (rnd * group.w + group.rank,), (rnd,)
    inside = grows(rnd + 1, group.k, group.w * group.i), grows(group.rank + 1, group.w, group.i)
    paths.assumptions += inside
    for ((found, _),) in paths.run(lambda: group.slot([a], [position], near)):
        paths.prove(found == a * group.size + rnd * group.i + rest)
    return paths.num_proved


def kernel_blocks() -> int:
    """Kernel blocks: with ratio r and kernel blocks of s tokens, block b < 2^31 // r becomes the kernel
    blocks b * r + j below 2^31. Column c of kernel blocks is in column c // r of blocks.
    """
    text = re.search(r"int32_t>\((.*ids\[i\].*?)\);", text_of(TABLES))
    assert text, f"{TABLES} does not expand blocks"
    b, c, r, s, j, i, p = integers("b c r s j i p")
    sizes = below(LIMIT, r, s, r * s, least=1), below(r, j, i), below(LIMIT, b, c, p)
    paths = Paths(*sizes, b * r <= LIMIT - r, c * r <= LIMIT - r)
    expand = eval(f"lambda ids, ratio, k, i: {text[1]}")
    for _ in paths.run(lambda: None):
        one, two = (
            cast("int32_t")(expand([Value(block, "int32_t")], Value(r), Value(at), 0)).term
            for block, at in ((b, j), (c, i))
        )
        paths.prove(below(b * r + r, one, least=b * r))
        same = z3.And(b == c, j == i)
        paths.prove(z3.Implies(one == two, same), *compared(b, c, r))
        column, whole = paths.quotient(p, s), paths.quotient(p, r * s)
        inner = paths.quotient(column, r)
        lemmas = compared(inner, whole, r * s) + compared(column, inner * r + r - 1, s)
        paths.prove(inner == whole, *lemmas, *compared(inner * r, column, s))
    return paths.num_proved


def tokens_of_groups() -> int:
    """Transfer plans: each token of a local rank is matched with the remote rank, page and index that
    hold the same position, for block sizes, interleaves that divide them and world sizes below 2^31,
    and positions below 2^62.
    """
    t, tokens, world, rank, k, i, w, k2, i2 = integers("t tokens W rank k I w k2 i2")
    positive = below(LIMIT, world, k, i, w, k2, i2, k * i, k2 * i2, least=1)
    bounds = below(LIMIT, t), below(world, rank), (t + i) * world < 2**62, below(2**62, tokens)
    products = grows(t, LIMIT, world), grows(rank, world, i)
    paths, found = Paths(positive, *bounds, *products), []

    def divided(n: Value, by: Value) -> tuple[Value, Value]:
        quotient, rest = divmod(n, by)
        found.append((n.term, quotient.term))
        factors = by.term, world, world * i, w, i2, w * i2
        _now.facts += [
            *compared(quotient.term, n.term, *factors),
            *compared(1, by.term, quotient.term),
        ]
        return quotient, rest

    fake = SimpleNamespace(arange=lambda n: Value(t), divmod=divided)
    space = {"np": fake, "lcm": lambda *_: Value(tokens), "TokensOfGroup": patterns.TokensOfGroup}
    run = FunctionType(patterns.tokens_of_group.__code__, space)
    names = "tokens_per_page", "cp_world_size", "block_size", "cp_interleave"
    mine, theirs = (
        SimpleNamespace(**dict(zip(names, map(Value, (tokens, *each)))))
        for each in ((world, k * i, i), (w, k2 * i2, i2))
    )
    for token in paths.run(lambda: run(mine, theirs, Value(rank))):
        here, index, there, page, at = (each.term for each in token)
        (_, _), (_, _), (position, chunk), (_, round_), (n, _) = found[-5:]
        paths.prove(z3.And(here * k * i + index == t, below(k * i, index)))
        paths.prove(z3.And(below(w, there), below(k2 * i2, at), page >= 0))
        # Index l of a rank's tokens is at position (l // I * W + rank) * I + l % I.
        paths.prove(page * k2 * i2 + at == n)
        again = paths.quotient(n, i2)
        paths.prove(again == round_, *compared(again, round_, i2))
        place = (again * w + there) * i2 + n - again * i2
        lemmas = compared(again, round_, i2, w, w * i2)
        paths.prove(place == position, *lemmas, *compared(chunk, round_ * w + there, i2))
    return paths.num_proved


def permutation() -> int:
    """BlockPermute: `source` is a permutation of a unit's rows, for units below 2^31 rows: its inverse
    transposes the matrix again.
    """
    rows, columns, run, r = integers("rows columns run r")
    unit = rows * columns * run
    paths = Paths(below(LIMIT, rows, columns, run, unit, least=1), below(unit, r))
    by_run = Divisor(run, (rows * columns,), (rows,))
    by_columns = Divisor(columns, (rows,), (run, rows))
    names = {"run": by_run, "columns": by_columns, "matrix_rows": Value(rows, "uint32_t")}
    source = translated(PERMUTE, "source", **names)
    for found in paths.run(lambda: source(Value(r, "uint32_t"))):
        to, i = by_run.found[-1], by_columns.found[-1]
        j = to - i * columns
        some = compared(j, columns, rows, rows * run)
        paths.prove(below(unit, found.term), *some, *compared(j * rows + i, rows * columns, run))
        one = paths.quotient(found.term, run)
        paths.prove(one == j * rows + i, *compared(one, j * rows + i, run))
        two = paths.quotient(one, rows)
        paths.prove(two == j, *compared(two, j, rows))
        again = ((one - two * rows) * columns + two) * run + found.term - one * run
        lemmas = compared(two, j, rows, run) + compared(one, j * rows + i, run, columns * run)
        paths.prove(again == r, *lemmas, *compared(two, j, rows * columns * run))
    return paths.num_proved


def rows_of_units() -> int:
    """BlockPermute: two rows of a block are at least `row_bytes` apart and inside the block, for strides
    that nest and blocks below 2 GiB.
    """
    inner, outer, num_bytes, step, leap, r, q = integers("inner outer bytes step leap r q")
    nested = z3.And(num_bytes >= 1, step >= num_bytes, leap >= inner * step, outer * leap < LIMIT)
    paths = Paths(below(LIMIT, inner, outer, inner * outer, least=1), nested)
    paths.assumptions += below(inner * outer, r, q), r != q
    names = {"block_rows": Divisor(inner * outer), "inner_rows": Divisor(inner, (outer,), (step,))}
    strides = {"block_stride": Value(outer * leap), "outer_stride": Value(leap)}
    place = translated(PERMUTE, "place", **names, **strides, inner_stride=Value(step))
    unit = SimpleNamespace(first_id=0, first_row=0)

    def places() -> list:
        paths.facts += [grows(x, y, leap) for x in (0, 1) for y in (outer, inner)]
        return [
            place(unit, Row(Value(z3.IntVal(0))), Value(each, "uint32_t")).term for each in (r, q)
        ]

    for one, two in paths.run(places):
        a, b = names["inner_rows"].found[-2:]
        lemmas = compared(a, b, leap, inner * step) + compared(r - a * inner, q - b * inner, step)
        lemmas += compared(r - a * inner, inner, step) + compared(q - b * inner, inner, step)
        paths.prove(z3.Or(one - two >= num_bytes, two - one >= num_bytes), *lemmas)
        paths.prove(below(outer * leap - num_bytes + 1, one), *lemmas, *compared(a, outer, leap))
    return paths.num_proved


def pages_of_slots() -> int:
    """TokenPages: the places of two slots below 2^31 are at least `offset_stride` apart, for blocks of
    any size and strides that nest, below 2^62 bytes in all.
    """
    size, step, leap, p, q = integers("size step leap p q")
    paths = Paths(below(LIMIT, size, least=1), below(LIMIT, p, q), p != q, step >= 1)
    paths.assumptions += leap >= size * step, below(2**62, p * leap, q * leap, LIMIT * step)
    by_block = Divisor(size, (), (leap, size * step))
    strides = {"block_stride": Value(leap), "offset_stride": Value(step)}
    place = translated("csrc/ops/token_io.h", "page_place", by_block=by_block, **strides)
    for one, two in paths.run(lambda: [place(Value(each)).term for each in (p, q)]):
        a, b = by_block.found[-2:]
        x, y = p - a * size, q - b * size
        lemmas = compared(a, b, leap, size) + compared(x, y, step) + compared(x, size, step)
        lemmas += compared(y, size, step) + [grows(0, each, step) for each in (x, y)]
        paths.prove(z3.Or(one - two >= step, two - one >= step), *lemmas)
    return paths.num_proved


def pages_of_copies() -> int:
    """BlockCopy: if the first and the last page of a region are within 2^61 bytes, as `pages_span`
    checks, so are all pages; no address overflows for memory below 2^62.
    """
    base, offset, stride, page, num = integers("base offset stride page num")
    last = (num - 1) * stride + offset
    most = 2**61
    paths = Paths(below(LIMIT, num, least=1), below(num, page), below(2**62, base))
    paths.assumptions += (
        below(most, offset, last, least=-most),
        below(2**62, stride, least=-(2**62)),
    )
    region = SimpleNamespace(destination=Value(offset), destination_stride=Value(stride))
    to = translated("csrc/ops/copy_pages.h", "to", destination=Value(base))
    lemmas = [grows(page, num - 1, stride), grows(page, num - 1, -stride)]
    lemmas += [grows(0, page, stride), grows(0, page, -stride)]
    paths.assumptions += (*lemmas, *(grows(0, each, num - 1) for each in (stride, -stride)))
    for found in paths.run(lambda: to(region, Value(page))):
        low, high = z3.If(offset < last, offset, last), z3.If(offset < last, last, offset)
        paths.prove(z3.And(base + low <= found.term, found.term <= base + high))
    return paths.num_proved


def pages_of_transfers() -> int:
    """Transfer plans: runs in two pages of a region do not overlap, if each run lies in its page; for
    page numbers below 2^31 and regions below 2^62 bytes.
    """
    stride, a, b, x, y, n = integers("stride a b x y n")
    paths = Paths(below(LIMIT, a, b), a != b, stride >= 1, n >= 1, LIMIT * stride < 2**62)
    paths.assumptions += below(stride - n + 1, x, y), *compared(a, b, stride)
    paths.assumptions += tuple(grows(*each, stride) for each in ((a, LIMIT), (b, LIMIT), (0, a)))

    def address(page: Any, at: Any) -> Any:
        ids = Value(page)
        ids.shape = (1, 1)
        return fragments._addresses(ids, None, Value(stride), Value(at)).term

    for one, two in paths.run(lambda: (address(a, x), address(b, y))):
        paths.prove(z3.Or(one + n <= two, two + n <= one))
    return paths.num_proved


THEOREMS = [
    *(growth, division, slots, inverse_of_slots, kernel_blocks, tokens_of_groups),
    *(permutation, rows_of_units, pages_of_slots, pages_of_copies, pages_of_transfers),
]


def main() -> None:
    for theorem in THEOREMS:
        start = time.monotonic()
        num_proved = theorem()
        text = " ".join((theorem.__doc__ or "").split())
        print(f"{time.monotonic() - start:6.1f} s, {num_proved:4} claims: {text}", flush=True)


if __name__ == "__main__":
    main()
