# SPDX-License-Identifier: Apache-2.0
"""Parses PTX into kernels, which consist of basic blocks."""

from __future__ import annotations

import copy
import re
from typing import NamedTuple

_ENTRY = re.compile(r"\.entry ([\w$]+)\(([^)]*)\)[^{]*^\{(.*?)^\}$", re.S | re.M)
# The innermost braces around statements, that is, a scope of inline assembly.
_SCOPE = re.compile(r"\{((?:[^{};]*(?:\{[^{};]*\}[^{};]*)?;)+\s*)\}")
_STATEMENT = re.compile(r"\s*(?:([\w$]+):(?!:)|([^;]+);)")
_WORDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")  # operands
# Which threads an instruction waits for. Such an instruction is a basic block by itself.
_WAITS = {"bar.sync": "block", "bar.warp": "warp", "shfl": "warp", "vote": "warp"}
_WAITS["barrier.cluster.wait"] = "cluster"
# Instructions that order memory accesses. Each mutant lacks one of them.
ORDERS = re.compile(
    r"(bar|barrier|mbarrier|fence|membar)\.|griddepcontrol\.wait|cp\.async\.\S*(commit|wait)_group"
)


class Unknown(Exception):
    """Raised for PTX that the interpreter does not know."""


class Instruction(NamedTuple):
    name: str  # the opcode with all modifiers, such as ld.global.v4.u32
    operands: list[str]
    guard: str  # "%p1", "!%p1" or ""
    number: int  # within the kernel

    @property
    def text(self) -> str:
        return f"{self.name} {', '.join(self.operands)}".strip()

    @property
    def wait(self) -> str:
        return next((wait for name, wait in _WAITS.items() if self.name.startswith(name)), "")


class BasicBlock(NamedTuple):
    instructions: list[Instruction]
    target: int  # the basic block that the branch at the end leads to, or -1


def bits(kind: str) -> int:
    """Return the width of a type: 16 for "u16", and 1 for "pred"."""
    return 1 if kind == "pred" else int(kind.lstrip("usbf"))


class Kernel:
    def __init__(self, symbol: str, parameters: str, body: str):
        self.symbol = symbol
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.widths: dict[str, int] = {}  # of registers, by name or by name without number
        self.parameters: dict[str, int] = {}  # offsets
        self.shared: dict[str, int] = {}  # offsets
        self.parameter_bytes = self.shared_bytes = 0
        for align, kind, name, count in re.findall(
            r"\.param (?:\.align (\d+) )?\.(\w+) ([\w$]+)(?:\[(\d+)\])?", parameters
        ):
            size = bits(kind) // 8
            self.parameters[name] = _aligned(self.parameter_bytes, int(align or size))
            self.parameter_bytes = self.parameters[name] + size * int(count or 1)
        number = 0
        while scope := _SCOPE.search(body):  # rename its registers and labels
            number += 1
            names = re.findall(r"([\w$]+):(?!:)", scope[1])
            for declared in re.findall(r"\.reg \.\w+\s+([^;]*);", scope[1]):
                names += re.findall(r"\w+", declared)
            pattern = rf"\b({'|'.join(names) or '(?!)'})\b(?!\.)"
            inner = re.sub(pattern, rf"\1_of_{number}", scope[1])
            body = body[: scope.start()] + inner + body[scope.end() :]
        for label, statement in _STATEMENT.findall(body):
            if label:
                self.labels[label] = len(self.instructions)
            elif statement.startswith("."):
                self._declare(statement)
            else:
                guard, name, rest = re.match(r"(?:@(\S+)\s+)?(\S+)(.*)", statement, re.S).groups()
                words = _WORDS.findall(rest)
                self.instructions.append(
                    Instruction(name, words, guard or "", len(self.instructions))
                )
        self.shared_bytes = _aligned(self.shared_bytes, 16)

    def _declare(self, statement: str) -> None:
        if found := re.match(r"\.reg \.(\w+)\s+(.*)", statement):
            for name in re.findall(r"[%\w]+(?=<|,|\s|$)", found[2]):
                self.widths[name] = bits(found[1])
        elif found := re.match(r"\.shared \.align (\d+) \.b8 ([\w$]+)\[(\d+)\]", statement):
            self.shared[found[2]] = _aligned(self.shared_bytes, int(found[1]))
            self.shared_bytes = self.shared[found[2]] + int(found[3])
        elif not statement.startswith(".pragma"):
            raise Unknown(statement)  # such as .local, for spilled registers or indexed arrays

    def width(self, register: str) -> int:
        return self.widths.get(register) or self.widths[register.rstrip("0123456789")]

    def without(self, number: int) -> Kernel:
        """Return a mutant without this instruction."""
        mutant = copy.copy(self)
        mutant.instructions = list(self.instructions)
        mutant.instructions[number] = Instruction("nop", [], "", number)
        return mutant

    def blocks(self) -> list[BasicBlock]:
        code, begins = self.instructions, {0, *self.labels.values()}
        for i in code:
            if i.wait:
                begins |= {i.number, i.number + 1}
            elif i.name in ("bra", "bra.uni", "ret", "exit"):
                begins.add(i.number + 1)
        starts = sorted(begins - {len(code)})
        blocks = []
        for start, end in zip(starts, [*starts[1:], len(code)], strict=True):
            last = code[end - 1]
            jumps = last.name.startswith("bra")
            target = starts.index(self.labels[last.operands[0]]) if jumps else -1
            blocks.append(BasicBlock(code[start:end], target))
        return blocks


def _aligned(offset: int, align: int) -> int:
    return -(-offset // align) * align


def parse(text: str) -> list[Kernel]:
    text = re.sub(r"//[^\n]*", "", text)
    kernels = [Kernel(*entry) for entry in _ENTRY.findall(text)]
    for name in re.findall(r"\.extern \.shared \.align \d+ \.b8 ([\w$]+)\[\]", text):
        for kernel in kernels:
            kernel.shared[name] = kernel.shared_bytes
    return kernels
