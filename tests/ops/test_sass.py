# SPDX-License-Identifier: Apache-2.0
"""Tests the machine code parser and the checks of expectations on handwritten snippets."""

from dataclasses import replace

import pytest

from benchmarks import sass
from benchmarks.cuda_check import by_width, print_table
from benchmarks.sass_expectations import Expectation, failures


def listing(*lines, symbol="copy"):
    """Format instructions like the output of cuobjdump -sass, with 16 bytes per instruction and
    with its encoding.
    """
    text = ["\tcode for sm_90", f"\t\tFunction : {symbol}", '\t.headerflags\t@"EF_CUDA_SM90"']
    for i, line in enumerate(lines):
        predicate, opcode = line.split(" ", 1) if line.startswith("@") else ("", line)
        text.append(f"        /*{16 * i:04x}*/  {predicate:>16} {opcode} ;   /* 0x00000a00 */")
        text.append(" " * 60 + "/* 0x000fe40000000800 */")
    return "\n".join(text)


def usage(symbol="copy", registers=16, stack=0, shared=0, local=0):
    return (
        f" Function {symbol}:\n  REG:{registers} STACK:{stack} SHARED:{shared} LOCAL:{local} "
        "CONSTANT[0]:4392 TEXTURE:0 SURFACE:0 SAMPLER:0\n"
    )


def figures(*lines, **resources):
    (kernel,) = sass.parse(listing(*lines), usage(**resources))
    return sass.figures(kernel, "copy<uint4>")


TWO_LOADS_THEN_STORES = (
    "LDG.E.EF.128 R4, desc[UR6][R2.64]",
    "@!P0 LDG.E.EF.128 R8, desc[UR6][R2.64+0x200]",
    "STG.E.EF.128 desc[UR6][R12.64], R4",
    "@!P0 STG.E.EF.128 desc[UR6][R12.64+0x200], R8",
    "EXIT",
)
ONE_AFTER_THE_OTHER = (
    "LDG.E.128 R4, desc[UR6][R2.64]",
    "STG.E.128 desc[UR6][R12.64], R4",
    "LDG.E.128 R8, desc[UR6][R2.64+0x200]",
    "STG.E.128 desc[UR6][R12.64+0x200], R8",
    "EXIT",
)


def test_resources_and_instructions_are_read():
    f = figures(*TWO_LOADS_THEN_STORES, "NOP", registers=40, stack=8, shared=1024, local=4)
    assert (f.registers, f.stack_bytes, f.shared_bytes, f.local_bytes) == (40, 8, 1024, 4)
    assert f.instructions == 5 and f.stores == {16: 2}


def test_each_kernel_of_a_file_has_its_own_code_and_resources():
    text = listing("EXIT", symbol="one") + "\n" + listing("MOV R1, R2", "EXIT", symbol="two")
    one, two = sass.parse(text, usage("one", registers=8) + usage("two", registers=9))
    assert (one.symbol, len(one.code), one.registers) == ("one", 1, 8)
    assert (two.symbol, len(two.code), two.registers) == ("two", 2, 9)


def test_kernel_without_resources_is_reported():
    with pytest.raises(ValueError, match=r"no resources are given for \['copy'\]"):
        sass.parse(listing("EXIT"), usage("another"))


@pytest.mark.parametrize(
    ("code", "in_flight"),
    [
        (TWO_LOADS_THEN_STORES, {16: 2}),
        (ONE_AFTER_THE_OTHER, {16: 1}),
        # Using any register of a vector waits for the vector's load.
        (["LDG.E.128 R4, [R2.64]", "IADD3 R9, R6, R1, RZ", "LDG.E.128 R12, [R2.64]"], {16: 1}),
        # The register after a vector is not part of the vector.
        (["LDG.E.128 R4, [R2.64]", "IADD3 R9, R8, R1, RZ", "LDG.E.128 R12, [R2.64]"], {16: 2}),
        # Overwriting a register also waits for its load.
        (["LDG.E R4, [R2.64]", "MOV R4, RZ", "LDG.E R5, [R2.64]"], {4: 1}),
        # Using a loaded register completes all loads up to that load, but no later load.
        (
            ["LDG.E R4, [R2.64]", "LDG.E R5, [R2.64]", "MOV R9, R4", "LDG.E R6, [R2.64]"]
            + ["LDG.E R7, [R2.64]"],
            {4: 3},
        ),
        (
            ["LDG.E R4, [R2.64]", "LDG.E R5, [R2.64]", "MOV R9, R5", "LDG.E R6, [R2.64]"],
            {4: 2},
        ),
        # Loads are counted separately by width, because ids, bytes and data are loaded with
        # different widths.
        (["LDG.E R4, [R2.64]", "LDG.E.U8 R5, [R2.64]", "LDG.E.64 R6, [R2.64]"], {1: 1, 4: 1, 8: 1}),
        # Execution does not continue after an unconditional exit.
        (["LDG.E R4, [R2.64]", "EXIT", "LDG.E R5, [R2.64]"], {4: 1}),
        (["LDG.E R4, [R2.64]", "@P0 EXIT", "LDG.E R5, [R2.64]"], {4: 2}),
        # Asynchronous copies use no destination registers, and each group of copies is awaited as a unit.
        (["LDGSTS.E.BYPASS.128 [R9], desc[UR8][R2.64]"] * 3 + ["LDGDEPBAR"], {16: 3}),
        (
            ["LDGSTS.E.BYPASS.128 [R9], desc[UR8][R2.64]", "LDGDEPBAR", "DEPBAR.LE SB0, 0x0"] * 2,
            {16: 1},
        ),
        (["LDS.128 R4, [R9]", "LDC R5, c[0x0][R3]", "LDL R6, [R1]"], {}),
    ],
)
def test_loads_in_flight_are_counted_until_their_first_use(code, in_flight):
    assert figures(*code).loads_in_flight == in_flight


def test_data_loads_are_those_with_the_most_bytes_in_flight():
    f = figures(*["LDG.E R20, [R2.64]"] * 3, *TWO_LOADS_THEN_STORES)
    assert f.loads_in_flight == {4: 1, 16: 2} and (f.load_bytes, f.store_bytes) == (16, 16)


def test_one_loop_that_loads_and_stores_is_counted_per_16_bytes():
    f = figures(
        "MOV R1, c[0x0][0x28]",
        "LDG.E R20, [R2.64]",  # 0x10, the start of the loop
        "LDG.E.128 R4, [R2.64]",
        "LDG.E.128 R8, [R2.64]",
        "STG.E.128 [R12.64], R4",
        "STG.E.128 [R12.64], R8",
        "@P0 BRA 0x10",
        "EXIT",
        "BRA 0x80",  # the trap after the end of every kernel is not a loop
    )
    assert f.instructions_per_16_bytes == 6 / 2


def test_separate_loops_that_load_and_store_are_added_per_16_bytes():
    f = figures(
        "LDGSTS.E.BYPASS.128 [R9], [R2.64]",
        "LDGSTS.E.BYPASS.128 [R9], [R2.64]",
        "@P0 BRA 0x0",
        "BAR.SYNC 0x0",
        "LDS.128 R4, [R9]",  # 0x40
        "STG.E.128 [R12.64], R4",
        "IADD3 R1, R1, R1, RZ",
        "@P0 BRA 0x40",
        "EXIT",
    )
    assert f.instructions_per_16_bytes == 3 / 2 + 4


def test_only_the_innermost_loop_is_counted():
    f = figures(
        "MOV R1, R2",
        "LDG.E.64 R4, [R2.64]",  # 0x10
        "STG.E.64 [R12.64], R4",
        "@P0 BRA 0x10",
        "@P1 BRA 0x0",
        "EXIT",
    )
    assert f.instructions_per_16_bytes == 3 * 2


def test_instructions_per_16_bytes_are_undefined_without_stores():
    assert figures("LDG.E R4, [R2.64]", "EXIT").instructions_per_16_bytes is None


def test_common_parts_of_names_are_removed():
    names = {
        "void kvcache::(anonymous namespace)::permute_kernel<uint4, false>(kvcache::Launch)": (
            "permute_kernel<uint4, false>"
        ),
        "void kvcache::token_io_kernel<kvcache::(anonymous namespace)::Convert<c10::Half, "
        "kvcache::SmallFloat<unsigned char, 3u, 7u, 127u, 1138753536u, 127u>, 8>, "
        "(kvcache::Direction)0>(kvcache::TokenIo)": (
            "token_io_kernel<Convert<Half, e4m3, 8>, Direction 0>"
        ),
    }
    for name, short in names.items():
        assert sass.short_name(name) == short


WIDE = Expectation("copy<uint4>", 16, 16, 2, 16, 2.5)


def test_code_as_expected_has_no_failures():
    assert failures([figures(*TWO_LOADS_THEN_STORES)], [WIDE]) == []


@pytest.mark.parametrize(
    ("code", "resources", "message"),
    [
        (TWO_LOADS_THEN_STORES, {"registers": 17}, "registers is 17: expected at most 16"),
        (TWO_LOADS_THEN_STORES, {"stack": 32}, "stack bytes is 32: expected 0"),
        (TWO_LOADS_THEN_STORES, {"local": 8}, "local memory bytes is 8: expected 0"),
        (
            ("STL.128 [R1], R4", *TWO_LOADS_THEN_STORES[:4]),
            {},
            "loads and stores of local memory is 1: expected 0",
        ),
        (
            ("LDL R4, [R1]", *TWO_LOADS_THEN_STORES[:4]),
            {},
            "loads and stores of local memory is 1: expected 0",
        ),
        (
            ONE_AFTER_THE_OTHER,
            {},
            "loads of 16 bytes in flight are 1: expected at least 2",
        ),
        (
            [line.replace("STG.E.EF.128", "STG.E.EF.64") for line in TWO_LOADS_THEN_STORES],
            {},
            "bytes of a global store is 8: expected 16",
        ),
        (
            [line.replace("LDG.E.EF.128", "LDG.E.EF") for line in TWO_LOADS_THEN_STORES],
            {},
            "bytes of a global load is 4: expected 16",
        ),
        (
            ("MOV R20, R21", *TWO_LOADS_THEN_STORES),
            {},
            "instructions per 16 bytes is 3.0: expected at most 2.5",
        ),
        (("EXIT",), {}, "instructions per 16 bytes is None: expected at most 2.5"),
    ],
)
def test_code_that_violates_an_expectation_fails(code, resources, message):
    assert f"copy<uint4>: {message}" in failures([figures(*code, **resources)], [WIDE])


def test_local_memory_fails_without_an_expectation():
    assert failures([figures("LDL R4, [R1]", "EXIT")], []) == [
        "copy<uint4>: loads and stores of local memory is 1: expected 0"
    ]


def test_expectations_may_differ_on_sm_100():
    f, expected = figures(*TWO_LOADS_THEN_STORES, registers=17), [WIDE]
    assert failures([f], expected, "sm_100") == failures([f], expected) != []
    expected = [replace(WIDE, sm_100={"max_registers": 17})]
    assert failures([f], expected, "sm_100") == [] != failures([f], expected)


def test_expectation_without_a_matching_kernel_fails():
    assert failures([], [WIDE]) == ["copy<uint4>: no kernel has this name"]


def test_table_has_one_line_per_kind_of_code(capsys):
    f = figures(*TWO_LOADS_THEN_STORES)
    print_table("block_copy", [f])
    heading, line = capsys.readouterr().out.splitlines()[-2:]
    assert heading.startswith("block_copy.cu") and line.split() == (
        ["copy<uint4>", "16", "0", "0", "5", "2x16", "2x16", "2.5"]
    )
    assert by_width({4: 2, 16: 8}) == "8x16 2x4" and by_width({}) == "-"
