# SPDX-License-Identifier: Apache-2.0
"""Offers the KV of finished prompts to other engines, and loads KV that other engines offer.

All methods run in the scheduler's thread. A separate thread (`TensorRank`) transfers the data. With
tensor parallelism, each rank's scheduler makes the same calls, because SGLang gives all of them the same
requests. What depends on a rank's transfers or clock is agreed on (`_agree`) before it changes the tree
or the queue.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvcache_exchange.disaggregation.leases import LeaseNumbers
from kvcache_exchange.disaggregation.offer import Offer, digest_of
from kvcache_exchange.disaggregation.options import ConnectorOptions
from kvcache_exchange.disaggregation.steps import Load, Results, Step, check_ranks
from kvcache_exchange.identity import KVIdentity
from kvcache_exchange.plugins.moves import CONVERTS
from kvcache_exchange.plugins.rank import TensorRank
from kvcache_sglang.layout import attention_layers, layout_of_pool, model_of, scales_of
from kvcache_sglang.limits import check_scheduler
from kvcache_sglang.params import ASK, KEY, offer_in, text_of, value_of
from kvcache_sglang.weights import check_observed, observe_weight_updates

_log = logging.getLogger("kvcache.exchange")
_PATIENCE_S = 1.0  # seconds to wait for the rank's report after its deadline
_PAUSE_S = 0.0005  # seconds for which an idle scheduler yields to the rank's thread
_STUCK_S = 1.0  # seconds for which requests must have waited before leases are ended early
_MOST_HELD = 0.5  # maximum fraction of the pool that leases and loads may hold


@dataclass
class _Loading:
    """A request whose KV is loading.

    `tokens` are the prefix tokens, `lock` pins the locally cached part of the prefix, and `slots`
    are the newly allocated slots. `go_on` admits the request.
    """

    tokens: Any
    recv_req: Any
    lock: Any
    node: Any
    slots: torch.Tensor
    go_on: Callable[[], None]
    deadline: float


class Exchange:
    """Exchanges KV between one scheduler and other engines.

    Args:
        scheduler: An initialized scheduler of SGLang.
        options: Connection options.

    Raises:
        ValueError: The version of SGLang, one of its options, or the layout of its pool is not supported.
    """

    def __init__(self, scheduler: Any, options: ConnectorOptions) -> None:
        check_scheduler(scheduler)
        check_observed(scheduler)
        self._options, self._tree = options, scheduler.tree_cache
        self._scheduler, self._allocator = scheduler, scheduler.token_to_kv_pool_allocator
        self._page_size = scheduler.page_size
        self._group, self._num_ranks = scheduler.tp_cpu_group, scheduler.server_args.tp_size
        number = torch.distributed.get_rank(self._group) if self._num_ranks > 1 else 0
        self._engine_id = self._gather(f"sglang-{uuid.uuid4().hex[:12]}")[0]
        self._identity = KVIdentity(model_of(scheduler))
        pool, runner = self._allocator.get_kvcache(), scheduler.tp_worker.model_runner
        layers = attention_layers(runner.model, pool.layer_num)
        backends = {runner.prefill_attention_backend_str, runner.decode_attention_backend_str}
        layout, tensors = layout_of_pool(
            pool,
            tuple(layers),
            self._identity.model["num_kv_heads"],
            self._engine_id,
            self._num_ranks,
            scales_of(layers, pool, backends),
        )
        self._layouts = (layout,)
        self._rank = TensorRank(self._engine_id, number, self._layouts, [tensors], options)
        handshakes = self._gather(self._rank.handshake)
        check_ranks(handshakes)
        self._addresses = tuple(each.address for each in handshakes)
        self._numbers = self._gather(LeaseNumbers())[0]
        self._unagreed = Results()  # of this rank
        self._leases: dict[str, tuple[Any, int]] = {}  # lock and number of tokens, keyed by request
        self._loads: dict[str, _Loading] = {}
        # Slots to which failed loads may still write, keyed by request.
        self._quarantine: dict[str, torch.Tensor] = {}
        self.stats = {"offers": 0, "loads": 0, "loaded_tokens": 0, "failed": 0, "refused": 0}
        self._moved_at = 0.0  # last time at which no request was waiting for leases
        observe_weight_updates(self._after_weight_update, before=self._before_weight_update)
        _log.info("Exchanging KV with other engines as engine %s", self._engine_id)

    def describe(self) -> dict[str, int]:
        """Return the counts of `stats`, and the current leases and loads. Part of `/server_info`."""
        return {**self.stats, "leases": len(self._leases), "loading": self.num_loads}

    @property
    def num_loads(self) -> int:
        """Number of loads that hold slots."""
        return len(self._loads) + len(self._quarantine)

    # Methods of a sender.

    def publish(self, request: Any) -> None:
        """Offer the prompt of a finished request that asked for an offer, before the response is sent.

        The offer covers whole pages, which stay locked in the radix cache until the lease ends. If
        no offer can be made, the response contains none, and the other engine recomputes the
        prompt.
        """
        if (
            value_of(request.sampling_params.custom_params) != ASK
            or not request.finished()
            or request.finished_output
            or isinstance(request.finished_reason, FINISH_ABORT)
            or request.rid in self._leases
            or not (num_outputs := len(request.output_ids_through_stop))
        ):
            return
        offer = None if self._has_other_inputs(request) else self._offer(request)
        if offer is not None:
            info = request.customized_info or {}
            # SGLang expects one value per generated token.
            info[KEY] = [None] * (num_outputs - 1) + [text_of(offer)]
            request.customized_info = info
            self.stats["offers"] += 1

    def _offer(self, request: Any) -> Offer | None:
        prompt, size = request.origin_input_ids, self._page_size
        node, num_tokens = self._match(prompt[: len(prompt) // size * size], request.cache_salt)
        # HiCache inserts a page into the tree before its data has been copied back from the host.
        is_loading_back = bool(self._tree.ongoing_load_back)
        if not num_tokens or is_loading_back or not self._has_room(num_tokens):
            return None
        lease = self._numbers.take(request.rid, self._options.lease_s)
        if lease is None:
            return None
        lock = self._tree.lock(node)
        self._leases[request.rid] = lock, num_tokens
        self._rank.begin(Step(leases={request.rid: (lease, self._options.lease_s)}))
        pages = self._tree.path_device_indices(node)[::size] // size
        return Offer(
            self._engine_id,
            request.rid,
            num_tokens,
            _digest(prompt[:num_tokens], request.cache_salt),
            self._identity,
            self._layouts,
            (tuple(pages.tolist()),),
            self._addresses,
            lease,
        )

    def end_leases(self) -> None:
        """End all leases, because their pages may be freed. Readers recompute the prompts."""
        if not self._leases:
            return
        self._rank.begin(Step(ends=set(self._leases)))
        for lock, _ in self._leases.values():
            self._tree.unlock(lock)
        self._leases.clear()

    # Methods of a receiver.

    def load(self, recv_req: Any, go_on: Callable[[], None]) -> bool:
        """Start to load the prefix of a new request if it has an offer.

        Args:
            recv_req: The request, as the scheduler receives it.
            go_on: Admits the request. Called once the load has ended.

        Returns:
            Whether a load has started. If not, the caller must admit the request.
        """
        value = value_of(recv_req.sampling_params.custom_params)
        if value is None or value == ASK:
            return False
        try:
            offer = offer_in(value)
            self._check(recv_req, offer)
        except (TypeError, ValueError) as error:
            self._refuse(recv_req, error)
            return False
        size, tokens = self._page_size, recv_req.input_ids
        end = min(offer.num_tokens, len(tokens) - 1) // size * size  # the last token is computed
        tokens = tokens[:end]
        node, num_local = self._match(tokens, recv_req.cache_salt)
        if num_local >= end:
            self._rank.begin(Step(unread=[offer]))
            return False
        lock = self._tree.lock(node)
        slots = self._allocate(end - num_local)
        if slots is None:
            self._tree.unlock(lock)
            self._rank.begin(Step(unread=[offer]))
            self._refuse(recv_req, "no free pages")
            return False
        pages = [0] * (num_local // size) + (slots[::size] // size).tolist()
        step = Step(loads={recv_req.rid: Load(offer, num_local, end, (pages,))})
        # A forward pass in flight may still write to slots that have just been freed.
        with self._scheduler.device_module.StreamContext(self._scheduler.forward_stream):
            self._rank.begin(step)
        deadline = time.monotonic() + self._options.timeout_s + _PATIENCE_S
        self._loads[recv_req.rid] = _Loading(tokens, recv_req, lock, node, slots, go_on, deadline)
        return True

    def poll(self) -> None:
        """Admit the requests whose loads have ended, and release slots and locks that are no longer
        used.

        Called in each iteration of the event loop.
        """
        results = self._take_results()
        for rid in [rid for rid in self._loads if rid in results.received]:
            loading = self._loads.pop(rid)
            self._insert(loading)
            loading.go_on()
        for rid in sorted(results.failed):  # the rank has logged the reason
            self._give_up(rid)
        is_active = self._loads or len(self._numbers)
        if is_active and not self._is_running() and not self._scheduler.waiting_queue:
            time.sleep(_PAUSE_S)
        self._free_released(results)

    def wait_for_released_slots(self) -> None:
        """Wait at most `timeout_s` until no failed or canceled load can write to the pool."""
        for _ in range(round(self._options.timeout_s / _PAUSE_S)):  # as often on each rank
            if not self._quarantine:
                return
            time.sleep(_PAUSE_S)
            self._free_released(self._take_results())

    def _before_weight_update(self) -> None:
        """End all leases and loads, because their KV belongs to the current weights."""
        self.cancel("")
        self.wait_for_released_slots()
        self.end_leases()

    def _after_weight_update(self) -> None:
        """Change the identity, because the weights are no longer those in the files."""
        self._identity = replace(self._identity, version=f"unnamed {uuid.uuid4().hex}")

    def _is_running(self) -> bool:
        scheduler = self._scheduler
        last = scheduler.last_batch
        return not (
            scheduler.running_batch.is_empty()
            and scheduler.chunked_req is None
            and (last is None or last.is_empty())
            and not (scheduler.enable_overlap and scheduler.result_queue)
        )

    def _is_stuck(self) -> bool:
        """Return whether requests have waited for `_STUCK_S` while no request is running."""
        now = time.monotonic()
        if not self._leases or not self._scheduler.waiting_queue or self._is_running():
            self._moved_at = now
        return now - self._moved_at > _STUCK_S

    def _take_results(self) -> Results:
        """Return the results on which the ranks agree, and unlock the pages of leases that have ended."""
        results, now = self._rank.take_results(), time.monotonic()
        for rid in [rid for rid, each in self._loads.items() if now > each.deadline]:
            _log.warning(
                "KV of request %s is not loaded: the transfer thread does not respond", rid
            )
            results.failed[rid] = "late"
        results, is_stuck = self._agree(results, self._is_stuck())
        for rid in sorted(results.sent):  # in the same order on each rank
            self._numbers.give_back(rid)
            if rid in self._leases:
                self._tree.unlock(self._leases.pop(rid)[0])
        if is_stuck and self._leases:
            _log.warning(
                "Leases are ended early, because waiting requests may need the leased pages"
            )
            self.end_leases()
        return results

    def _agree(self, results: Results, is_stuck: bool) -> tuple[Results, bool]:
        """Return what has happened on all ranks, or, for failures and requests that are stuck, on any.

        The other results of this rank are kept for the next call. All ranks have the same leases
        and loads, so that either all of them or none communicates.
        """
        if self._num_ranks == 1:
            return results, is_stuck
        own = self._unagreed
        own.sent |= results.sent
        own.received |= results.received
        own.released |= results.released | results.received  # the transport no longer writes
        own.failed |= results.failed
        if not (len(self._numbers) or self._loads or self._quarantine):
            return Results(), False
        found = self._gather((own.sent, own.received, own.released, own.failed, is_stuck))
        *sets, failures, stuck = zip(*found)
        sent, received, released = (set.intersection(*each) for each in sets)
        failed = {rid: reason for each in failures for rid, reason in each.items()}
        own.sent -= sent
        own.received -= released
        own.released -= released
        own.failed = {rid: each for rid, each in own.failed.items() if rid not in failed}
        return Results(sent, received, failed, released), any(stuck)

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        values = [value] * self._num_ranks
        if self._num_ranks > 1:
            torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def _free_released(self, results: Results) -> None:
        ended = results.released | results.received
        for rid in [rid for rid in self._quarantine if rid in ended]:
            self._allocator.free(self._quarantine.pop(rid))

    def cancel(self, prefix: str) -> None:
        """End the loads of requests whose ids begin with a prefix, and admit these requests.

        SGLang then finds these requests in its own queue and aborts them.
        """
        for rid in [rid for rid in self._loads if rid.startswith(prefix)]:
            self._rank.begin(Step(cancels={rid}))
            self._give_up(rid)

    def close(self) -> None:
        """End the exchange."""
        self._rank.close()

    def _check(self, recv_req: Any, offer: Offer) -> None:
        """Raise ValueError if a request cannot use an offer."""
        if self._has_other_inputs(recv_req):
            raise ValueError(
                "the request has images, embeddings, an adapter, a session or extra_key"
            )
        if recv_req.rid in self._loads or recv_req.rid in self._quarantine:
            raise ValueError("an earlier request with this id is loading")
        offer.check_like(self._identity, self._layouts, converts=CONVERTS)
        tokens = recv_req.input_ids
        offer.check_prompt(len(tokens), lambda count: _digest(tokens[:count], recv_req.cache_salt))
        blocks, size = offer.blocks[0], offer.groups[0].block_size
        if not all(blocks[: -(-offer.num_tokens // size)]):
            raise ValueError("the sender has freed blocks that are needed")

    @staticmethod
    def _has_other_inputs(request: Any) -> bool:
        """Return whether a request's KV depends on anything besides its tokens and salt."""
        names = ("mm_inputs", "multimodal_inputs", "input_embeds", "positional_embed_overrides")
        names += ("lora_id", "session_params", "session", "session_id", "extra_key")
        return any(getattr(request, name, None) is not None for name in names)

    def _refuse(self, recv_req: Any, reason: object) -> None:
        self.stats["refused"] += 1
        _log.warning("KV of request %s is computed here: %s", recv_req.rid, reason)

    def _match(self, tokens: Any, salt: str | None) -> tuple[Any, int]:
        """Return the node and the number of tokens of the longest locally cached prefix."""
        found = self._tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens, cache_salt=salt)))
        return found.last_device_node, found.device_prefix_len

    def _allocate(self, num_tokens: int) -> torch.Tensor | None:
        if not self._has_room(num_tokens):
            return None
        if self._allocator.available_size() < num_tokens:
            self._allocator.evict_to_free_tokens(self._tree, num_tokens)
        return self._allocator.alloc(num_tokens)

    def _has_room(self, num_tokens: int) -> bool:
        """Return whether leases and loads may hold more tokens without stalling requests."""
        held = sum(count for _, count in self._leases.values())
        held += sum(len(each.slots) for each in self._loads.values())
        held += sum(len(slots) for slots in self._quarantine.values())
        return held + num_tokens <= _MOST_HELD * self._allocator.size

    def _insert(self, loading: _Loading) -> None:
        """Insert a loaded prefix into the radix cache, which then owns the prefix's slots."""
        local = self._tree.path_device_indices(loading.node)
        salt = loading.recv_req.cache_salt
        self._tree.insert(
            InsertParams(
                key=RadixKey(loading.tokens, cache_salt=salt),
                value=torch.cat([local, loading.slots]).to(torch.int64),
                prev_prefix_len=len(local),  # duplicates beyond this prefix are freed by the tree
            )
        )
        self._tree.unlock(loading.lock)
        self.stats["loads"] += 1
        self.stats["loaded_tokens"] += len(loading.slots)

    def _give_up(self, rid: str) -> None:
        """Admit a request whose load has failed, but keep its slots until the load has ended."""
        if (loading := self._loads.pop(rid, None)) is None:
            return
        self._quarantine[rid] = loading.slots
        self._tree.unlock(loading.lock)
        self.stats["failed"] += 1
        loading.go_on()


def _digest(tokens: Any, salt: str | None) -> str:
    return digest_of(tokens, None, [], salt=salt or None)
