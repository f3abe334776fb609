# SPDX-License-Identifier: Apache-2.0
"""Computes steady decode steps of vLLM's scheduler attribute by attribute instead of request by
request.

In a steady step, no request is waiting and each running request computes one token. `schedule()`
then repeats the previous step with updated token counts, and `update_from_output` appends one token
to each request. Both methods update the same state as vLLM's methods. All conditions are checked
before anything changes. If a condition is not met, the method returns None, and the caller runs
vLLM's own code.

The code mirrors vLLM's line by line, so it is used only with the versions in `known_sources.py`.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import numpy as np
from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from kvcache_vllm.batches import NOBODY, SteadyBatch, facts_of

_MOST_IN_FLIGHT = 64  # maximum number of vLLM steps whose outputs have not arrived

_status = attrgetter("status")


class SteadySteps:
    """Schedules the steady steps of a vLLM scheduler.

    Attributes:
        num_scheduled: Steps that `schedule` has built.
        num_updated: Steps whose outputs `update` has processed.
    """

    def __init__(self, scheduler: Any, *, is_async: bool) -> None:
        self._scheduler, self._is_async = scheduler, is_async
        self._batch = NOBODY
        self._refused: Request | None = None  # last request found to need vLLM's code
        self._in_flight: deque[tuple[SchedulerOutput, SteadyBatch]] = deque(maxlen=_MOST_IN_FLIGHT)
        self._has_nans = False  # whether requests record the number of NaNs in their logits
        # Only vLLM's schedule() preempts, resumes and admits requests. Requests that were checked
        # need fewer checks until its next call.
        self._epoch = 0
        self.num_scheduled = self.num_updated = 0

    # --- schedule() ---

    def schedule(self, throttle_prefills: bool) -> SchedulerOutput | None:
        """Schedule one token of each running request, or return None if vLLM's code must run."""
        output = self._schedule(throttle_prefills)
        if output is None:
            self._epoch += 1
        else:
            self.num_scheduled += 1
        return output

    def _schedule(self, throttle_prefills: bool) -> SchedulerOutput | None:
        scheduler = self._scheduler
        if not scheduler.running:
            self._batch = NOBODY  # `NOBODY` contains no requests
            return None
        if throttle_prefills or not self._is_plain():
            return None
        batch = self._batch_of(scheduler.running)
        if batch is None:
            return None
        found = self._steady_part(batch)
        if found is None:
            return None
        batch, num_computed = found
        new_blocks = scheduler.kv_cache_manager.begin_decode_step(batch.num_scheduled)
        if new_blocks is None:
            return None
        output = self._output(batch, num_computed, new_blocks)
        self._advance(batch)
        self._in_flight.append((output, batch))
        return output

    def _is_plain(self) -> bool:
        """Return whether only the next token of each running request can be scheduled."""
        scheduler = self._scheduler
        config, num_running = scheduler.scheduler_config, len(scheduler.running)
        return not (
            scheduler.waiting
            or scheduler.kv_holding_waiting
            or scheduler.deferred_waiting
            or scheduler._pause_state is not vllm_scheduler.PauseState.UNPAUSED
            or num_running > scheduler.max_num_scheduled_tokens
            or num_running > config.max_num_batched_tokens
            or num_running > scheduler.max_num_running_reqs
            or scheduler.num_sampled_tokens_per_step != 1
            # speculative decoding
            or scheduler.vllm_config.speculative_config is not None
            or scheduler.num_spec_tokens
            or scheduler.num_lookahead_tokens
            or scheduler.dynamic_sd_lookup is not None
            # connectors, pipeline stages, and prefill intervals
            or scheduler.connector is not None
            or scheduler.ec_connector is not None
            or scheduler.aux_output_connector is not None
            or scheduler.defer_block_free
            or scheduler.use_pp
            or getattr(scheduler, "decode_stagger", 1) != 1
            or getattr(scheduler, "local_prefill_interval", 1) > 1
        )

    def _batch_of(self, requests: list[Request]) -> SteadyBatch | None:
        """Return the batch of these requests, or None if one of them needs vLLM's code."""
        last = self._batch
        if last.requests == requests:
            return last
        if self._refused is not None and self._refused in requests:
            return None
        wanted = set(requests)
        last = last.where([each in wanted for each in last.requests])
        new = requests[len(last.requests) :]
        if last.requests + new != requests:  # the order has changed
            last, new = NOBODY, requests
        facts = [facts_of(each) for each in new]
        self._refused = next((each for each, own in zip(new, facts) if own is None), None)
        if self._refused is not None:
            self._batch = NOBODY
            return None
        self._batch = last.extended(facts) if facts else last
        return self._batch

    def _steady_part(self, batch: SteadyBatch) -> tuple[SteadyBatch, list[int]] | None:
        """Return the batch of requests that compute one token, and their numbers of computed
        tokens.

        Requests whose last token is computed by a step in flight are omitted. None: vLLM's code
        must run.
        """
        scheduler, found = self._scheduler, []
        is_unchecked, is_async = batch.checked != self._epoch, self._is_async
        is_done = False
        for request, all_ids, most in zip(batch.requests, batch.all_ids, batch.most_tokens):
            num_computed, num_known = request.num_computed_tokens, len(all_ids)
            if is_async or is_unchecked:
                num_pending = request.num_output_placeholders
                if num_pending:
                    if not is_async:
                        return None
                    if num_computed + 2 - num_pending >= most:
                        is_done = True
                    num_known += num_pending
            if (
                num_known - num_computed != 1
                or request.spec_token_ids
                or (is_unchecked and request.is_prefill_chunk)
            ):
                return None
            found.append(num_computed)
        if is_done:
            are_left = [
                not request.num_output_placeholders or len(all_ids) + 1 < most
                for request, all_ids, most in zip(batch.requests, batch.all_ids, batch.most_tokens)
            ]
            batch, found = batch.where(are_left), list(compress(found, are_left))
        if (
            not found
            or max(found) + 2 > scheduler.max_model_len
            # vLLM's V1 model runner is sent all tokens of requests that were not in the previous
            # step.
            or not (
                scheduler.use_v2_model_runner
                or scheduler.prev_step_scheduled_req_ids.issuperset(batch.ids)
            )
            # Prompt chunks end at positions where a state is kept.
            or (
                scheduler.need_mamba_block_aligned_split
                and any(map(int.__lt__, found, batch.num_prompt_tokens))
            )
        ):
            return None
        return batch, found

    def _output(
        self, batch: SteadyBatch, num_computed: list[int], new_blocks: dict[str, Any]
    ) -> SchedulerOutput:
        """Return vLLM's description of the step."""
        scheduler, num_requests = self._scheduler, len(batch.ids)
        new_block_ids: list[tuple[list[int], ...] | None] = [None] * num_requests
        if new_blocks:
            rows = dict(zip(batch.ids, range(num_requests)))
            for request_id, blocks in new_blocks.items():
                new_block_ids[rows[request_id]] = blocks.get_block_ids(allow_none=True)
        encoder_stats = None
        if scheduler.log_stats and scheduler.observability_config.enable_logging_iteration_details:
            encoder_stats = scheduler._make_scheduled_encoder_input_stats({})
        return SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=batch.ids.copy(),
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=new_block_ids,
                num_computed_tokens=num_computed,
                # known output tokens and placeholders
                num_output_tokens=(np.array(num_computed) + batch.from_outputs).tolist(),
            ),
            num_scheduled_tokens=batch.num_scheduled.copy(),
            total_num_scheduled_tokens=num_requests,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            scheduled_encoder_input_stats=encoder_stats,
            preempted_req_ids=scheduler.reset_preempted_req_ids,
            finished_req_ids=scheduler.finished_req_ids,
            free_encoder_mm_hashes=scheduler.encoder_cache_manager.get_freed_mm_hashes(),
            new_block_ids_to_zero=scheduler._get_new_block_ids_to_zero(),
            num_spec_tokens_to_schedule=scheduler.num_spec_tokens,
            ec_manager_metadata=scheduler.encoder_cache_manager.get_manager_metadata(),
        )

    def _advance(self, batch: SteadyBatch) -> None:
        """Update the state of the scheduler and its requests as vLLM does after a step."""
        scheduler, requests = self._scheduler, batch.requests
        scheduler.current_step += 1
        scheduler.prefill_capacity_bound = False
        if hasattr(scheduler, "num_executed_steps"):  # since vLLM 0.33
            scheduler.num_executed_steps += 1
        if not scheduler.use_v2_model_runner:
            before = scheduler.prev_step_scheduled_req_ids
            if len(before) != len(batch.ids):
                before.clear()
                before.update(batch.ids)
        if scheduler._inflight_prefills:
            scheduler._inflight_prefills.difference_update(requests)
        scheduler.finished_req_ids = set()
        scheduler.reset_preempted_req_ids = set()
        if not self._is_async:
            for request in requests:
                request.num_computed_tokens += 1
                request.num_in_flight_tokens += 1
            return
        scheduler._spec_token_placeholders = []
        for request in requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += 1
        if scheduler.use_v2_model_runner:
            next_step = scheduler.current_step + 1
            for request in requests:
                request.next_decode_eligible_step = next_step

    # --- update_from_output ---

    def update(
        self, scheduled: SchedulerOutput, answered: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs] | None:
        """Append the sampled token of each request, or return None if vLLM's code must run."""
        self._has_nans = self._has_nans or bool(answered.num_nans_in_logits)
        batch = self._taken(scheduled)
        if batch is None or self._has_nans or not self._is_plain_answer(answered):
            return None
        sampled = self._sampled(batch, scheduled, answered)
        if sampled is None:
            return None
        num_tokens = self._append(batch, sampled)
        outputs = list(map(EngineCoreOutput, batch.ids, sampled))
        self._stop(batch, sampled, num_tokens, outputs)
        self.num_updated += 1
        return self._outputs(batch, outputs, answered)

    def _taken(self, scheduled: SchedulerOutput) -> SteadyBatch | None:
        """Remove and return a step's batch, and discard earlier batches; None if vLLM built the step."""
        for i, (output, batch) in enumerate(self._in_flight):
            if output is scheduled:
                for _ in range(i + 1):
                    self._in_flight.popleft()
                return batch
        return None

    def _is_plain_answer(self, answered: ModelRunnerOutput) -> bool:
        """Return whether a model's output consists of tokens only."""
        scheduler = self._scheduler
        return bool(answered.sampled_token_ids) and not (
            answered.logprobs is not None
            or answered.prompt_logprobs_dict
            or answered.prompt_token_id_logprobs_dict
            or answered.pooler_output
            or answered.kv_connector_output is not None
            or answered.ec_connector_output is not None
            or answered.aux_output_connector_output
            or scheduler.connector is not None
            or scheduler.ec_connector is not None
            or scheduler.aux_output_connector is not None
            or scheduler.defer_block_free
            or scheduler.num_spec_tokens
            or scheduler.return_sampling_mask
            or scheduler.perf_metrics is not None
            or scheduler.grammar_compile_error_reqs
            or scheduler.encoder_cache_mismatch_reqs
        )

    def _sampled(
        self, batch: SteadyBatch, scheduled: SchedulerOutput, answered: ModelRunnerOutput
    ) -> list[list[int]] | None:
        """Return the sampled token of each request, or None if vLLM's code must process one."""
        if (
            scheduled.num_scheduled_tokens != batch.num_scheduled
            or scheduled.scheduled_spec_decode_tokens
        ):
            return None
        if list(map(_status, batch.requests)) != batch.statuses:  # aborted or preempted
            return None
        if batch.checked != self._epoch:
            for request in batch.requests:
                if (
                    request.num_stale_output_tokens  # preempted and resumed
                    or request.prefill_stats is not None  # the first token after the prompt
                    or request.events
                    or request.is_prefill_chunk
                    or bool(request.num_output_placeholders) is not self._is_async
                ):
                    return None
            batch.checked = self._epoch
        sampled, at = answered.sampled_token_ids, answered.req_id_to_index
        if list(at) != batch.ids or list(at.values()) != batch.positions:  # the order differs
            if not all(map(at.__contains__, batch.ids)):
                return None
            sampled = list(map(sampled.__getitem__, map(at.__getitem__, batch.ids)))
        if len(sampled) != len(batch.ids) or set(map(len, sampled)) != {1}:
            return None
        return sampled if set(map(type, chain.from_iterable(sampled))) == {int} else None

    def _append(self, batch: SteadyBatch, sampled: list[list[int]]) -> np.ndarray:
        """Append a token to each request, and hash the blocks that are now full.

        Return the number of known tokens of each request as int64[n].
        """
        requests = batch.requests
        rows = zip(requests, batch.all_ids, batch.output_ids, chain.from_iterable(sampled))
        if self._is_async:
            for request, all_ids, output_ids, token_id in rows:
                output_ids.append(token_id)
                all_ids.append(token_id)
                request.num_in_flight_tokens -= 1
                request.num_output_placeholders -= 1
        else:
            for request, all_ids, output_ids, token_id in rows:
                output_ids.append(token_id)
                all_ids.append(token_id)
                request.num_in_flight_tokens -= 1
        num_tokens = batch.num_tokens()
        if batch.hash_span is None:
            for request in requests:
                request.update_block_hashes()
            return num_tokens
        size, num_lookahead = batch.hash_span
        if size:
            for i in np.flatnonzero((num_tokens - num_lookahead) % size == 0).tolist():
                requests[i].update_block_hashes()
        return num_tokens

    def _stop(
        self,
        batch: SteadyBatch,
        sampled: list[list[int]],
        num_tokens: np.ndarray,
        outputs: list[EngineCoreOutput],
    ) -> None:
        """Free the requests that stop according to vLLM's `check_stop`, and write their outputs."""
        scheduler = self._scheduler
        limits = np.minimum(batch.limits, scheduler.max_model_len)
        may_stop = set(np.flatnonzero(num_tokens >= limits).tolist())
        may_stop.update(batch.watched)
        if not batch.stops.isdisjoint(chain.from_iterable(sampled)):
            may_stop.update(i for i, (token_id,) in enumerate(sampled) if token_id in batch.stops)
        stopped = []
        for i in sorted(may_stop):
            request = batch.requests[i]
            if not vllm_scheduler.check_stop(request, scheduler.max_model_len):
                continue
            finish_reason = request.get_finished_reason()
            scheduler._handle_stopped_request(request)
            kv_transfer_params, ec_transfer_params = scheduler._free_request(request)
            stopped.append(request)
            outputs[i] = EngineCoreOutput(
                request.request_id,
                outputs[i].new_token_ids,
                finish_reason=finish_reason,
                stop_reason=request.stop_reason,
                kv_transfer_params=kv_transfer_params,
                ec_transfer_params=ec_transfer_params,
            )
        if stopped:
            scheduler.running = vllm_scheduler.remove_all(scheduler.running, set(stopped))
            if not scheduler.running:
                self._batch = NOBODY

    def _outputs(
        self, batch: SteadyBatch, outputs: list[EngineCoreOutput], answered: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Return the outputs by client, and publish the events."""
        scheduler = self._scheduler
        by_client: dict[int, list[EngineCoreOutput]] = {batch.client_indices[0]: outputs}
        if not batch.is_one_client:
            by_client = {}
            for client_index, output in zip(batch.client_indices, outputs):
                by_client.setdefault(client_index, []).append(output)
        if events := scheduler.kv_cache_manager.take_events():
            scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))
        found = {index: EngineCoreOutputs(outputs=each) for index, each in by_client.items()}
        if finished := scheduler.finished_req_ids_dict:
            for client_index, request_ids in finished.items():
                found.setdefault(client_index, EngineCoreOutputs()).finished_requests = request_ids
            finished.clear()
        stats = scheduler.make_stats(
            None, None, answered.cudagraph_stats, None, ec_connector_stats=None
        )
        if stats is not None:
            next(iter(found.values())).scheduler_stats = stats
        return found
