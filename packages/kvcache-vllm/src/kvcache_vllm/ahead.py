# SPDX-License-Identifier: Apache-2.0
"""Allocates slots of running requests before vLLM's scheduler requests them.

A request needs no call, and its blocks do not change, until its row exceeds
`KVCacheManager.quiet_until` tokens. Each request is registered for the step in which it will need a
block. When that step begins, one native call serves all registered requests. Blocks that were
filled in earlier steps are published before the next lookup. Mispredicting the scheduler's
decisions costs time but never changes a decision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from vllm.v1.request import Request, RequestStatus

from kvcache.allocator import KVCacheManager
from kvcache_vllm.blocks import NewBlocks
from kvcache_vllm.held import HeldRequest
from kvcache_vllm.states import StateGroups

_Calls = tuple[list[HeldRequest], list[int], list[int]]  # requests, start tokens, stop tokens


class Ahead:
    """Tracks the steps in which requests need blocks, and allocates these blocks.

    Attributes:
        step: Number of the current step.
        busy: Due requests that the scheduler has not served yet, keyed by request ID.
        num_lookahead: Lookahead tokens of the last call.
        has_sessions: Whether a streaming session has been admitted.
        num_native_calls: Number of `advance` calls that made a native call.
    """

    def __init__(
        self,
        native: KVCacheManager,
        states: StateGroups,
        held: Mapping[str, HeldRequest],
    ) -> None:
        self._native, self._states, self._held = native, states, held
        self._block_sizes = [group.block_size for group in native.groups]
        kinds = {group.kind for group in native.groups}
        self._has_windows = (
            not kinds.isdisjoint({"sliding_window", "chunked_local"}) or states.has_drafts
        )
        self._due: defaultdict[int, list[HeldRequest]] = defaultdict(list)  # requests by due step
        self.step = self.num_lookahead = self.num_native_calls = 0
        self.busy: dict[str, HeldRequest] = {}
        self.has_sessions = False

    def begin_step(self) -> None:
        """Begin a step. Serve the requests that need a block in this step with one native call."""
        self.step += 1
        self._states.begin_step(self._native)
        due = self._due.pop(self.step, None)
        if due is None:
            return
        # The pages of states depend on the tokens of the step, so only tokens that the scheduler has
        # scheduled may be added.
        if self._states.are_copied:
            for held in due:
                if held.due == self.step:
                    self.busy[held.request.request_id] = held
            return
        most = (
            len(due) * len(self._block_sizes) * (2 + self.num_lookahead // min(self._block_sizes))
        )
        calls = self._next_calls(due)
        # If blocks are scarce, the scheduler decides which requests get the last blocks.
        if self._native.pool.num_free >= most:
            self.advance(*calls, self.num_lookahead, is_ahead=True)

    def _next_calls(self, due: list[HeldRequest]) -> _Calls:
        """Return the calls that the scheduler is expected to make in this step for due requests.

        Requests whose number of tokens the scheduler may reduce are omitted.
        """
        calls: _Calls = [], [], []
        rows, starts, stops = calls
        step, lookahead, most = self.step, self.num_lookahead, min(self._block_sizes)
        busy, may_go_back = self.busy, self._has_windows or self.has_sessions
        for held in due:
            if held.due != step or held.is_receiving:
                continue
            held.due = 0  # a request may be registered twice
            request = held.engine_request
            busy[request.request_id] = held
            if request.status is not RequestStatus.RUNNING:
                continue  # a session waiting for input may drop its last token
            start, num_pending = request.num_computed_tokens, request.num_output_placeholders
            stop = request.num_tokens + len(request.spec_token_ids) + num_pending
            if stop + lookahead <= held.quiet_until:  # the request was not scheduled in some step
                self.wait(held, stop + lookahead)
            elif request.num_tokens > start + 1:
                pass  # the scheduler may shorten a prompt, and only computed tokens can be hit
            elif not start < stop <= start + most or stop + lookahead >= self._native.max_model_len:
                pass  # too many drafts, or `max_model_len` is reached
            elif (
                num_pending
                and start + 2 - num_pending >= request.num_prompt_tokens + request.max_tokens
            ):
                pass  # an earlier step computes the request's last token
            else:
                rows.append(held)
                starts.append(self.start_of(request, held) if may_go_back else start)
                stops.append(stop)
        return calls

    def advance(
        self,
        rows: list[HeldRequest],
        starts: list[int],
        stops: list[int],
        lookahead: int,
        *,
        is_ahead: bool = False,
        are_past: Sequence[bool] = (),
    ) -> bool:
        """Allocate slots of several rows in one native call. Return whether all rows fit.

        Only computed tokens are published, because a session may drop its last token. With
        `is_ahead`, the scheduler has not yet decided which tokens to compute, so no block can be hit
        until its last token has been computed. `are_past` marks the rows whose tokens were computed
        in an earlier step (empty: none).
        """
        if not rows:
            return True
        token_ids: list[int] = []
        counts = []
        for held, start, stop in zip(rows, starts, stops):
            request, num_known = held.engine_request, held.num_known
            last = min(request.num_computed_tokens, stop) if is_ahead else stop
            told = request.all_token_ids[num_known : max(last, num_known)]
            if told and start < (known_stop := min(num_known, held.num_computed)):
                # A session continues while steps are in flight. Their drafts must not be taken for
                # the new tokens, so they are rejected first, which needs no blocks.
                self._native.advance([held.row], [start], [known_stop])
                held.request.append_tokens(told)
                held.start, held.num_computed = start, known_stop
                held.num_known += len(told)
                told = []
            counts.append(len(told))
            token_ids += told
        self.num_native_calls += 1
        row_ids = [held.row for held in rows]
        answers = self._native.advance(
            row_ids,
            starts,
            stops,
            lookahead,
            token_ids=token_ids,
            num_token_ids=counts,
        )
        fits, quiet = True, self.quiet_until(row_ids)
        for held, start, stop, count, ids, last in zip(rows, starts, stops, counts, answers, quiet):
            if ids is None:
                fits = False
                continue
            held.start, held.num_computed = start, stop
            held.num_known += count
            held.quiet_until = last
            # Calls that only publish blocks cover tokens before those in flight, without lookahead
            # slots.
            num_slots = max(stop, held.engine_request.num_computed_tokens)
            self.wait(held, num_slots + max(lookahead, self.num_lookahead))
            if ids:
                held.ready = NewBlocks(ids) if held.ready is None else held.ready + NewBlocks(ids)
        if self._states.any:
            are_fresh = [not past for past in are_past] or [True] * len(rows)
            for held, start, stop, ids, is_fresh in zip(rows, starts, stops, answers, are_fresh):
                if ids is not None:
                    self._states.note_new(ids)
                    if is_fresh and not self._states.has_drafts:
                        self._states.note_filled(self._native, held.request, start, stop)
        return fits

    def start_of(self, request: Request, held: HeldRequest) -> int:
        """Return the first token of a call, which determines the window of the row.

        Drafts of steps in flight may be rejected, and a session that stops drops the steps in
        flight, so the first token is at or before the start of these steps, but never before the
        end of the hits. A request whose load failed keeps its hits while it recomputes the missing
        tokens.
        """
        start = request.num_computed_tokens
        if start < held.num_computed and not self._states.are_final:
            start = max(start, held.num_published)
        if (
            not (self._has_windows or request.resumable)
            or not request.num_in_flight_tokens
            or self._states.are_final  # models with such states have no drafts
        ):
            return start
        num_hits = held.num_published
        return max(start - request.num_in_flight_tokens, num_hits, held.start)

    def quiet_until(self, rows: list[int]) -> list[int]:
        """Return, for each row, the number of tokens up to which the row's blocks do not change.

        The result is at most `max_model_len`, so that no request is registered for a step that it
        never reaches.
        """
        return np.minimum(self._native.quiet_until[rows], self._native.max_model_len).tolist()

    def wait(self, held: HeldRequest, num_slots: int) -> None:
        """Register the request for the step in which, at one token per step, it will need a block."""
        held.due = self.next_due(held, num_slots)
        self._due[held.due].append(held)

    def next_due(self, held: HeldRequest, num_slots: int) -> int:
        """Return the step in which, at one token per step, the request will need a block."""
        return self.step + 1 + max(held.quiet_until - num_slots, 0)

    def publish_accepted(self, held: HeldRequest, stop: int) -> None:
        """Publish the blocks that the request's first `stop` tokens fill, before the next call drops
        the states at the ends of these blocks.
        """
        request, hashed = held.engine_request, held.hashed
        num_full = min(hashed.num_blocks(request.num_tokens), stop // hashed.block_size)
        held.num_filled = max(held.num_filled, num_full * hashed.block_size)
        if num_full * hashed.block_size > held.num_published:
            start = min(held.num_computed, held.num_known, stop - 1)
            # A session may drop its last token.
            num_further = 0 if request.resumable else hashed.num_lookahead
            if tokens := request.all_token_ids[held.num_known : stop + num_further]:
                held.request.append_tokens(tokens)
                held.num_known += len(tokens)
            self.advance([held], [start], [stop], 0)

    def publish_filled(self, step: int | None) -> None:
        """Publish blocks that requests have filled since their last native call.

        This includes blocks that will be filled in this step.

        `step` is the step that the scheduler is about to plan, or None after a step.
        """
        calls: _Calls = [], [], []
        are_past = []
        for held in self._held.values():
            if held.is_receiving:
                continue
            request = held.engine_request
            if held.step == step:
                start, stop = self.start_of(request, held), held.stop
            else:  # not scheduled in this step, or not recorded
                stop = request.num_computed_tokens - request.num_output_placeholders
                start = min(held.num_computed, stop - 1)
                if request.resumable:  # steps in flight that the session drops still read
                    start = min(start, self.start_of(request, held))
            if self._states.are_final:
                start = max(start, held.num_computed)
                if start >= stop:
                    continue
            size = held.hashed.block_size
            num_full = min(held.hashed.num_blocks(request.num_tokens), stop // size)
            if num_full * size > held.num_published and stop > held.start:
                calls[0].append(held)
                calls[1].append(start)
                calls[2].append(stop)
                are_past.append(held.step != step)
        self.advance(*calls, 0, are_past=are_past)
