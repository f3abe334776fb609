# SPDX-License-Identifier: Apache-2.0
"""Random calls, compared with a reference model that maps each slot to a tuple of tokens."""

import numpy as np
import pytest

from kvcache.sanitizer import SanitizedGroup, Sanitizer

GROUPS = [
    SanitizedGroup("full", 4),
    SanitizedGroup("window", 8, window=5),
    SanitizedGroup("chunk", 4, chunk=8),
    SanitizedGroup("state", 4),
]
NUM_BLOCKS = 24
READS = ("wrong-content", "read-before-written", "wrong-state")


class Model:
    """A brute-force implementation of the sanitizer."""

    def __init__(self):
        self.slots = {}  # (block, offset) -> (group, prefix)

    def write(self, group, tokens, position, block, offset):
        for key in [k for k, (g, _) in self.slots.items() if k[0] == block and g != group]:
            del self.slots[key]
        self.slots[block, offset] = group, tuple(tokens[: position + 1])

    def is_right(self, group, tokens, position, block, offset):
        return self.slots.get((block, offset)) == (group, tuple(tokens[: position + 1]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_calls_match_a_dict_of_slots(seed):
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    model, requests = Model(), {}
    sanitizer = Sanitizer(GROUPS, NUM_BLOCKS, log=lambda report: None, max_reports=10**6)
    num_found = 0
    for step in range(200):
        sanitizer.observe_step(step)
        if len(requests) < 5:
            name = f"r{step}"
            tokens = rng.integers(0, 2, rng.integers(1, 20)).tolist()
            sanitizer.observe_request(name, tokens)
            tables = [rng.integers(1, NUM_BLOCKS, 16) for _ in GROUPS]
            requests[name] = [tokens, rng.integers(0, len(tokens)), tables]
        if rng.random() < 0.1:
            name = rng.choice(list(requests))
            sanitizer.finish(name)
            del requests[name]
        if rng.random() < 0.3:
            src, dst = rng.choice(np.arange(1, NUM_BLOCKS), (2, 2), replace=False)
            sanitizer.observe_copy(src, dst)
            before = dict(model.slots)
            for a, b in zip(src.tolist(), dst.tolist()):
                for key in [key for key in model.slots if key[0] == b]:
                    del model.slots[key]
                model.slots |= {(b, o): v for (k, o), v in before.items() if k == a}
        names = [name for name in requests if rng.random() < 0.7]
        if not names:
            continue
        starts, counts, given = [], [], []
        for name in names:
            tokens, start, tables = requests[name]
            start = max(0, start - int(rng.integers(0, 3)) * (rng.random() < 0.2))
            count = min(int(rng.choice([1, 1, 1, 7])), 30 - start)
            del tokens[start:]
            tokens += rng.integers(0, 2, count).tolist()
            requests[name][1] = start + count
            starts.append(start), counts.append(count)
            given += tokens[start:]
            if rng.random() < 0.1:
                g, column = rng.integers(len(GROUPS)), rng.integers(8)
                tables[g][column] = rng.integers(1, NUM_BLOCKS)
            if start + count >= 30:
                requests[name][1] = 0
        sanitizer.observe_tokens(names, starts, counts, given)
        for g, group in enumerate(GROUPS):
            dtype = (np.int32, np.int64)[seed % 2]  # engines pass int32, which has a faster path
            table = np.array([requests[name][2][g] for name in names], dtype)
            size = group.block_size
            before, bad = len(sanitizer.reports), set()
            if group.kind == "state":
                pages = table[:, 0]
                sanitizer.observe_state_read(g, names, starts, pages)
                for name, start, page in zip(names, starts, pages.tolist()):
                    if start and not model.is_right(g, requests[name][0], start - 1, page, 0):
                        bad.add((name, page))
                stops = np.add(starts, counts)
                sanitizer.observe_state_write(g, names, stops, pages)
                for name, stop, page in zip(names, stops.tolist(), pages.tolist()):
                    model.write(g, requests[name][0], stop - 1, page, 0)
            else:
                slots = []
                for name, start, count, row in zip(names, starts, counts, table.tolist()):
                    for p in range(start, start + count):
                        slots.append(row[p // size] * size + p % size)
                        model.write(g, requests[name][0], p, row[p // size], p % size)
                sanitizer.observe_write(g, names, starts, counts, slots, table)
                stops = np.add(starts, counts)
                sanitizer.observe_read(g, names, starts, stops, table)
                firsts = group.first_needed(starts)
                for name, first, stop, row in zip(names, firsts, stops, table.tolist()):
                    for p in range(first, stop):
                        if not model.is_right(g, requests[name][0], p, row[p // size], p % size):
                            bad.add((name, row[p // size]))
            found = [
                (report.group, report.request, report.block)
                for report in sanitizer.reports
                if report.kind in READS
            ]
            new = [
                (report.request, report.block)
                for report in sanitizer.reports[before:]
                if report.kind in READS
            ]
            assert set(new) <= bad, (step, g, set(new) - bad)
            missed = {each for each in bad if (g, *each) not in found}
            assert not missed, (step, g, missed)
            num_found += len(new)
    assert num_found > 20
