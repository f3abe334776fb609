# SPDX-License-Identifier: Apache-2.0
"""Runs both schedulers on long decodes, interrupted by everything that kvcache's code for steady
steps must leave to vLLM.
"""

import collections
import types

import numpy as np

from tests.machinery.vllm_schedulers import (  # sets environment variables for later imports
    SideBySide,
    answer,
)

from vllm import SamplingParams  # isort: skip
from vllm.lora.request import LoRARequest  # isort: skip
from vllm.sampling_params import RepetitionDetectionParams  # isort: skip
from vllm.v1.core.sched.interface import PauseState  # isort: skip
from vllm.v1.outputs import LogprobsLists  # isort: skip
from vllm.v1.request import Request  # isort: skip

EOS, STOPS = 101, (202, 303)
REPEATED = 77


class Grammar:
    """A grammar that accepts all tokens except token 11."""

    def accept_tokens(self, request_id, tokens):
        return 11 not in tokens


class SteadySides(SideBySide):
    """`SideBySide` with few arrivals, long answers, and all kinds of stop conditions.

    `share` is the fraction of steps in which requests arrive or something unusual happens.
    """

    def __init__(self, *args, share=0.06, is_second_runner=False, **options):
        super().__init__(*args, **options)
        self.share = share
        for scheduler in self.pair:
            scheduler.use_v2_model_runner = is_second_runner
            scheduler.finished_req_ids_dict = collections.defaultdict(set)

    def run(self, num_steps):
        super().run(num_steps)
        steady = self.pair[1].steady
        self.counts["steady"] = steady.num_scheduled
        self.counts["steady updates"] = steady.num_updated
        return self.counts

    def schedule(self, scheduler):
        return scheduler.schedule(self.counts["steps"] % 29 == 11)

    def _add(self):
        rng = self.rng
        if not self.pair[0].requests or rng.random() < self.share:
            for _ in range(rng.randrange(1, 6)):
                self._add_one(self.counts["requests"])
        if rng.random() < self.share / 3:
            self._disturb(rng.choice(["abort", "pause", "reset"]))
        elif self.pair[0].pause_state is not PauseState.UNPAUSED:
            self._pause(PauseState.UNPAUSED)

    def _disturb(self, what):
        self.counts[what] += 1
        if what == "abort":
            self._abort()
        elif what == "pause":
            self._pause(self.rng.choice([PauseState.PAUSED_ALL, PauseState.PAUSED_NEW]))
        else:
            for scheduler in self.pair:
                scheduler.reset_prefix_cache(reset_running_requests=True)

    def _pause(self, state):
        for scheduler in self.pair:
            scheduler.set_pause_state(state)

    def _add_one(self, number):
        rng = self.rng
        head = rng.choice(self.heads)
        tokens = head + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 40))]
        kind = rng.choice(["plain", "plain", "stops", "repeats", "logprobs", "structured", "lora"])
        is_short = kind in ("logprobs", "structured")
        max_tokens = rng.randrange(2, 6) if is_short else rng.randrange(30, 200)
        given = {
            **{"ignore_eos": kind == "plain", "min_tokens": rng.choice([0, 0, 2])},
            **{"logprobs": 1 if kind == "logprobs" else None},
            **{"stop_token_ids": list(STOPS) if kind == "stops" else None},
        }
        if kind == "repeats":
            given["repetition_detection"] = RepetitionDetectionParams(
                max_pattern_size=2, min_count=3
            )
        options = {"priority": rng.randrange(3), "client_index": rng.randrange(2)}
        options["arrival_time"] = float(number)
        if kind == "lora":
            options["lora_request"] = LoRARequest("adapter", 7, "/no/such")
        for scheduler, hasher in zip(self.pair, self.hashers):
            params = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False, **given)
            params.update_from_generation_config({}, EOS)
            request = Request(
                f"r{number}",
                prompt_token_ids=list(tokens),
                sampling_params=params,
                pooling_params=None,
                block_hasher=hasher,
                **options,
            )
            if kind == "structured":
                request.structured_output_request = types.SimpleNamespace(
                    grammar=Grammar(), reasoning_ended=True
                )
            scheduler.add_request(request)
        self.counts["requests"] += 1
        self.counts[kind] += 1

    def answer(self, scheduler, scheduled):
        answered = answer(scheduler, scheduled)
        asked = False
        for request_id, tokens in zip(answered.req_ids, answered.sampled_token_ids):
            params = scheduler.requests[request_id].sampling_params
            asked |= params.num_logprobs is not None
            if params.repetition_detection is not None and tokens:
                tokens[:] = [REPEATED if tokens[0] < 60 else tokens[0]]
        if asked:
            shape = len(answered.req_ids), 2
            answered.logprobs = LogprobsLists(
                *(np.zeros(shape, np.int64), np.zeros(shape), np.zeros(shape[0], np.int64))
            )
        return answered

    def _step(self):
        before = set(self.pair[0].requests)
        super()._step()
        self.counts["ended"] += len(before - set(self.pair[0].requests))
