# SPDX-License-Identifier: Apache-2.0
"""Parses the output of cuobjdump for compiled kernels: resources, memory accesses, loads in flight.

The figures are static: they count instructions in the code, not executed instructions. A load is in
flight from its issue until an instruction uses its registers. Loads complete in order, so using the
result of a load also completes all earlier loads.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field

_FUNCTION = re.compile(r"^\s*Function\s*:?\s*(\w+):?\s*$")
_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);"
)
_RESOURCE = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")
_REGISTER = re.compile(r"(?<![A-Z0-9])R(\d+)\b")
_ADDRESS = re.compile(r"\b0x([0-9a-f]+)\b")

_GLOBAL_LOADS = ("LDG", "LD")  # LD is used if the compiler does not know the address space
_GLOBAL_STORES = ("STG", "ST")
_LOCAL = ("LDL", "STL")
# Instructions that wait for cp.async or other threads.
_WAITS = ("DEPBAR", "BAR", "WARPSYNC")


@dataclass(frozen=True)
class Instruction:
    address: int
    predicate: str  # "" if the instruction is always executed
    opcode: str  # including modifiers, as in LDG.E.128
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def modifiers(self) -> list[str]:
        return self.opcode.split(".")[1:]

    @property
    def width(self) -> int:
        """Return the number of bytes that one thread moves in a load or store."""
        for modifier in self.modifiers:
            if modifier in ("128", "64"):
                return int(modifier) // 8
            if modifier in ("U8", "S8"):
                return 1
            if modifier in ("U16", "S16"):
                return 2
        return 4

    @property
    def is_async_load(self) -> bool:
        return self.name == "LDGSTS"

    @property
    def is_load(self) -> bool:
        return self.name in _GLOBAL_LOADS or self.is_async_load

    @property
    def is_store(self) -> bool:
        return self.name in _GLOBAL_STORES

    @property
    def registers(self) -> set[int]:
        return {int(number) for number in _REGISTER.findall(self.operands)}

    @property
    def target(self) -> int | None:
        """Return the target address of a branch."""
        if self.name != "BRA":
            return None
        addresses = _ADDRESS.findall(self.operands)
        return int(addresses[-1], 16) if addresses else None

    @property
    def ends_flow(self) -> bool:
        """Return whether execution never continues with the next instruction."""
        return self.name in ("EXIT", "BRA", "RET", "BRX") and not self.predicate


@dataclass
class Kernel:
    """One kernel entry: its mangled name, resources and code."""

    symbol: str
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    local_bytes: int = 0
    code: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True)
class Figures:
    """The figures of one kernel entry. `shared_bytes` excludes dynamic shared memory."""

    kernel: str
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    local_accesses: int  # accesses to spilled registers or to arrays indexed at run time
    instructions: int
    loads_in_flight: dict[int, int]  # maximum number at any point in the code, by bytes per load
    stores: dict[int, int]  # number of stores in the code, by bytes per store
    load_bytes: int  # width of the loads with the most bytes in flight; 0: no global loads
    store_bytes: int  # width of the stores that move the most bytes; 0: no global stores
    # Counted in the loops that load and store; None if there are no stores.
    instructions_per_16_bytes: float | None


def parse(sass: str, resources: str) -> list[Kernel]:
    """Parse the kernels of one object file from `cuobjdump -sass` and `cuobjdump -res-usage`."""
    kernels: dict[str, Kernel] = {}
    current = None
    for line in sass.splitlines():
        if found := _FUNCTION.match(line):
            current = kernels.setdefault(found[1], Kernel(found[1]))
        elif current is not None and (found := _INSTRUCTION.match(line)):
            address, predicate, opcode, operands = found.groups()
            # PT and UPT are always true.
            predicate = "" if predicate in (None, "PT", "UPT") else predicate
            if opcode != "NOP":
                current.code.append(
                    Instruction(int(address, 16), predicate, opcode, operands.strip())
                )
    current = None
    described = set()
    for line in resources.splitlines():
        if found := _FUNCTION.match(line):
            current = kernels.get(found[1])
        elif current is not None and "REG:" in line:
            values = {name: int(number) for name, number in _RESOURCE.findall(line)}
            current.registers, current.stack_bytes = values["REG"], values["STACK"]
            current.shared_bytes, current.local_bytes = values["SHARED"], values["LOCAL"]
            described.add(current.symbol)
    missing = kernels.keys() - described
    if missing:
        raise ValueError(
            f"no resources are given for {sorted(missing)}: expected the resources of every kernel"
        )
    return list(kernels.values())


def figures(kernel: Kernel, name: str) -> Figures:
    loads = loads_in_flight(kernel.code)
    stores = dict(sorted(Counter(i.width for i in kernel.code if i.is_store).items()))
    load_bytes, store_bytes = main_width(loads), main_width(stores)
    return Figures(
        kernel=name,
        registers=kernel.registers,
        stack_bytes=kernel.stack_bytes,
        local_bytes=kernel.local_bytes,
        shared_bytes=kernel.shared_bytes,
        local_accesses=sum(i.name in _LOCAL for i in kernel.code),
        instructions=len(kernel.code),
        loads_in_flight=loads,
        stores=stores,
        load_bytes=load_bytes,
        store_bytes=store_bytes,
        instructions_per_16_bytes=instructions_per_16_bytes(kernel.code, load_bytes, store_bytes),
    )


def main_width(number: dict[int, int]) -> int:
    """Return the access width that moves the most bytes, or 0 if there are no accesses."""
    return max(number, key=lambda width: (width * number[width], width), default=0)


def loads_in_flight(code: list[Instruction]) -> dict[int, int]:
    """Return the maximum number of global loads in flight, by width in bytes."""
    most: Counter[int] = Counter()
    in_flight: list[tuple[Instruction, set[int]]] = []
    for instruction in code:
        named = instruction.registers
        for i in reversed(range(len(in_flight))):
            if in_flight[i][1] & named:
                in_flight = in_flight[i + 1 :]
                break
        if instruction.name in _WAITS:
            in_flight = [load for load in in_flight if not load[0].is_async_load]
        if instruction.is_load:
            in_flight.append((instruction, loaded_registers(instruction)))
            most |= Counter(load.width for load, _ in in_flight)  # the larger count of each width
        if instruction.ends_flow:
            in_flight = []
    return dict(sorted(most.items()))


def loaded_registers(load: Instruction) -> set[int]:
    first = _REGISTER.match(load.operands)
    if load.is_async_load or first is None:
        return set()
    return {int(first[1]) + i for i in range(max(load.width // 4, 1))}


def loops(code: list[Instruction]) -> list[list[Instruction]]:
    """Return the instructions between each backward branch and its target."""
    ranges = {(i.target, i.address) for i in code if i.target is not None and i.target < i.address}
    return [[i for i in code if begin <= i.address <= end] for begin, end in sorted(ranges)]


def main_loop(code: list[Instruction], accesses: set[int]) -> list[Instruction]:
    """Return the innermost loop with the most instructions in `accesses`, or all code if there is
    no loop.
    """

    def count(loop: list[Instruction]) -> int:
        return sum(i.address in accesses for i in loop)

    found = [loop for loop in loops(code) if count(loop) > 0]
    innermost = [
        loop
        for loop in found
        if not any(
            other is not loop
            and loop[0].address <= other[0].address
            and other[-1].address <= loop[-1].address
            for other in found
        )
    ]
    return max(innermost, key=count, default=code)


def instructions_per_16_bytes(
    code: list[Instruction], load_bytes: int, store_bytes: int
) -> float | None:
    """Return the instructions per 16 bytes moved in the loop that loads and in the loop that stores."""
    if load_bytes == 0 or store_bytes == 0:
        return None
    total = 0.0
    counted = None
    for width, is_one in (
        (load_bytes, Instruction.is_load.fget),
        (store_bytes, Instruction.is_store.fget),
    ):
        accesses = {i.address for i in code if is_one(i) and i.width == width}
        loop = main_loop(code, accesses)
        if counted is not None and loop[0] == counted[0] and loop[-1] == counted[-1]:
            continue  # one loop both loads and stores
        counted = loop
        moved = width * sum(i.address in accesses for i in loop)
        total += len(loop) * 16 / moved
    return round(total, 1)


def demangled(symbols: list[str]) -> list[str]:
    """Return readable names: token_io_kernel<MoveBytes<uint4>, Direction 0>."""
    done = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True
    )
    return [short_name(line) for line in done.stdout.splitlines()]


def short_name(name: str) -> str:
    """Remove the parts common to all names: namespaces, the result and the parameters."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = re.sub(r"\b(?:kvcache|c10)::", "", name)
    name = re.sub(r"SmallFloat<unsigned char, (\d)u[^>]*>", _small_float, name)
    name = re.sub(r"\((\w+)\)(\d+)", r"\1 \2", name)  # (Direction)0 becomes Direction 0
    return name.split("(", 1)[0]


def _small_float(found: re.Match) -> str:
    return {"3": "e4m3", "2": "e5m2"}.get(found[1], found[0])
