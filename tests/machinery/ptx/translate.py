# SPDX-License-Identifier: Apache-2.0
"""Translates basic blocks of PTX into Python functions over numpy arrays, one element per thread.

A function takes the machine, the registers, and the threads as a slice or an array of indices. It
returns the next basic block, or a predicate and the blocks that follow if it is true or false.
Registers are unsigned arrays, which instructions view as signed or floating-point numbers.
"""

from __future__ import annotations

import re

import numpy as np
import torch

from tests.machinery.ptx.program import Kernel, Unknown, bits

END = -1  # follows the last basic block

# The kinds of an instruction's result and operands, and its value. Kinds: the type of the opcode (t),
# a type twice as wide (w), u32 (i), a predicate (p), an address (a). {w}: the width of the type.
_TABLE = {
    "add": ("t", "tt", "{0} + {1}"),
    "sub": ("t", "tt", "{0} - {1}"),
    "mul.f32": ("t", "tt", "{0} * {1}"),
    "mul.rn.f32": ("t", "tt", "{0} * {1}"),
    "mul.lo": ("t", "tt", "{0} * {1}"),
    "mul.wide": ("w", "tt", "{0}.astype({wide}) * {1}"),
    "mad.lo": ("t", "ttt", "{0} * {1} + {2}"),
    "mad.wide": ("w", "ttw", "{0}.astype({wide}) * {1} + {2}"),
    "fma.rn.f32": ("t", "ttt", "({0}.astype(np.longdouble) * {1} + {2}).astype(np.float32)"),
    "div": ("t", "tt", "divided({0}, {1})"),
    "rcp.rn.f32": ("t", "t", "np.float32(1) / {0}"),
    "sqrt.rn.f32": ("t", "t", "np.sqrt({0})"),
    "min": ("t", "tt", "np.minimum({0}, {1})"),
    "max": ("t", "tt", "np.maximum({0}, {1})"),
    "abs": ("t", "t", "np.abs({0})"),
    "neg": ("t", "t", "-{0}"),
    "not": ("t", "t", "~{0}"),
    "and": ("t", "tt", "{0} & {1}"),
    "or": ("t", "tt", "{0} | {1}"),
    "xor": ("t", "tt", "{0} ^ {1}"),
    "shl": ("t", "ti", "{0} << np.minimum({1}, {w}).astype({0}.dtype)"),
    "shr": ("t", "ti", "{0} >> np.minimum({1}, {w}).astype({0}.dtype)"),
    "shf.l.wrap": ("t", "tti", "({1} << ({2} & 31)) | ({0} >> 1 >> (np.uint32(31) - ({2} & 31)))"),
    "brev": ("t", "t", "reversed_bits({0})"),
    "prmt": ("t", "ttt", "permuted({0}, {1}, {2})"),
    "bfind.shiftamt": ("i", "t", "np.uint32(32) - np.frexp({0})[1].astype(np.uint32)"),
    "selp": ("t", "ttp", "np.where({2}, {0}, {1})"),
    "mapa": ("i", "ii", "m.map_rank({0}, {1})"),
    "vote.sync.ballot": ("i", "pi", "m.ballot(w, {0}, {1})"),
    "bar.warp": ("", "i", "m.warp_barrier(w, {0})"),
    "barrier.cluster.arrive": ("", "", "m.cluster_arrive(w)"),
    "barrier.cluster.arrive.relaxed": ("", "", "m.cluster_arrive(w, release=False)"),
    "griddepcontrol.wait": ("", "", "m.dependency_wait(w)"),
    "cp.async": ("", "aai", "m.async_copy(w, {0}, {1}, {2})"),
    "cp.async.commit_group": ("", "", "m.commit(w)"),
    "cp.async.wait_group": ("", "i", "m.wait_for_groups(w, {0})"),
}
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_TABLE |= {f"setp.{n}": ("p", "tt", f"{{0}} {op} {{1}}") for n, op in _COMPARED.items()}
_UNORDERED = {"ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}  # also true for NaN
_TABLE |= {f"setp.{n}": ("p", "tt", f"~({{0}} {op} {{1}})") for n, op in _UNORDERED.items()}
# Nothing to do: the machine ends these barriers, and launches do not overlap.
_TABLE |= {"nop": ("", "", "pass"), "bar.sync": ("", "i", "pass")}
_TABLE |= {"barrier.cluster.wait": ("", "", "pass")}
_TABLE |= {"griddepcontrol.launch_dependents": ("", "", "pass")}
_UNKNOWN = {
    "ftz",
    "sat",
    "approx",
    "hi",
    "cc",
    "rz",
    "rm",
    "rp",
    "relu",
    "full",
    "NaN",
}  # modifiers that change the value

_FLOATS = {"f32": torch.float32, "f16": torch.float16, "f16x2": torch.float16}
_FLOATS |= {"bf16": torch.bfloat16, "e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}
_RAW = {"f32": "b32", "f16": "b16", "f16x2": "b32", "bf16": "b16", "e4m3x2": "b16", "e5m2x2": "b16"}


def divided(a, b):
    """Divide. Quotients of integers are truncated."""
    if a.dtype.kind == "f":
        return a / b
    return a // b + ((a % b != 0) & ((a < 0) != (b < 0))).astype(a.dtype)


def permuted(a, b, selector):
    """Return the four bytes of a and b that the selector names, or copies of their signs."""
    both, found = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.zeros_like(a)
    for i in range(4):
        chosen = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> (chosen & 7).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & 255
        byte = np.where(chosen > 7, (byte >> 7) * 255, byte)
        found |= byte.astype(np.uint32) << np.uint32(8 * i)
    return found


def reversed_bits(a):
    low_bit_first = np.unpackbits(a[:, None].view(np.uint8), axis=1, bitorder="little")
    return np.packbits(low_bit_first, axis=1).view(">u4")[:, 0].astype(np.uint32)


def converted(to: str, source: str, *values):
    """Convert between floating-point formats, given and returned as bits, like torch (NaNs too)."""
    numbers = torch.from_numpy(np.stack(values[::-1], 1)).view(_FLOATS[source])
    if to in ("e4m3x2", "e5m2x2"):
        largest = torch.finfo(_FLOATS[to]).max
        numbers = numbers.clamp(-largest, largest)
    result = numbers.to(_FLOATS[to]).view(torch.uint8).numpy()
    return result.view(f"u{bits(_RAW[to]) // 8}")[:, 0]


def dtype(kind: str) -> str:
    """Return the dtype of a type: "np.uint16" for "b16", "np.float32" for "f32"."""
    name = {"s": "int", "f": "float"}.get(kind[0], "uint")
    return "bool" if kind == "pred" else f"np.{name}{bits(kind)}"


class Code:
    """A translated kernel. Basic blocks are compiled when they first run."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.blocks = kernel.blocks()
        self.waits = [block.instructions[0].wait for block in self.blocks]
        uses = [
            {n for i in block.instructions for n in re.findall(r"%[a-z]+\d+|\w+_of_\d+", str(i))}
            for block in self.blocks
        ]
        count: dict[str, int] = {}
        for name in (name for names in uses for name in names):
            count[name] = count.get(name, 0) + 1
        # The registers that several basic blocks use. The others are local variables.
        self.kept = {name: n for n, name in enumerate(n for n in count if count[n] > 1)}
        self._functions: dict[int, object] = {}
        self._names = {"np": np, **globals()}

    def registers(self, count: int) -> list[np.ndarray]:
        widths = (self.kernel.width(name) for name in self.kept)
        return [np.zeros(count, bool if w == 1 else f"u{w // 8}") for w in widths]

    def function(self, n: int):
        if n not in self._functions:
            exec(compile(self._source(n), f"{self.kernel.symbol}:{n}", "exec"), self._names)
            self._functions[n] = self._names[f"block_{n}"]
        return self._functions[n]

    def _source(self, n: int) -> str:
        self._written: set[str] = set()
        self._loaded: list[str] = []
        following = n + 1 if n + 1 < len(self.blocks) else END
        result, lines = str(following), []
        for i in self.blocks[n].instructions:
            if i.name.startswith("bra"):
                target = self.blocks[n].target
                result = (
                    f"{self._read(i.guard, 'pred')}, {target}, {following}" if i.guard else target
                )
            elif i.guard:
                raise Unknown(f"@{i.guard} {i.text}")
            elif i.name in ("ret", "exit"):
                result = END
            else:
                try:
                    new = self._lines(i.name, i.operands)
                except (KeyError, ValueError) as error:
                    raise Unknown(i.text) from error
                calls = re.search(r"m\.(?!special|full)", " ".join(new))
                lines += [f"m.at = {i.number}", *new] if calls else new
        loads = [f"{r.lstrip('%')} = R[{self.kept[r]}][w]" for r in self._loaded]
        written = [r for r in self._written if r in self.kept]
        stores = [f"R[{self.kept[r]}][w] = {r.lstrip('%')}" for r in written]
        body = "\n    ".join([*loads, *lines, *stores, f"return {result}"])
        return f"def block_{n}(m, R, w):\n    {body}\n"

    def _read(self, operand: str, kind: str) -> str:
        """Return an expression for an operand, as an array or number of the type."""
        if operand.startswith("!"):
            return f"~{self._read(operand[1:], kind)}"
        if operand.startswith("["):
            base, _, offset = operand.strip("[]").partition("+")
            kind = "u32" if base in self.kernel.parameters else f"u{self._width(base)}"
            return self._read(base, kind) + (f" + {self._read(offset, kind)}" if offset else "")
        if re.match(r"-?\d", operand):
            value = int(operand.replace("0f", "0x"), 16 if operand[:2] == "0f" else 0)
            raw = np.array(value % (1 << bits(kind)), f"u{bits(kind) // 8}")
            self._names[name := f"c{len(self._names)}"] = raw.view(dtype(kind)[3:])[()]
            return name
        if operand in self.kernel.shared or operand in self.kernel.parameters:
            offset = (self.kernel.shared | self.kernel.parameters)[operand]
            return f"m.full(w, {self._read(str(offset), kind)})"
        if special := re.fullmatch(r"%(n?(?:tid|ctaid)\.[xyz]|laneid)", operand):
            return f"m.special[{special[1]!r}][w]"
        if operand not in self._written and operand not in self._loaded:
            self._loaded.append(operand)
        name = operand.lstrip("%")
        if bits(kind) < self._width(operand):
            name = f"{name}.astype(np.uint{bits(kind)})"
        return name if kind[0] in "ubp" else f"{name}.view({dtype(kind)})"

    def _width(self, name: str) -> int:
        return 32 if name in self.kernel.shared else self.kernel.width(name)

    def _write(self, operand: str, value: str, kind: str) -> str:
        if operand == "_":
            return value
        width, name = self._width(operand), operand.lstrip("%")
        self._written.add(operand)
        if kind == "pred":
            return f"{name} = {value}"
        if bits(kind) < width:
            value = f"({value}).astype({dtype(kind).rstrip('0123456789')}{width})"
        return f"{name} = ({value}).view(np.uint{width})"

    def _lines(self, name: str, operands: list[str]) -> list[str]:
        parts = name.replace("::", ".").split(".")
        family, kind = parts[0], parts[-1]
        if _UNKNOWN & set(parts):
            raise Unknown(name)
        if family in ("ld", "st"):
            return self._memory(parts[1], kind, operands, family)
        if family == "mov" or name.startswith("cvta.to.global"):
            return self._move(*operands, kind if kind == "pred" else f"u{bits(kind)}")
        if family == "shfl":
            target, _, found = operands[0].partition("|")
            values = ", ".join(self._read(o, "u32") for o in operands[1:])
            result = [self._write(target, "got", "u32"), self._write(found or "_", "there", "pred")]
            return [f"got, there = m.shuffle(w, {parts[2]!r}, {values})", *result]
        if family == "cvt" and re.fullmatch(r"cvt\.(rn\.f32\.[su]\d+|rzi\.[su]\d+\.f32)", name):
            value = f"{self._read(operands[1], kind)}.astype({dtype(parts[-2])})"  # truncates
            return [self._write(operands[0], value, parts[-2])]
        if family == "cvt" and (parts[-2] in _RAW or kind in _RAW):
            if not (parts[-2] in _RAW and kind in _RAW):
                raise Unknown(name)
            values = ", ".join(self._read(o, _RAW[kind]) for o in operands[1:])
            value = f"converted({parts[-2]!r}, {kind!r}, {values})"
            return [self._write(operands[0], value, _RAW[parts[-2]])]
        if family == "cvt":
            value = f"{self._read(operands[1], kind)}.astype({dtype(parts[-2])})"
            return [self._write(operands[0], value, parts[-2])]
        keys = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        entry = next((_TABLE[key] for key in keys if key in _TABLE), None)
        if entry is None:
            raise Unknown(name)
        result, kinds, value = entry
        wide = kind[0] + str(2 * bits(kind)) if "w" in result + kinds else ""
        names = {"t": kind, "w": wide, "i": "u32", "p": "pred", "a": "u32"}
        inputs = operands[len(result) :]
        values = [self._read(o, names[k]) for o, k in zip(inputs, kinds, strict=True)]
        width = bits(kind) if "{w}" in value else 0
        value = value.format(*values, w=width, wide=wide and dtype(wide))
        return [self._write(operands[0], value, names[result]) if result else value]

    def _move(self, to: str, source: str, kind: str) -> list[str]:
        pieces = re.findall(r"[^{},\s]+", to if to[0] == "{" else source)
        step = bits(kind) // len(pieces)
        if to[0] == "{":  # splits a register
            whole = self._read(source, kind)
            each = (f"({whole} >> {n * step}).astype(np.uint{step})" for n in range(len(pieces)))
            return [self._write(p, v, f"u{step}") for p, v in zip(pieces, each, strict=True)]
        if source[0] == "{":  # joins registers
            values = (self._read(piece, f"u{step}") for piece in pieces)
            joined = (f"({v}.astype({dtype(kind)}) << {n * step})" for n, v in enumerate(values))
            return [self._write(to, " | ".join(joined), kind)]
        value = self._read(source, kind)
        return [self._write(to, f"m.full(w, {value})", kind)]

    def _memory(self, space: str, kind: str, operands: list[str], family: str) -> list[str]:
        if space not in ("global", "shared", "param"):
            raise Unknown(f"{family}.{space}")
        place, values = operands[::-1] if family == "ld" else operands
        names = re.findall(r"[^{},\s]+", values)
        call = f"(w, {space!r}, {self._read(place, '')}, {bits(kind) // 8}, "
        if family == "st":
            raw = (self._read(name, f"u{bits(kind)}") for name in names)
            return [f"m.store{call}[{', '.join(raw)}])"]
        kind = kind if kind[0] == "s" else f"u{bits(kind)}"
        view = f".view({dtype(kind)})"
        results = [self._write(name, f"got[{n}]{view}", kind) for n, name in enumerate(names)]
        return [f"got = m.load{call}{len(names)})", *results]
