# SPDX-License-Identifier: Apache-2.0
"""The expected machine code of each kernel on sm_90 and sm_100.

No kernel entry may use local memory, that is, spilled registers or arrays indexed at run time.
EXPECTED lists all other expectations, one line per kernel. For kernels without a line, only the
general checks apply. Add a line for the widest entry of each new kernel that moves bytes. If a
figure gets worse, give the reason in a comment on its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from benchmarks.sass import Figures


@dataclass(frozen=True)
class Expectation:
    kernel: str  # a regular expression that matches the full name
    max_registers: int
    load_bytes: int = 0  # width of the global loads; 0: not checked
    loads_in_flight: int = 0  # minimum number of loads of that width
    store_bytes: int = 0  # width of the global stores; 0: not checked
    max_instructions_per_16_bytes: float | None = None
    sm_100: Mapping[str, float] = field(default_factory=dict)  # fields that differ on sm_100

    def on(self, arch: str) -> Expectation:
        return replace(self, **self.sm_100) if arch == "sm_100" else self


EXPECTED = [
    Expectation(r"copy_blocks_kernel<\d+ul, true>", 48, 16, 8, 16, 20),
    # The loop contains code for all access widths. With 64 registers, two thread blocks fit on an
    # SM.
    Expectation(r"copy_blocks_kernel<\d+ul, false>", 64, 16, 8, 16, 66),
    Expectation("permute_kernel<uint4, true, false>", 32, 16, 8, 16, 39),
    # The first copy starts before the last id is loaded.
    Expectation(
        "permute_kernel<uint4, false, false>",
        *(48, 16, 7, 16, 96),
        sm_100={"max_instructions_per_16_bytes": 111},
    ),
    # The cluster variant computes a rank and a shared-memory address for each vector.
    Expectation(
        "permute_kernel<uint4, true, true>", 32, 16, 8, 16, 49, sm_100={"max_registers": 36}
    ),
    Expectation(
        "permute_kernel<uint4, false, true>",
        *(48, 16, 6, 16, 110),
        sm_100={"max_instructions_per_16_bytes": 125},
    ),
    Expectation("rotate_kernel<uint4>", 40, 16, 1, 16, 90),
    # Loading the table entry and the row length together takes two additional registers. In the
    # per-request variant, each thread loads four entries of query_start_loc at once and searches
    # shared memory.
    Expectation(r"slot_mapping_kernel<\w+, false>", 26),
    Expectation(r"slot_mapping_kernel<\w+, true>", 29, 4, 5),
    # A warp processes 32 segments at once instead of one, which takes eight additional registers.
    Expectation("update_kernel", 30),
    Expectation(
        "gather_kernel",
        *(28, 16, 1, 16, 23),
        sm_100={"max_registers": 32, "max_instructions_per_16_bytes": 24},
    ),
    # Four tokens are in flight, each with a position and a check. Tokens without a slot are set to
    # zero.
    Expectation(r"token_io_kernel<MoveBytes<uint4>, Direction 0>", 46, 16, 4, 16, 17),
    Expectation(r"token_io_kernel<MoveBytes<uint4>, Direction 1>", 46, 16, 4, 16, 27),
    # With two token vectors in flight instead of four, the kernel uses twenty fewer registers, so
    # ten thread blocks fit instead of six. The last figure counts the instructions of the path with
    # a true division, which handles two vectors instead of four.
    Expectation(r"token_io_kernel<ToFp8<\w+, \w+, 8>, Direction 0>", 48, 16, 2, 8, 141),
    Expectation(r"token_io_kernel<ToFp8<float, \w+, 4>, Direction 0>", 40, 16, 2, 4, 117),
    Expectation(r"token_io_kernel<FromFp8<\w+, \w+, 8>, Direction 1>", 40, 8, 4, 16, 121),
    # The slots of four tokens (8 bytes each) have more bytes in flight than the data, so the last
    # figure does not count the data.
    Expectation(r"token_io_kernel<FromFp8<float, \w+, 4>, Direction 1>", 32, 8, 4, 16, 222),
    # Ids are loaded one at a time, because page lists may be unaligned.
    Expectation("attention_metadata_kernel", 48, 4, 8, 4),
    Expectation(r"first_bad_kernel<\w+>", 32),
]


def failures(
    figures: Iterable[Figures],
    expected: Iterable[Expectation] = EXPECTED,
    arch: str = "sm_90",
) -> list[str]:
    """Return messages about kernels that violate EXPECTED, and about entries without a kernel."""
    figures = list(figures)
    found = [line for f in figures for line in _general(f)]
    for expectation in expected:
        matching = [f for f in figures if re.fullmatch(expectation.kernel, f.kernel)]
        if not matching:
            found.append(f"{expectation.kernel}: no kernel has this name")
        found += [line for f in matching for line in _special(f, expectation.on(arch))]
    return found


def _general(f: Figures) -> list[str]:
    return [
        f"{f.kernel}: {what} is {found}: expected 0"
        for what, found in (
            ("stack bytes", f.stack_bytes),
            ("local memory bytes", f.local_bytes),
            ("loads and stores of local memory", f.local_accesses),
        )
        if found
    ]


def _special(f: Figures, e: Expectation) -> list[str]:
    lines = []

    def at_most(what: str, found: float | None, most: float | None) -> None:
        if most is not None and (found is None or found > most):
            lines.append(f"{f.kernel}: {what} is {found}: expected at most {most}")

    at_most("registers", f.registers, e.max_registers)
    at_most(
        "instructions per 16 bytes", f.instructions_per_16_bytes, e.max_instructions_per_16_bytes
    )
    for what, found, wanted in (
        ("bytes of a global load", f.load_bytes, e.load_bytes),
        ("bytes of a global store", f.store_bytes, e.store_bytes),
    ):
        if wanted and found != wanted:
            lines.append(f"{f.kernel}: {what} is {found}: expected {wanted}")
    in_flight = f.loads_in_flight.get(e.load_bytes, 0)
    if e.load_bytes and in_flight < e.loads_in_flight:
        lines.append(
            f"{f.kernel}: loads of {e.load_bytes} bytes in flight are {in_flight}: "
            f"expected at least {e.loads_in_flight}"
        )
    return lines
