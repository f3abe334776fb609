# SPDX-License-Identifier: Apache-2.0
"""A scheduler of sequence groups with forks and swaps, written for vLLM's v0 block manager."""

from enum import Enum, auto

from vllm.core.block_manager import SelfAttnBlockSpaceManager


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED_STOPPED = auto()


class Sequence:
    def __init__(self, seq_id, tokens):
        self.seq_id, self.tokens, self.status = seq_id, [*tokens], Status.WAITING
        self.data = self  # the original asks it for the number of computed tokens

    def get_num_computed_tokens(self):
        return len(self.tokens) - 1

    def get_len(self):
        return len(self.tokens)

    def get_token_ids(self):
        return self.tokens


class Group:
    def __init__(self, request_id, seqs, encoder=None):
        self.request_id, self.seqs, self.encoder = request_id, seqs, encoder

    def get_seqs(self, status=None):
        return [seq for seq in self.seqs if status is None or seq.status is status]

    def is_encoder_decoder(self):
        return self.encoder is not None

    def get_encoder_seq(self):
        return self.encoder


class Scheduler:
    def __init__(self, *sizes, **options):
        self.manager = SelfAttnBlockSpaceManager(*sizes, **options)
        self.waiting, self.running, self.swapped = [], [], []
        self.now = 0.0

    def step(self):
        """Return what a worker does: swaps out, swaps in, copies, and the sequences that it runs."""
        self.now += 1
        outs, ins, copies, runs = [], [], [], []
        for group in [*self.running]:
            if group not in self.running:
                continue
            while not self.manager.can_append_slots(group, 0):
                victim = self.running.pop()
                outs += self._preempt(victim)
                if victim is group:
                    break
            else:
                for seq in group.get_seqs(Status.RUNNING):
                    copies += self.manager.append_slots(seq, 0)
                    runs.append(seq)
        runs = [seq for seq in runs if seq.status is Status.RUNNING]
        if not outs:
            ins, more = self._swap_in()
            copies += more
        prompts = [] if self.swapped or outs else self._admit()
        for group in self.running:
            for seq in group.get_seqs(Status.RUNNING):
                self.manager.access_all_blocks_in_seq(seq, self.now)
            self.manager.mark_blocks_as_computed(group, max(seq.get_len() for seq in group.seqs))
        return outs, ins, copies, prompts, runs

    def _preempt(self, group):
        if self.manager.can_swap_out(group):
            pairs = self.manager.swap_out(group)
            for seq in group.get_seqs(Status.RUNNING):
                seq.status = Status.SWAPPED
            self.swapped.append(group)
            return pairs
        for seq in group.seqs:
            self.manager.free(seq)
            seq.status = Status.WAITING
        if group.encoder is not None:
            self.manager.free_cross(group)
        group.seqs = group.seqs[:1]  # computed again
        self.waiting.insert(0, group)
        return []

    def _swap_in(self):
        pairs, copies = [], []
        while self.swapped:
            group = self.swapped[0]
            if self.manager.can_swap_in(group, 0).name != "OK":
                break
            pairs += self.manager.swap_in(group)
            for seq in group.get_seqs(Status.SWAPPED):
                seq.status = Status.RUNNING
                copies += self.manager.append_slots(seq, 0)
            self.running.append(self.swapped.pop(0))
        return pairs, copies

    def _admit(self):
        prompts = []
        while self.waiting:
            group = self.waiting[0]
            answer = self.manager.can_allocate(group)
            if answer.name == "LATER":
                break
            self.waiting.pop(0)
            if answer.name == "NEVER":
                continue
            self.manager.allocate(group)
            computed = self.manager.get_common_computed_block_ids(group.seqs)
            for seq in group.seqs:
                seq.status = Status.RUNNING
            self.running.append(group)
            prompts.append((group, computed))
        return prompts

    def fork(self, group, parent, child):
        self.manager.fork(parent, child)
        child.status = Status.RUNNING
        group.seqs.append(child)

    def finish(self, group):
        for seq in group.seqs:
            self.manager.free(seq)
            seq.status = Status.FINISHED_STOPPED
        if group.encoder is not None:
            self.manager.free_cross(group)
        self.running.remove(group)
