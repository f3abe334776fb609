# SPDX-License-Identifier: Apache-2.0
"""Makes the same random calls to `KVCacheManager` and to `docs/kernel_in_200_lines.py`, and compares
what a caller sees: answers, block ids, copies, swaps, free and cached blocks, hits, and events.

The simulator does not predict block ids, so it cannot show that the published program is the manager.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections import Counter

from kvcache import Admit, GroupSpec, KVCacheManager, Request, StepReport
from kvcache.allocator import RequestState, check_invariants
from kvcache.events import BlockRemoved, BlockStored
from tests.machinery.shared import REPO

LONGEST, MOST_ROWS, OPERATIONS_PER_SEED = 40, 5, 300
KERNEL_PATH = REPO / "docs" / "kernel_in_200_lines.py"


def load_kernel():
    """Import the page as a module."""
    spec = importlib.util.spec_from_file_location("kernel_in_200_lines", KERNEL_PATH)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernel = load_kernel()


class Comparison:
    """A manager, the kernel, and the tables of a worker that carries out the manager's plans. Each
    call is made to both, and their answers must be equal.
    """

    def __init__(
        self, size: int, window: int | None, num_blocks: int, num_host: int, longest: int
    ) -> None:
        if window is None:
            group = GroupSpec("full_attention", size)
        else:
            group = GroupSpec("sliding_window", size, {"window": window})
        self.manager = KVCacheManager.for_groups(
            [group],
            num_blocks,
            longest,
            num_host_blocks=num_host,
            num_preallocate_tokens=0,
            enable_events=True,
        )
        self.size, self.has_host = size, num_host > 0
        self.events: list[tuple] = []
        self.kernel = kernel.Manager(
            kernel.Rules(size, window), num_blocks, num_host or 1, [self.hear]
        )
        self.requests: dict[int, Request] = {}  # row -> request; its id names the kernel's row
        self.tables: dict[int, list[int]] = {}
        self.seen: Counter[str] = Counter()  # what the operations led to

    def hear(self, what: str, block) -> None:
        """Record the changes that are events: of the first or last block with its key."""
        num_copies = len(block.tier.cached.get(block.key, ()))
        if num_copies == (what == "published"):
            medium = "cpu" if block.tier is self.kernel.host else "gpu"
            self.events.append((what, medium, block.key))

    def row_of(self, request: Request):
        return self.kernel.rows[request.request_id]

    def is_out(self, request: Request) -> bool:
        return self.row_of(request).blocks[-1].tier is self.kernel.host

    def lowest_free_row(self) -> int:
        return min({*range(len(self.requests) + 1)} - self.requests.keys())

    def can_leave(self, request: Request) -> bool:
        """Whether the kernel swaps the row out as the manager does, which uses pages that hold the
        row's blocks already before it takes others.
        """
        host, held = self.kernel.host, [each for each in self.row_of(request).blocks if each]
        num_empty = sum(not each.key for each in host.free)
        return num_empty >= len(held) or not any(host.find(each.key) for each in held)

    # Calls -----------------------------------------------------------------------------------------

    def step(self, rows=(), counts=(), ids=(), new=(), limits=(), leaving=()):
        """Call `step`. If rows that share blocks left or returned in one step, the manager would
        move them once, which the kernel does not.

        Args:
            rows, counts, ids: The running rows, and for each the number of tokens and its token ids.
            new, limits: The new requests, and for each the largest number of tokens.
            leaving: The rows to swap out.
        """
        plan = self.manager.step(
            rows,
            counts,
            new=[Admit(request, limit) for request, limit in zip(new, limits)],
            token_ids=[token for each in ids for token in each],
            num_token_ids=[len(each) for each in ids],
            swap_out=leaving,
        )
        names = [self.requests[row].request_id for row in rows]
        want = self.kernel.step(
            zip(names, counts, ids),
            [(each.request_id, each.token_ids.tolist(), n) for each, n in zip(new, limits)],
            [self.requests[row].request_id for row in leaving],
        )
        for name in ("swap_out", "copy", "swap_in"):
            assert [*map(tuple, getattr(plan, name).tolist())] == getattr(want, name), name
        self.compare_answers(plan, want, rows, new)
        self.apply(plan)
        for row, request in self.requests.items():
            table = want.tables[request.request_id]
            assert self.is_out(request) or self.tables[row] == table
        return plan

    def compare_answers(self, plan, want, rows, new) -> None:
        answers = plan.answers
        assert answers.rows.rows.tolist() == [*rows]
        found = [answers.swap_out, answers.rows, answers.new]
        starts = [n for each in found for n in each.num_computed_tokens.tolist()]
        statuses = [n for each in found for n in each.status.tolist()]
        assert [*zip(starts, statuses)] == [answer[1:] for answer in want.answers]
        for request, row, status in zip(new, answers.new.rows.tolist(), answers.new.status):
            assert row == (self.lowest_free_row() if status == kernel.SERVED else -1)
            if status == kernel.SERVED:
                self.requests[row] = request
        self.seen.update(("served", "wait", "never")[status] for status in statuses)
        self.seen.update(
            copy=len(want.copy), swap_in=len(want.swap_in), hit=sum(starts[-len(new) :])
        )
        self.seen.update(swap_out=len(want.swap_out), replace=len(plan.replace[0]))

    def apply(self, plan) -> None:
        for row in plan.clear_rows.tolist():
            self.tables[row] = []
        splits, ids = plan.append_splits[0].tolist(), plan.append_ids[0].tolist()
        for i, row in enumerate(plan.append_rows.tolist()):
            self.tables[row] += ids[splits[i] : splits[i + 1]]
        for row, column, block in plan.replace[0].tolist():
            self.tables[row][column] = block

    def fork(self, parent: Request, child: Request) -> int:
        row = self.lowest_free_row()
        assert self.manager.fork(parent, child) == row
        self.kernel.fork(parent.request_id, child.request_id, child.token_ids.tolist())
        self.requests[row] = child
        return row

    def free(self, row: int) -> None:
        request = self.requests.pop(row)
        self.manager.free(request)
        self.kernel.free(request.request_id)

    def report(self, step: int) -> None:
        self.manager.report(StepReport(step, completed=True))
        self.kernel.report(step)

    # Comparison ------------------------------------------------------------------------------------

    def compare(self, tokens: list[int]) -> None:
        """Compare all that a caller sees, including the hit of a request with these tokens."""
        manager, known = self.manager, self.kernel
        check_invariants(manager)
        pools = [(manager.pool, known.device)]
        pools += [(manager.host_pool, known.host)] if self.has_host else []
        for pool, tier in pools:
            assert pool.num_free == len(tier.free)
            assert pool.num_cached == sum(map(len, tier.cached.values()))
        for request in self.requests.values():
            each = self.row_of(request)
            assert manager.num_computed_tokens(request) == each.num_computed
            is_out = self.is_out(request)
            assert (manager.state(request) is RequestState.SWAPPED_OUT) == is_out
            if not is_out:
                blocks = [block.id if block else 0 for block in each.blocks]
                assert manager.block_ids(request).tolist() == blocks
        self.compare_cached(tokens)
        self.compare_events()

    def compare_cached(self, tokens: list[int]) -> None:
        """Compare the hit of a prompt, and where its blocks are cached."""
        chain, request = kernel.Chain(tokens), Request("probe", tokens)
        hit, found = self.kernel.hit(chain), self.manager.cache.cached_tokens(request)
        assert found.with_host == len(hit) * self.size
        where = self.manager.cache.find(self.manager.cache.hashes(request))
        for key, device, host in zip(chain.keys(self.size), where.device, where.host):
            blocks = self.kernel.device.find(key), self.kernel.host.find(key)
            assert [max(device, 0), max(host, 0)] == [block.id if block else 0 for block in blocks]

    def compare_events(self) -> None:
        found: list[tuple] = []
        for event in self.manager.cache.drain_events():
            what = "published" if isinstance(event, BlockStored) else "evicted"
            assert isinstance(event, (BlockStored, BlockRemoved))
            found += [(what, event.medium, each.tobytes()) for each in event.block_hashes]
        want = [(what, medium, self.hash_of(key)) for what, medium, key in self.events]
        assert sorted(found) == sorted(want)
        self.events.clear()

    def hash_of(self, key: tuple) -> bytes:
        return self.manager.cache.hashes(Request("probe", list(key)))[-1].tobytes()


class KernelDriver(Comparison):
    """Makes random calls."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        size, window = pick([1, 2, 4]), pick([None, None, 1, 3, 6, 9])
        self.num_blocks, num_host = pick([8, 12, 20, 40]), pick([0, 0, 6, 12, 40])
        super().__init__(size, window, self.num_blocks, num_host, LONGEST)
        self.prompts: list[list[int]] = []
        self.num_requests = self.num_steps = self.num_reported = 0

    def run(self, num_operations: int) -> None:
        operations = [self.random_step] * 6 + [self.random_free] * 2
        operations += [self.random_fork] + [self.random_report] * 2
        for _ in range(num_operations):
            self.random.choice(operations)()
            self.compare(self.prompt())

    def chance(self, one_in: int) -> bool:
        return self.random.randrange(one_in) == 0

    def request(self, tokens: list[int]) -> Request:
        self.num_requests += 1
        return Request(f"r{self.num_requests}", tokens)

    def prompt(self) -> list[int]:
        """Return an earlier prompt, or a new one that begins like others.

        A prompt that does not fit into the pool begins like no other: the manager would compute it
        without its hit, which the kernel does not.
        """
        if self.prompts and self.chance(3):
            return list(self.random.choice(self.prompts))
        length, differs = self.random.randint(1, LONGEST - 4), self.random.choice([0, 3, 9, 17, 99])
        first = 100 * self.random.randint(1, 3)
        if length > (self.num_blocks - 1) * self.size:
            return [1000 + self.num_requests] * length
        self.prompts.append([i + first * (i >= differs) for i in range(length)])
        return list(self.prompts[-1])

    def random_step(self) -> None:
        rows, leaving, is_returning = [], [], False
        for row, request in self.requests.items():
            is_out = self.is_out(request)
            is_full = self.row_of(request).num_computed >= LONGEST
            if self.chance(3) or is_full or (is_out and is_returning):
                continue
            if self.has_host and not is_out and not leaving and self.chance(4):
                leaving += [row] if self.can_leave(request) else []
                continue
            is_returning |= is_out
            rows.append(row)
        self.random.shuffle(rows)
        counts, ids = [], []
        for row in rows:
            each = self.row_of(self.requests[row])
            most = min(self.random.choice([1, 1, 4, 9]), LONGEST - each.num_computed)
            counts.append(self.random.randint(1, most))
            num_ids = max(each.num_computed + counts[-1] - len(each.chain), 0)
            ids.append([500 + self.random.randint(0, 1)] * num_ids)
        prompts = [self.prompt() for _ in range(self.random.choice([0, 1, 1, 2]))]
        new = [self.request(tokens) for tokens in prompts[: MOST_ROWS - len(self.requests)]]
        limits = [self.random.choice([1, 5, LONGEST, LONGEST]) for _ in new]
        self.step(rows, counts, ids, new, limits, leaving)
        self.num_steps += 1

    def random_fork(self) -> None:
        parents = [request for request in self.requests.values() if not self.is_out(request)]
        if not parents or len(self.requests) >= MOST_ROWS:
            return
        parent = self.random.choice(parents)
        each = self.row_of(parent)
        tokens = (each.chain[: each.num_computed] + [700] * self.random.randint(0, 2))[:LONGEST]
        self.fork(parent, self.request(tokens))

    def random_free(self) -> None:
        if self.requests:
            self.free(self.random.choice([*self.requests]))

    def random_report(self) -> None:
        if self.num_reported < self.num_steps:
            step = self.random.randrange(self.num_reported, self.num_steps)
            self.num_reported = step + 1
            self.report(step)


def drive(seed: int, num_operations: int = OPERATIONS_PER_SEED) -> Counter[str]:
    """Run one seed. Return what the operations led to."""
    try:
        driver = KernelDriver(seed)
        driver.run(num_operations)
    except BaseException as error:
        error.add_note(f"found by kernel_driver.drive({seed}, {num_operations})")
        raise
    return driver.seen
