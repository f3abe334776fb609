# SPDX-License-Identifier: Apache-2.0
"""Compares the native host tables with lists, and the tables that result from packed updates with
the host tables.
"""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvcache.ops  # noqa: F401
from kvcache.native.load import core

ROWS, NUM_BLOCKS = 5, 40


def flat(values):
    return np.array(values, np.int32)


class TablesAgainstLists(RuleBasedStateMachine):
    """Random steps, moves, swaps and clears on groups whose tables have different widths and block
    size ratios.

    A second arena stands in for the device and is updated through the op.
    """

    @initialize(
        shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=3)
    )
    def start(self, shapes):
        self.widths = [width for width, _ in shapes]  # in allocation blocks
        self.ratios = [ratio for _, ratio in shapes]
        sizes = [ROWS * width * ratio for width, ratio in shapes]
        self.offsets = [sum(sizes[:g]) for g in range(len(sizes))]
        size = sum(sizes) + len(shapes) * ROWS
        self.arena = np.zeros(size, np.int32)
        self.counts = self.arena[sum(sizes) :].reshape(len(shapes), ROWS)
        self.device = torch.zeros(size, dtype=torch.int32)
        groups = [(at, w * r, r, 2**31 // r) for at, (w, r) in zip(self.offsets, shapes)]
        self.native = core.HostTables(self.arena, ROWS, groups, track=True)
        self.model = [[[] for _ in range(ROWS)] for _ in shapes]

    @rule(data=st.data())
    def step(self, data):
        rows = st.lists(st.integers(0, ROWS - 1), max_size=4)
        clear, append = data.draw(rows), data.draw(rows)
        after = [[[] if r in clear else list(ids) for r, ids in enumerate(g)] for g in self.model]
        splits, ids, replace = [], [], []
        for group in after:
            new = [data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=3)) for _ in append]
            for row, more in zip(append, new):
                group[row] += more
            held = [(r, c) for r, row in enumerate(group) for c in range(len(row))]
            places = data.draw(st.lists(st.sampled_from(held), max_size=3)) if held else []
            entries = [(*place, data.draw(st.integers(0, NUM_BLOCKS - 1))) for place in places]
            for row, column, block in entries:
                group[row][column] = block
            splits.append(flat([0, *np.cumsum([len(n) for n in new])]))
            ids.append(flat([block for n in new for block in n]))
            replace.append(flat(entries).reshape(-1, 3))
        fits = all(len(ids) <= w for g, w in zip(after, self.widths) for ids in g)
        try:
            self.native.apply(flat(clear), flat(append), splits, ids, replace, NUM_BLOCKS)
        except ValueError as error:
            assert not fits and "would get" in str(error)
        else:
            assert fits
            self.model = after

    @rule(
        op=st.sampled_from(["move_rows", "swap_rows"]),
        pairs=st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, ROWS - 1)), max_size=4),
        data=st.data(),
    )
    def move_or_swap(self, op, pairs, data):
        group = data.draw(st.integers(-1, len(self.model) - 1))
        getattr(self.native, op)([a for a, _ in pairs], [b for _, b in pairs], group)
        for g in range(len(self.model)) if group < 0 else [group]:
            rows = self.model[g]
            for a, b in pairs:
                if op == "swap_rows":
                    rows[a], rows[b] = rows[b], rows[a]
                elif a != b:
                    rows[b], rows[a] = rows[a], []

    @rule(rows=st.lists(st.integers(0, ROWS - 1), max_size=3))
    def clear_rows(self, rows):
        self.native.clear_rows(rows, -1)
        for group in self.model:
            for row in rows:
                group[row] = []

    @rule(data=st.data(), row=st.integers(0, ROWS - 1), reset=st.booleans())
    def one_row(self, data, row, reset):
        g = data.draw(st.integers(0, len(self.model) - 1))
        new = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4))
        want = new if reset else self.model[g][row] + new
        try:
            self.native.append_row(g, row, new, reset)
        except ValueError:
            assert len(want) > self.widths[g]
        else:
            self.model[g][row] = want

    @precondition(lambda self: hasattr(self, "model"))
    @rule(capacity=st.sampled_from([1, 30, 10_000]))
    def upload(self, capacity):
        """Upload like `commit_updates`: as a packed update if the changes fit, and otherwise as a
        copy of everything.
        """
        packed = np.full(capacity, -9, np.int32)
        used = self.native.pack(packed)
        if 0 <= used <= capacity:
            torch.ops.kvcache.update_block_tables(self.device, torch.from_numpy(packed[:used]))
        else:
            assert (packed == -9).all()
            self.device.copy_(torch.from_numpy(self.arena))
        self.native.mark_clean()
        assert np.array_equal(self.device.numpy(), self.arena)

    @rule()
    def clear(self):
        self.native.clear()
        self.model = [[[] for _ in range(ROWS)] for _ in self.model]

    @precondition(lambda self: hasattr(self, "model"))
    @invariant()
    def tables_are_as_in_the_model(self):
        for g, group in enumerate(self.model):
            ratio, width = self.ratios[g], self.widths[g] * self.ratios[g]
            for row, blocks in enumerate(group):
                at = self.offsets[g] + row * width
                entries = [b * ratio + k for b in blocks for k in range(ratio)]
                padded = entries + [0] * (width - len(entries))
                assert self.arena[at : at + width].tolist() == padded
                assert self.counts[g, row] == len(entries)


TestTablesAgainstLists = TablesAgainstLists.TestCase
TestTablesAgainstLists.settings = settings(stateful_step_count=30)


def test_sent_changes_are_not_repeated():
    """Every update must be small compared with the tables."""
    arena = np.zeros(ROWS * 20 + ROWS, np.int32)
    tables = core.HostTables(arena, ROWS, [(0, 20, 1, 2**31)], track=True)
    packed = np.zeros(300, np.int32)
    for i in range(200):
        tables.append_row(0, i % ROWS, [i % NUM_BLOCKS], True)
        assert 0 < tables.pack(packed) <= 20
        tables.mark_clean()


@pytest.mark.parametrize("change", [
    lambda tables: tables.swap_rows([0], [1], 0),
    lambda tables: tables.swap_rows([1], [2], 0),
    lambda tables: tables.move_rows([0], [1], 0),
    lambda tables: tables.clear_rows([1], 0),
    lambda tables: tables.append_row(0, 0, [7, 8], False),
    lambda tables: tables.append_row(0, 1, [9], True),
], ids=["swap", "swap with an empty row", "move", "clear", "append", "reset"])  # fmt: skip
def test_single_change_is_packed_completely(change):
    """The tables are so large that the change must be sent as a packed update, rather than as a
    copy of everything.
    """
    width = 200
    arena = np.zeros(ROWS * width + ROWS, np.int32)
    tables = core.HostTables(arena, ROWS, [(0, width, 1, 2**31)], track=True)
    tables.append_row(0, 0, list(range(1, 11)), False)
    tables.append_row(0, 1, list(range(20, 40)), False)
    device = torch.from_numpy(arena.copy())
    tables.mark_clean()
    change(tables)
    packed = np.zeros(300, np.int32)
    used = tables.pack(packed)
    assert 0 < used <= len(packed)
    torch.ops.kvcache.update_block_tables(device, torch.from_numpy(packed[:used]))
    assert np.array_equal(device.numpy(), arena)
