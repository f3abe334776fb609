# SPDX-License-Identifier: Apache-2.0
"""A step's kernels, in which each kernel reads what the previous kernel wrote.

From sm_90 on, each is launched while the previous kernel may still be running.
"""

import pytest
import torch

from kvcache import ops

pytestmark = pytest.mark.gpu
NUM_ROWS, COLUMNS, BLOCK_SIZE, STEPS = 512, 16, 16, 50


class Step:
    """Updates one block per row, maps one token per row, writes the tokens, and gathers them.

    Another stream copies the tokens, so that `write_kv` follows both a kernel and a copy.
    """

    def __init__(self):
        int32 = {"dtype": torch.int32, "device": "cuda"}
        self.tables = torch.zeros(NUM_ROWS * COLUMNS, **int32)
        self.groups = torch.tensor([[0, COLUMNS, BLOCK_SIZE, 1, 0, 1, 0, 0]])
        self.rows = torch.arange(NUM_ROWS, **int32)
        self.positions = torch.full((NUM_ROWS,), 5, device="cuda")
        self.in_order = torch.zeros(NUM_ROWS * COLUMNS, **int32)
        self.slots = torch.zeros(1, NUM_ROWS, dtype=torch.int64, device="cuda")
        self.caches = [torch.zeros(2 * NUM_ROWS, BLOCK_SIZE, 1, 64, device="cuda") for _ in "kv"]
        self.tokens = [torch.zeros(NUM_ROWS, 1, 64, device="cuda") for _ in "kv"]
        self.copies, self.found = ([torch.zeros_like(t) for t in self.tokens] for _ in range(2))
        self.side = torch.cuda.Stream()
        first = torch.arange(NUM_ROWS) * COLUMNS
        self.places = torch.stack([first, torch.ones_like(first), torch.zeros_like(first)], 1)
        self.places[:, 2] = 1 + 3 * NUM_ROWS + torch.arange(NUM_ROWS)
        self.updates = torch.zeros(1 + 4 * NUM_ROWS, **int32)

    def prepare(self, number):
        """Draw the blocks and tokens of a step. Returns the blocks."""
        blocks = 1 + torch.randperm(2 * NUM_ROWS - 1, generator=torch.manual_seed(number))
        blocks = blocks[:NUM_ROWS]
        packed = torch.cat([torch.tensor([NUM_ROWS]), self.places.flatten(), blocks])
        self.updates.copy_(packed.int())
        for i, tokens in enumerate(self.tokens):
            tokens.copy_(torch.arange(NUM_ROWS).view(-1, 1, 1).add(1000 * number + i))
        return blocks

    def launch(self):
        stream = torch.cuda.current_stream()
        self.side.wait_stream(stream)
        with torch.cuda.stream(self.side):
            for copied, tokens in zip(self.copies, self.tokens):
                copied.copy_(tokens)
        ops.update_block_tables(self.tables, self.updates)
        ops.slot_mapping(
            self.tables, self.groups, NUM_ROWS, self.rows, None, self.positions, None, self.slots
        )
        stream.wait_stream(self.side)
        ops.write_kv(*self.copies, *self.caches, self.slots[0])
        ops.gather_kv(*self.caches, self.slots[0], *self.found)
        ops.gather_block_tables(
            self.tables, self.groups, NUM_ROWS, self.rows, None, COLUMNS * BLOCK_SIZE, self.in_order
        )

    def check(self, blocks):
        assert self.slots[0].cpu().tolist() == (blocks * BLOCK_SIZE + 5).tolist()
        assert all(map(torch.equal, self.found, self.tokens))
        assert torch.equal(self.in_order, self.tables)


@pytest.mark.parametrize("is_captured", [False, True])
def test_each_kernel_reads_what_the_previous_kernel_wrote(is_captured):
    step, stream = Step(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run = step.launch
        if is_captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                step.launch()
            run = graph.replay
        for number in range(STEPS):
            blocks = step.prepare(number)
            run()
            step.check(blocks)
    torch.cuda.synchronize()
