# SPDX-License-Identifier: Apache-2.0
"""Random operations on hybrid caches over simulated pages, whose slots show which owner wrote them.

Each time a row is given a page, the page starts a new life. Slots store the life in which they were
written, `CLEAN` for zeros, or `STALE` for bytes of an earlier life. Which life a page is in follows
from the blocks that rows hold and from their hits, and not from `StepPlan.fresh`.
"""

from __future__ import annotations

import numpy as np

from kvcache import Admit, External, GroupSpec, KVCacheManager, Request, Status, StepReport

LONGEST, NUM_SLOTS = 40, 8
CLEAN, STALE = 0, -1
FULL = GroupSpec("full_attention", 4)
WINDOW = GroupSpec("sliding_window", 4, options={"window": 9})
CHUNKS = GroupSpec("chunked_local", 4, options={"chunk_size": 8})
SCRATCH = GroupSpec("full_attention", 4, cached=False)
ENCODER = GroupSpec("cross_attention", 4)
STATE = GroupSpec("recurrent", 8)
MIXES = (
    (FULL, STATE),
    (FULL, WINDOW, STATE),
    (GroupSpec("full_attention", 8), GroupSpec("sliding_window", 8, options={"window": 5}), STATE),
    (FULL, CHUNKS, GroupSpec("recurrent", 4)),
    (FULL, SCRATCH, STATE),
    (FULL, ENCODER, STATE),
    (FULL, WINDOW),
    (FULL,),
)


class FreshPages:
    """A manager, and a worker that zeroes the pages in `fresh`."""

    def __init__(self, seed: int) -> None:
        self.random = random = np.random.default_rng(seed)
        self.groups = MIXES[seed % len(MIXES)]
        self.states = [g for g, each in enumerate(self.groups) if each.kind == "recurrent"]
        num_blocks = int(random.integers(12, 30)) * len(self.groups)
        # After an aborted swap, an encoder's host page contains anything until it is written again.
        num_host = 0 if ENCODER in self.groups else int(random.choice([0, 10, 40]))
        self.manager = KVCacheManager.for_groups(
            self.groups,
            num_blocks,
            LONGEST,
            num_host_blocks=num_host,
            num_preallocate_tokens=int(random.choice([0, 0, 6])),
            hash_block_size=int(random.choice([2, 4])),
            max_encoder_tokens=6,
        )
        self.pages = np.full((num_blocks, NUM_SLOTS), STALE)
        self.host = np.full((max(num_host, 1), NUM_SLOTS), STALE)
        self.life, self.host_life = np.zeros(num_blocks, int), np.zeros(len(self.host), int)
        self.num_lives = self.num_requests = self.num_read = 0
        self.by_step: list[Request] = []
        self.direct: list[Request] = []
        self.loads: dict[str, tuple[int, int]] = {}  # delayed loads: first and last token
        self.in_flight: list[int] = []

    def run(self, num_operations: int) -> None:
        """Run random operations. Raises AssertionError if attention reads a stale slot."""
        names = ["step"] * 8 + ["free", "arrive", "fork", "report", "abort", "invalidate"]
        names += ["admit", "extend", "extend"] * (not self.states)
        for _ in range(num_operations):
            getattr(self, str(self.random.choice(names)))()

    def chance(self, one_in: int) -> bool:
        return self.random.integers(one_in) == 0

    def any_of(self, requests: list[Request]) -> Request | None:
        return requests[self.random.integers(len(requests))] if requests else None

    # Lives and bytes -------------------------------------------------------------------------------

    def begin_life(self, life: np.ndarray, page: int) -> None:
        self.num_lives += 1
        life[page] = self.num_lives

    def moved(self, slots: np.ndarray, old: int, new: int) -> np.ndarray:
        """Return copied slots: what was written in the source's life belongs to the new life."""
        return np.where(slots == CLEAN, CLEAN, np.where(slots == old, new, STALE))

    def held(self, request: Request) -> list[list[int]]:
        if self.manager.state(request).name == "SWAPPED_OUT":
            return [[] for _ in self.groups]
        return [self.manager.block_ids(request, g).tolist() for g in range(len(self.groups))]

    def apply(self, plan, before: dict[Request, list[list[int]]], new: dict[Request, int]) -> bool:
        """Begin the lives of the pages that rows were given, and move bytes as a worker does.

        `new`: the new requests, and where their hits end. A plan that is not applied moves
        nothing and is withdrawn. Returns whether it was applied.
        """
        old, old_host = self.life.copy(), self.host_life.copy()
        is_applied = not self.chance(8)
        for _, page in plan.swap_out.tolist():
            self.begin_life(self.host_life, page)
        filled = {page for _, page in [*plan.copy.tolist(), *plan.swap_in.tolist()]}
        given = set(filled)
        for request in [*before, *new]:
            was, hit = before.get(request, [[] for _ in self.groups]), new.get(request, 0)
            for g, blocks in enumerate(self.held(request)):
                size = self.groups[g].block_size
                for column, page in enumerate(blocks):
                    is_hit = self.groups[g].kind != "cross_attention" and column * size < hit
                    if page and page not in was[g] and not is_hit:
                        given.add(page)
                    if page in plan.zero:
                        given.add(page)
        # A row that returns from the host may share a page that another row has loaded.
        returned = {page for request in before if not any(before[request]) for blocks in
                    self.held(request) for page in blocks}  # fmt: skip
        for page in given:
            if page in filled or page not in returned or page in plan.fresh or page in plan.zero:
                self.begin_life(self.life, page)
        if not is_applied:
            self.withdraw(plan.step_id)
            return False
        for page, to in plan.swap_out.tolist():
            self.host[to] = self.moved(self.pages[page], old[page], self.host_life[to])
        sources = {page: self.pages[page].copy() for page, _ in plan.copy.tolist()}
        for page, to in plan.copy.tolist():
            self.pages[to] = self.moved(sources[page], old[page], self.life[to])
        self.pages[plan.zero] = self.pages[plan.fresh] = CLEAN
        failed = []
        for page, to in plan.swap_in.tolist():
            if self.chance(20):
                self.pages[to, ::2] = STALE
                failed.append(to)
            else:
                self.pages[to] = self.moved(self.host[page], old_host[page], self.life[to])
        if failed:
            self.manager.report(StepReport(plan.step_id, True, failed))
            self.in_flight = []
        return True

    def write(self, request: Request, start: int, stop: int) -> None:
        """Write the tokens [start, stop) and the state after them."""
        for g, blocks in enumerate(self.held(request)):
            if g in self.states:
                pages = [page for page in blocks if page]
                self.pages[pages] = self.life[pages][:, None]
                continue
            is_encoder = self.groups[g].kind == "cross_attention"
            if is_encoder and start > 0:
                continue
            size = self.groups[g].block_size
            for position in range(request.num_encoder_tokens) if is_encoder else range(start, stop):
                page = blocks[position // size]
                if page:
                    self.pages[page, position % size] = self.life[page]

    def read(self, request: Request, stop: int) -> None:
        """Check all slots, including unused ones, of the pages that attention loads."""
        for g, blocks in enumerate(self.held(request)):
            size = self.groups[g].block_size
            used = (
                blocks if self.groups[g].kind == "cross_attention" else blocks[: -(-stop // size)]
            )
            for column, page in enumerate(used):
                slots = self.pages[page, : NUM_SLOTS if g in self.states else size]
                is_right = (slots == CLEAN) | (slots == self.life[page])
                self.num_read += page > 0
                assert page == 0 or is_right.all(), (
                    f"{request.request_id} reads page {page} of group {g}, column {column}, with "
                    f"{slots} in life {self.life[page]}"
                )

    # Operations ------------------------------------------------------------------------------------

    def new_request(self) -> Request:
        random, length = self.random, int(self.random.integers(1, LONGEST - 8))
        differs = int(random.choice([0, 3, 7, 8, 13, 16, 99]))
        self.num_requests += 1
        tokens = [i if i < differs else 100 * self.num_requests + i for i in range(length)]
        has_encoder = ENCODER in self.groups
        encoder = int(random.integers(0, 7)) if has_encoder else 0
        return Request(f"r{self.num_requests}", tokens, num_encoder_tokens=encoder)

    def asked(self, request: Request) -> Admit:
        external, lookahead = 0, int(self.random.choice([0, 0, 5]))
        hit = self.manager.cache.find_prefix(request, whole_blocks=True).num_tokens
        room = request.num_tokens - 1 - hit
        if room > 0 and self.chance(3) and not request.num_encoder_tokens:
            external = int(self.random.integers(1, room + 1))
        delayed = external > 0 and self.chance(2)
        count = None if delayed or self.chance(2) else int(self.random.integers(1, 9))
        return Admit(request, count, External(external, delayed), lookahead)

    def step(self) -> None:
        random, manager = self.random, self.manager
        before, rows, counts, leaving, ids = {}, [], [], [], []
        for request in self.by_step:
            before[request] = self.held(request)
            if manager.state(request).name == "RECEIVING":
                continue
            done = manager.num_computed_tokens(request)
            if manager.host_pool and any(before[request]) and self.chance(5):
                leaving.append(manager.row(request))
            elif done < LONGEST and not self.chance(4):
                known = request.num_tokens - done
                rows.append(manager.row(request))
                ids.append(int(random.integers(1, 50)) if known <= 0 else None)
                counts.append(int(random.integers(1, min(known, 9) + 1)) if known > 0 else 1)
        asked = [self.asked(self.new_request()) for _ in range(random.choice([0, 1, 1, 2]))]
        try:
            plan = manager.step(
                rows,
                counts,
                new=asked,
                swap_out=leaving,
                token_ids=[each for each in ids if each is not None],
                num_token_ids=[int(each is not None) for each in ids],
            )
        except ValueError:  # for example, external tokens that no longer follow the hit
            return
        self.in_flight.append(plan.step_id)
        answers, new = plan.answers, {}
        for each, status, start in zip(asked, answers.new.status, answers.new.num_computed_tokens):
            if status == Status.SERVED:
                num_external = each.external.num_tokens
                new[each.request] = int(start) - num_external
                if num_external and each.external.delayed:
                    self.loads[each.request.request_id] = int(start) - num_external, int(start)
        of_row = {manager.row(each): each for each in self.by_step}
        steps = [
            (of_row[row], start)
            for row, status, start in zip(
                answers.rows.rows.tolist(), answers.rows.status, answers.rows.num_computed_tokens
            )
            if status == Status.SERVED
        ]
        steps += [
            (request, new[request]) for request in new if request.request_id not in self.loads
        ]
        self.by_step += new
        if self.apply(plan, before, new):
            for request, start in steps:
                self.compute(request, int(start))

    def compute(self, request: Request, start: int) -> None:
        """Compute the tokens from `start` on, and read all that attention reads for them."""
        stop = self.manager.num_computed_tokens(request)
        if stop <= start or self.manager.state(request).name != "RUNNING":
            return  # a failed page has sent the request back
        self.write(request, start, stop)
        self.read(request, stop)

    def free(self) -> None:
        request = self.any_of(self.by_step + self.direct)
        if request is not None and request.request_id not in self.loads:
            self.manager.free(request)
            (self.by_step if request in self.by_step else self.direct).remove(request)

    def arrive(self) -> None:
        request = self.any_of([each for each in self.by_step if each.request_id in self.loads])
        if request is None:
            return
        first, stop = self.loads.pop(request.request_id)
        count = stop - first if self.chance(2) else int(self.random.integers(0, stop - first + 1))
        self.write(request, first, first + count)
        self.manager.finish_receiving(request, count)

    def fork(self) -> None:
        parent = self.any_of(self.by_step)
        if parent is None or self.manager.state(parent).name != "RUNNING":
            return
        shared = parent.token_ids[: self.manager.num_computed_tokens(parent)]
        self.num_requests += 1
        child = Request(
            f"r{self.num_requests}",
            [*shared, 7],
            num_encoder_tokens=parent.num_encoder_tokens,
        )
        if 0 < len(shared) < LONGEST and self.manager.fork(parent, child) >= 0:
            self.by_step.append(child)

    def report(self) -> None:
        if self.in_flight:
            self.manager.report(StepReport(self.in_flight[-1], True))
            self.in_flight = []

    def abort(self) -> None:
        if self.in_flight:
            self.withdraw(self.in_flight[self.random.integers(len(self.in_flight))])

    def withdraw(self, step_id: int) -> None:
        self.manager.abort(step_id)
        self.in_flight = [each for each in self.in_flight if each < step_id]

    def invalidate(self) -> None:
        if self.chance(3):
            self.manager.invalidate(self.random.integers(1, len(self.pages), 2))

    # A request of its own: the engine clears what the calls return ------------------------------------

    def admit(self) -> None:
        request = self.new_request()
        found = self.manager.admit(request)
        if found is None:
            return
        self.direct.append(request)
        self.give(found)
        for page, to in self.manager.take_copies().tolist():
            self.pages[to] = self.moved(self.pages[page], self.life[page], self.life[to])
        self.compute(request, 0 if ENCODER in self.groups else self.first_new(request, found))

    def first_new(self, request: Request, found: object) -> int:
        """Return a token from which on all tokens are in new blocks or follow the hit."""
        new = set(np.concatenate(found if isinstance(found, list) else [found]).tolist())
        column = next((c for c, page in enumerate(self.held(request)[0]) if page in new), 0)
        return column * self.groups[0].block_size

    def extend(self) -> None:
        request = self.any_of(self.direct)
        if request is None:
            return
        start = self.manager.num_computed_tokens(request)
        count = min(int(self.random.integers(1, 9)), LONGEST - start)
        if count > 0 and (found := self.manager.extend(request, count)) is not None:
            self.give(found)
            self.compute(request, start)

    def give(self, found: object) -> None:
        for blocks in found if isinstance(found, list) else [found]:
            for page in blocks[blocks > 0].tolist():
                self.begin_life(self.life, page)
                self.pages[page] = CLEAN
