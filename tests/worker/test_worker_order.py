# SPDX-License-Identifier: Apache-2.0
"""Random plans on a simulated device: every legal order of the streams' work must give the result
of immediate execution. The mutants of tests/machinery/mutants.py lack one dependency each.
"""

import random

import numpy as np
import pytest

from tests.machinery.shared import sampled
from tests.worker.test_swap import FORMS, LAYERS, pairs, plan, simulated_worker

NUM_PAGES, NUM_HOST_PAGES = 12, 9
WORKER_FORMS = {**FORMS, "by calibration": {}}


class Plans:
    """Creates and applies random plans, and tracks the value that each page should contain."""

    def __init__(self, seed: int, **form) -> None:
        self.random = random.Random(seed)
        self.worker, self.streams = simulated_worker(seed, **form)
        self.pages = self.worker.pages
        self.pages.memory.zero_()
        self.device = dict.fromkeys(range(1, NUM_PAGES), 0)
        self.host: dict[int, int] = {}
        self.number = self.wrong = 0

    def _put(self, page, number):
        for region in range(len(self.pages.sizes)):
            self.pages.fragment(region)[page] = number % 251

    def _compute(self, work, *arguments):
        self.streams.launch(self.streams.compute, lambda: work(*arguments))

    def _look(self, page, number, layers):
        for region in np.flatnonzero(np.isin(self.pages.layers, list(layers))):
            self.wrong += int((self.pages.fragment(int(region))[page] != number % 251).any())

    def step(self, step_id):
        free = self.random.sample(range(1, NUM_PAGES), NUM_PAGES - 1)

        def take(most):
            return [free.pop() for _ in range(self.random.randint(0, most))]

        left = self.random.sample(range(1, NUM_PAGES), self.random.randint(0, 3))
        out = list(zip(left, self.random.sample(range(1, NUM_HOST_PAGES), len(left))))
        readable = [page for page in self.host if page not in [target for _, target in out]]
        back = [(self.random.choice(readable), page) for page in (take(3) if readable else [])]
        cleared, copied, appended, replaced = take(2), take(2), take(1), take(1)
        sources = [page for page in range(1, NUM_PAGES) if page not in
                   [*copied, *cleared, *(page for _, page in back)]]  # fmt: skip
        copies = [(self.random.choice(sources), page) for page in copied]
        given = plan(
            step_id,
            swap_out=pairs(*out), swap_in=pairs(*back), copy=pairs(*copies),
            zero=np.array(cleared, np.int32),
            clear_rows=np.zeros(1, np.int32), append_rows=np.zeros(1, np.int32),
            append_splits=[np.array([0, 1 + len(appended)], np.int32)],
            append_ids=[np.array([*appended, 0], np.int32)],
            replace=[np.array([(0, 0, page) for page in replaced], np.int32).reshape(-1, 3)],
        )  # fmt: skip
        for page, target in out:
            self.host[target] = self.device[page]
        after = dict(self.device)
        after |= {target: self.device[source] for source, target in copies}
        after |= dict.fromkeys(cleared, 0)
        after |= {target: self.host[source] for source, target in back}
        self.device = after
        transfer = self.worker.start(given)
        arrived = [target for _, target in back]
        for page in arrived:
            self._compute(self._look, page, after[page], range(LAYERS))
        others = [page for page in after if page not in arrived]
        for page in self.random.sample(others, 3):
            self._compute(self._look, page, after[page], range(LAYERS))
        # The step immediately computes on the pages that were allocated for it.
        for page in [*appended, *replaced, *copied, *cleared]:
            if page in appended + replaced or self.random.random() < 0.5:
                self.number += 1
                self.device[page] = self.number
                self._compute(self._put, page, self.number)
        return transfer

    def run(self, num_steps=25):
        transfers = []
        for i in range(num_steps):
            transfers.append(self.step(i))
            if self.random.random() < 0.5:
                self.streams.advance(self.random.randint(0, 12))
            reported = [transfer.poll() is not None for transfer in transfers]
            assert reported == sorted(reported, reverse=True), (
                "a step was reported before an earlier one"
            )
        self.worker.start(plan(num_steps))
        for page, number in self.device.items():
            self._compute(self._look, page, number, range(LAYERS))
        assert self.streams.advance() == 0, "streams wait for each other"
        assert [transfer.poll().failed_pages for transfer in transfers] == [[]] * num_steps
        for page, number in self.host.items():
            for region in range(len(self.pages.sizes)):
                held = self.worker.host.fragment(region)[page]
                self.wrong += int((held != number % 251).any())
        return self.wrong


@pytest.mark.slow
@pytest.mark.parametrize("seeds", sampled([range(12), range(12, 40)]), ids=str)
@pytest.mark.parametrize("form", WORKER_FORMS)
def test_plans_are_correct_under_any_stream_order(form, seeds):
    for seed in seeds:
        assert Plans(seed, **WORKER_FORMS[form]).run() == 0, f"seed {seed}"


def test_staged_page_may_be_overwritten_before_reaching_host():
    """The event `released` precedes `done`, so the compute stream need not wait for the copy over
    the bus.
    """
    worker, streams = simulated_worker(method="staging")
    transfer = worker.start(plan(swap_out=pairs((3, 1)), zero=np.array([3], np.int32)))
    staging = worker.engine._swap_streams["out"].staging
    waits = [item[1] for item in streams.compute if isinstance(item, tuple)]
    released, done = transfer._out.released, transfer._out.done
    assert released in waits and done not in waits
    assert released in staging.first and done in staging.last
    crossing = [item for item in staging.last if callable(item)]
    assert len(crossing) == 1 and not any(map(callable, list(staging.first)[-1:]))
