# SPDX-License-Identifier: Apache-2.0
"""A scheduler with chunked prefill and preemption, written for the manager of vLLM's first v1 engine."""

from enum import Enum, auto

from vllm.v1.core.kv_cache_manager import KVCacheManager


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class Request:
    """A request without a base class."""

    def __init__(self, request_id, prompt, num_answers, **extra):
        self.request_id, self.status = request_id, Status.WAITING
        self.all_token_ids = [*prompt]
        self.num_prompt_tokens = len(prompt)
        self.num_answers = num_answers
        self.num_computed_tokens = 0
        self.block_ids, self.kv_block_hashes = [], []
        self.mm_positions, self.mm_hashes, self.lora_request = [], [], None
        vars(self).update(extra)

    def set_kv_block_hashes(self, hashes):
        self.kv_block_hashes = hashes

    def append_kv_block_hashes(self, block_hash):
        self.kv_block_hashes.append(block_hash)

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    @property
    def is_done(self):
        return self.num_tokens >= self.num_prompt_tokens + self.num_answers


class Scheduler:
    def __init__(self, block_size, num_blocks, max_len, budget, num_preallocate=0, log=None):
        sizes = (block_size, num_blocks, max_len, None, True, num_preallocate)
        self.manager = KVCacheManager(*sizes)
        self.block_size, self.budget, self.log = block_size, budget, [] if log is None else log
        self.waiting, self.running = [], []

    def add(self, request):
        self.waiting.append(request)

    def step(self, sample):
        """Schedule a step, and append `sample(request)` to each request whose tokens are computed."""
        left, scheduled, preempted = self.budget, {}, False
        i = 0
        while i < len(self.running) and left:
            request = self.running[i]
            count = min(request.num_tokens - request.num_computed_tokens, left)
            new = self._append(request, count)
            if new is None:
                preempted = True
                break
            if request in self.running:
                request.block_ids += [block.block_id for block in new]
                scheduled[request] = count
                left -= count
                i += 1
        while self.waiting and left and not preempted and self._admit(scheduled, left):
            left = self.budget - sum(scheduled.values())
        scheduled = {r: n for r, n in scheduled.items() if r.status is Status.RUNNING}
        if self.running:
            count = self.manager.get_num_common_prefix_blocks(self.running[0], len(self.running))
            self.log.append(("common", count))
        for request, count in scheduled.items():
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids.append(sample(request))
                if request.is_done:
                    request.status = Status.FINISHED
                    self.running.remove(request)
                    self.manager.free(request)
                    self.log.append(("free", request.request_id))
        return scheduled

    def _append(self, request, count):
        while (new := self.manager.append_slots(request, count)) is None:
            self.log.append(("append", request.request_id, count, None))
            victim = self.running.pop()
            self.manager.free(victim)
            self.log.append(("preempt", victim.request_id))
            victim.status, victim.num_computed_tokens = Status.PREEMPTED, 0
            victim.block_ids = []
            self.waiting.insert(0, victim)
            if victim is request:
                return None
        ids = [block.block_id for block in new]
        self.log.append(("append", request.request_id, count, ids))
        return new

    def _admit(self, scheduled, left):
        request = self.waiting[0]
        computed, num_computed = self.manager.get_computed_blocks(request)
        if num_computed == request.num_tokens:  # the last token must run
            num_computed -= self.block_size
            computed.pop()
        count = min(request.num_tokens - num_computed, left)
        new = self.manager.allocate_slots(request, count, computed)
        hit = [block.block_id for block in computed]
        if new is None:
            self.log.append(("allocate", request.request_id, count, hit, None))
            return False
        request.block_ids = [block.block_id for block in computed + new]
        self.log.append(("allocate", request.request_id, count, hit, request.block_ids[len(hit) :]))
        self.waiting.pop(0)
        self.running.append(request)
        request.status, request.num_computed_tokens = Status.RUNNING, num_computed
        scheduled[request] = count
        return True
