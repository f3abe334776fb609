# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill in the manager's process. Decisions use only request data, never KV bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kvcache.allocator import Admit, External, KVCacheManager, Request
from kvcache.allocator.event_stream import digest_of_rows
from kvcache.checks import MAX_INT64, check_name, instance, integer, listed, shown
from kvcache.kinds import kind_class, make_kind
from kvcache.sources import Arrived, LoadStats
from kvcache.sources.loads import LoadState, SourceLoad, SourceLoads
from kvcache.step import StepReport
from kvcache_exchange.disaggregation.layout import GroupLayout, check_like, is_complete
from kvcache_exchange.disaggregation.leases import LeaseNumbers
from kvcache_exchange.disaggregation.offer import VERSION, Offer, digest_of
from kvcache_exchange.disaggregation.options import ConnectorOptions, checked_seconds
from kvcache_exchange.disaggregation.steps import Load, RankHandshake, Results, Step, check_ranks
from kvcache_exchange.identity import KVIdentity

_PATIENCE_S = 1.0  # seconds to wait for a rank's report after its deadline


class Rank(Protocol):
    """A rank of this engine: a `CacheRank`, or a proxy for a rank in another process."""

    handshake: RankHandshake

    def begin(self, step: Step) -> None: ...

    def take_results(self) -> Results: ...

    def close(self) -> None: ...


@dataclass
class _Reading:
    """Tracks how far the ranks have read an offer."""

    offer: Offer
    deadline: float = 0.0  # time by which all ranks must report, in seconds of the clock
    error: str | None = None
    received: int = 0  # number of ranks that have received everything
    released: int = 0


class Connector:
    """Publishes a manager's finished requests under leases, and loads requests published by other
    engines.

    An engine can be a sender, a receiver, or both. A sender calls `publish` instead of `free`, and
    calls `poll` in every step. For a receiver, the connector is a `KVSource` whose `match` takes an
    offer.

    Args:
        manager: The manager of this engine.
        ranks: All ranks of this engine.
        engine_id: Name by which peers identify this engine.
        model: JSON values that identify the model, such as a name and a revision. They must be
            equal in both engines, like the version of the weights (`PrefixCache.start_epoch`), the
            layouts and attention kinds.
        options: Options of the connector, which uses only `lease_s`. The ranks use the other
            options.
        clock: Function that returns the time in seconds. Replays pass their own clock.

    Raises:
        TypeError: `model` contains values that JSON cannot represent.
        ValueError: The pages of a transferred group hold neither consecutive tokens nor a state, the
            ranks were created for other groups than the manager or than each other, or a rank is
            missing or not in its place.
    """

    name = "disaggregation"

    def __init__(
        self,
        manager: KVCacheManager,
        ranks: Sequence[Rank],
        *,
        engine_id: str,
        model: Mapping[str, Any] | None = None,
        options: ConnectorOptions | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        instance(manager, KVCacheManager, "manager")
        self._manager, self._ranks, self._engine_id = manager, listed(ranks, "ranks"), engine_id
        check_name(engine_id, "engine_id")
        for i, rank in enumerate(self._ranks):
            if not hasattr(rank, "handshake"):
                raise TypeError(f"ranks[{i}] is {shown(rank)}: expected a rank")
        if not self._ranks:
            raise ValueError("ranks is empty: expected all ranks of this engine")
        for name, value, kind in (
            ("model", model, Mapping),
            ("options", options, ConnectorOptions),
        ):
            if value is not None:
                instance(value, kind, name)
        if clock is not None and not callable(clock):
            raise TypeError(f"clock is {shown(clock)}: expected a function that returns seconds")
        self._options, self._clock = options or ConnectorOptions(), clock or time.monotonic
        self._groups = [g for g, group in enumerate(manager.groups) if group.transferred]
        specs = [manager.groups[g] for g in self._groups]
        for spec in specs:
            if not kind_class(spec.kind).pages.is_transferable:
                raise ValueError(
                    f"a group is of kind {spec.kind!r} and transferred: expected transferred=False, "
                    "because its blocks do not hold consecutive tokens"
                )
        self._kinds = [make_kind(spec.kind, spec.options) for spec in specs]
        self._layouts = check_ranks([each.handshake for each in self._ranks])
        sizes = [None if each.is_state else each.block_size for each in self._layouts]
        wanted = [
            None if layout.is_state else manager.block_sizes[g]
            for layout, g in zip(self._layouts, self._groups)
        ]
        if sizes != wanted or len(self._layouts) != len(specs):
            raise ValueError(
                f"ranks have blocks of {sizes} tokens: expected {wanted}, the block sizes of the "
                "manager's transferred groups"
            )
        for g, (spec, layout) in enumerate(zip(specs, self._layouts)):
            if layout.spec not in ("", spec.summary):
                raise ValueError(
                    f"ranks have {layout.spec} as group {g}: expected {spec.summary}, as in the manager"
                )
        self._epoch, self._num_invalidations = manager.cache.epoch, manager.cache.num_invalidations
        self._initial_identity = KVIdentity.of_manager(manager, dict(model or {}))
        self._numbers = LeaseNumbers()
        # For each request whose blocks are kept, the number of ranks on which its lease has ended.
        self._kept: dict[str, tuple[Request, int]] = {}
        self.stats = LoadStats()
        self._loads: SourceLoads[_Reading] = SourceLoads(manager, self.stats)
        self.num_received_bytes = 0

    # Sender methods.

    def publish(
        self, request: Request, *, lease_s: float | None = None, **free: Any
    ) -> dict[str, Any] | None:
        """Free a request, but keep its blocks until all readers are done or the lease expires.

        The KV must already be in memory. On a GPU, this means that the request's last step must
        have finished, which is the case once its token was sampled.

        Args:
            request: The request.
            lease_s: Duration of the lease in seconds, greater than 0 and at most a day. None: use
                the options' `lease_s`.
            free: Keyword arguments for `KVCacheManager.free`.

        Returns:
            The offer, as JSON values. None if no offer is possible because no token is computed, tokens
            were computed before `start_epoch`, no lease slot is free, or blocks are already kept
            under this request ID. In that case, the request is freed immediately.

        Raises:
            TypeError: `lease_s` is not a number. Nothing has changed.
            ValueError: `lease_s` is out of range. Nothing has changed.
        """
        instance(request, Request, "request")
        seconds = self._lease_seconds(lease_s)
        self._follow_cache()
        num_tokens = min(self._manager.num_computed_tokens(request), request.num_tokens)
        offer = self._offer(request, num_tokens, seconds)
        if offer is None:
            self._manager.free(request, **free)
            return None
        try:
            self._manager.free(request, keep_blocks=True, **free)
        except BaseException:
            self._numbers.give_back(request.request_id)
            raise
        self._kept[request.request_id] = request, 0
        self._begin(Step(leases={request.request_id: (offer.lease, seconds)}))
        return offer.to_dict()

    def publish_cached(
        self,
        request: Request,
        *,
        min_tokens: int = 1,
        max_kept_blocks: int | None = None,
        lease_s: float | None = None,
    ) -> dict[str, Any] | None:
        """Offer the longest prefix of a request that is cached on the device, without computing
        anything.

        The blocks are kept until all readers are done or the lease expires, as in `publish`. Their
        KV must already be in memory. On a GPU, wait for the steps that were launched. Call this
        method between steps. The request counts as a lookup in the cache's statistics.

        Args:
            request: A new request, which is never admitted to a step. At most its first
                `num_tokens - 2` tokens are offered, in whole blocks.
            min_tokens: Minimum number of tokens to offer.
            max_kept_blocks: Maximum number of blocks that the manager keeps for leases and
                quarantined loads, including this offer. None: no limit.
            lease_s: As for `publish`.

        Returns:
            The offer. None if less is cached than `min_tokens`, or if the blocks cannot be kept,
            because no row, block or lease slot is free or because of `max_kept_blocks`. In that
            case, nothing has changed.

        Raises:
            TypeError, ValueError: An argument is invalid, the request is admitted, or a transferred
                group does not cache blocks of tokens. Nothing has changed.
        """
        instance(request, Request, "request")
        seconds, manager = self._lease_seconds(lease_s), self._manager
        min_tokens = integer(min_tokens, "min_tokens", 1, MAX_INT64)
        self._follow_cache()
        if max_kept_blocks is not None:
            max_kept_blocks = integer(max_kept_blocks, "max_kept_blocks", 0, MAX_INT64)
        for group, layout in zip(self._groups, self._layouts):
            if layout.is_state or not manager.groups[group].cached:
                raise ValueError(
                    f"group {group} has kind {manager.groups[group].kind!r}: expected transferred=False, "
                    "or a group that caches blocks of tokens"
                )
        most = request.num_tokens - 2
        if most < min_tokens:
            return None
        found = manager.cache.find_prefix(request, whole_blocks=True, max_tokens=most)
        tables = found.block_ids if len(manager.groups) > 1 else [found.block_ids]
        num_blocks = sum(np.count_nonzero(table) for table in tables)
        is_over = (
            max_kept_blocks is not None and manager.pool.num_kept + num_blocks > max_kept_blocks
        )
        if found.num_tokens < min_tokens or is_over:
            return None
        # The request receives one token that never arrives, because a request cannot be admitted
        # with nothing to compute or to receive.
        nothing = External(1, delayed=True)
        if manager.admit(Admit(request, external=nothing), found.block_ids) is None:
            return None
        manager.finish_receiving(request, 0)
        # The manager looks the request up again, and may find another prefix than above.
        held = sum(np.count_nonzero(manager.block_ids(request, g)) for g in range(len(tables)))
        if max_kept_blocks is not None and manager.pool.num_kept + held > max_kept_blocks:
            most = 0
        if not min_tokens <= manager.num_computed_tokens(request) <= most:
            manager.free(request)
            return None
        return self.publish(request, lease_s=seconds)

    def withdraw(self, request: Request) -> None:
        """End a lease early, for example after a failed step.

        Readers then compute the request themselves. Its blocks are reused once no reader can accept
        them as valid any more. The call has no effect for a request without a lease.
        """
        instance(request, Request, "request")
        if request.request_id in self._numbers:
            self._begin(Step(ends={request.request_id}))

    @property
    def num_leased_requests(self) -> int:
        """Number of requests whose blocks are kept for readers."""
        return len(self._numbers)

    # Receiver methods.

    def match(self, request: Request, offer: Mapping[str, Any] | None = None) -> int:
        """Return how many of an offer's tokens after the local hit can be loaded.

        This method neither reads blocks nor changes the manager. While the request's status in
        plans is `WAIT`, call the method again immediately before each step.

        Args:
            request: A request that is not admitted.
            offer: Offer that the sender's `publish` returned. None: the offer passed to the
                request's previous `match`.

        Returns:
            The number of tokens, or 0 without an offer or with `read_cache=False`.

        Raises:
            ValueError: The offer differs in version, model, weights, layout, dtype, scales, hashes or
                tokens, or the sender no longer has the required blocks. The one-line message gives
                the reason.
        """
        instance(request, Request, "request")
        self._follow_cache()
        load = self._loads.matched(request)
        if load is None:
            if offer is None:
                return 0
            try:
                load = self._match_anew(request, offer)
            except ValueError:
                self.stats.refused_requests += 1
                raise
        load.first_token = self._manager.cache.cached_tokens(request).with_host
        if load.end_token <= load.first_token or not request.read_cache:
            self._decline_matched(request)
            return 0
        return load.end_token - load.first_token

    def begin(self, request: Request) -> None:
        """Begin to load a request that was admitted with `External.delayed` and whose plan was applied.

        On a GPU, blocks are written only after all work already launched on the current stream has
        finished.

        Raises:
            ValueError: The request was not matched, or its hit has changed since the match. No
                state has changed. `cancel` the request.
            RuntimeError: The current stream is being captured in a graph. Nothing has changed.
        """
        instance(request, Request, "request")
        self._follow_cache()
        load = self._loads.admitted(request)
        blocks = []
        for group, layout in zip(self._groups, self._layouts):
            blocks.append(self._table(request, group, layout, load.end_token))
        step = Load(load.detail.offer, load.first_token, load.end_token, tuple(blocks))
        load.detail.deadline = self._clock() + self._options.timeout_s + _PATIENCE_S
        self._begin(Step(loads={request.request_id: step}))
        self._loads.begin(load)

    def cancel(self, request: Request) -> None:
        """Free a request that is matched or loading. Its blocks are reused once no transfer can
        write to them any more.
        """
        instance(request, Request, "request")
        self._decline_matched(request)
        load = self._loads[request.request_id] if request in self._loads else None
        if load is None or load.state is LoadState.QUARANTINED:
            self._loads.free(request)
            return
        load.detail.error = "it was canceled"
        self._loads.quarantine(load)
        self._begin(Step(cancels={request.request_id}))

    def hit_tokens(self, request: Request) -> int:
        """Return how many of a request's tokens are cached on the device or the host."""
        instance(request, Request, "request")
        return self._manager.cache.cached_tokens(request).with_host

    def describe(self) -> dict[str, Any]:
        """Return a description of this engine as JSON values, which a peer passes to its
        `check_peer`.
        """
        return {
            "version": VERSION,
            "engine_id": self._engine_id,
            "identity": self._identity.to_dict(),
            "transport": self._ranks[0].handshake.address.transport,
            "groups": [layout.to_dict() for layout in self._layouts],
        }

    def check_peer(self, values: Mapping[str, Any]) -> None:
        """Check that this engine and a peer can read each other's offers.

        Args:
            values: Result of the peer's `describe`.

        Raises:
            ValueError: The version, model, hashes, transport or layouts differ. The one-line
                message states the difference.
        """
        instance(values, Mapping, "values")
        if (version := values.get("version")) != VERSION:
            raise ValueError(
                f"version of the peer is {shown(version)}: expected {VERSION}; install the same version "
                "of kvcache in both engines"
            )
        try:
            groups = tuple(map(GroupLayout.from_dict, listed(values["groups"], "groups")))
            identity = KVIdentity.from_dict(values["identity"])
            engine_id, transport = f"{values['engine_id']}", values["transport"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"values are not the result of describe: {error}") from error
        self._identity.check(identity, engine_id)
        check_like(self._layouts, groups)
        if (mine := self._ranks[0].handshake.address.transport) != transport:
            raise ValueError(
                f"transport is {mine!r} here, but {shown(transport)} in engine {engine_id!r}: expected "
                "the same transport in both engines"
            )

    def decline(self, offer: Mapping[str, Any]) -> None:
        """Notify an offer's sender that the offer will not be read. Raises ValueError for an
        invalid offer.
        """
        self._begin(Step(unread=[Offer.from_dict(offer)]))

    def save(self, report: StepReport) -> None:
        """Do nothing, because only `publish` offers blocks."""
        instance(report, StepReport, "report")

    @property
    def num_loading_requests(self) -> int:
        """Number of requests whose blocks may still be written to, including those in quarantine."""
        return len(self._loads)

    @property
    def num_quarantined_blocks(self) -> int:
        """Number of blocks that belonged to freed requests and that reads in flight may still write
        to.
        """
        return self._loads.num_quarantined_blocks

    @property
    def is_busy(self) -> bool:
        """Whether `poll` has work left, that is, loads, quarantined blocks or leases."""
        return len(self._loads) > 0 or self.num_leased_requests > 0

    def close(self) -> None:
        """Close the ranks."""
        for rank in self._ranks:
            rank.close()

    # Methods for both sides.

    def poll(self) -> list[Arrived]:
        """Process the ranks' reports, and return the loads that have ended since the last call."""
        self._follow_cache()
        found: list[Arrived] = []
        for rank in self._ranks:
            results = rank.take_results()
            self.num_received_bytes += results.num_bytes
            for request_id in results.sent:
                self._lease_is_over(request_id)
            for request_id, error in results.failed.items():
                self._fail(self._loads[request_id], error)
            for request_id in results.received:
                self._loads[request_id].detail.received += 1
            for request_id in results.released:
                self._loads[request_id].detail.released += 1
        now = self._clock()
        for load in self._loads.under_way:
            if load.detail.error is None and now > load.detail.deadline:
                self._fail(load, "a rank did not answer in time")
            if (ended := self._outcome(load)) is not None:
                found.append(ended)
        return found

    def _outcome(self, load: SourceLoad[_Reading]) -> Arrived | None:
        """Finish, quarantine or release a load, depending on the state of its reads. Returns None
        while the load is in flight.
        """
        reading = load.detail
        is_over = reading.received + reading.released == len(self._ranks)
        if load.state is LoadState.QUARANTINED:
            if is_over:
                self._loads.release(load)
            return None
        if reading.error is not None and not is_over:
            return self._loads.quarantine(load, reading.error)
        if not is_over:
            return None
        if reading.error is not None:
            return self._loads.finish(load, 0, reading.error)
        arrived = self._loads.finish(load)
        self._forget_incomplete(load)
        return arrived

    def _fail(self, load: SourceLoad[_Reading], error: str) -> None:
        if load.detail.error is None:
            load.detail.error = error
            if len(self._ranks) > 1:
                self._begin(Step(cancels={load.request.request_id}))

    def _decline_matched(self, request: Request) -> None:
        load = self._loads.forget(request.request_id)
        if load is not None:
            self._begin(Step(unread=[load.detail.offer]))

    def _match_anew(self, request: Request, offer: Mapping[str, Any]) -> SourceLoad[_Reading]:
        """Match a request to an offer.

        An earlier match with the same request ID is dropped. Unless the two offers are identical,
        the sender of the earlier offer is notified that its offer will not be read.
        """
        earlier, matched = self._loads.forget(request.request_id), None
        try:
            read = Offer.from_dict(offer)
            matched = self._loads.match(request, 0, self._end_of(request, read), _Reading(read))
        finally:
            is_read = matched is not None and earlier is not None and read == earlier.detail.offer
            if earlier is not None and not is_read:
                self._begin(Step(unread=[earlier.detail.offer]))
        return matched

    def _end_of(self, request: Request, offer: Offer) -> int:
        """Return the end (exclusive) of the tokens that can be loaded from an offer. Raises
        ValueError if no token can be loaded.
        """
        if request in self._loads or request.request_id in self._kept:
            what = "an earlier load may still write to"
            if request.request_id in self._kept:
                what = "are under lease"
            raise ValueError(
                f"request {request.request_id!r} has blocks that {what}: expected another request"
            )
        offer.check_like(self._identity, self._layouts)
        offer.check_prompt(request.num_tokens, lambda count: self._digest(request, count))
        end = min(offer.num_tokens, request.num_tokens - 1)  # this engine computes the last token
        for kind, layout, blocks in zip(self._kinds, offer.groups, offer.blocks):
            if layout.is_state:
                if end < offer.num_tokens:
                    raise ValueError(
                        f"the request has {request.num_tokens} tokens, but the offer has states after "
                        f"{offer.num_tokens} tokens: append the first token that the sender sampled"
                    )
                is_there = len(blocks) == 1 and blocks[0] > 0
            else:
                first = kind.first_needed_token(end)
                is_there = is_complete(blocks, layout.block_size, first, end)
            if not is_there:
                raise ValueError("the sender has freed blocks that are still needed")
        return end

    def _forget_incomplete(self, load: SourceLoad[_Reading]) -> None:
        """Evict from the prefix cache the blocks that were received only in part, because the
        sender no longer held the rest. They are valid only for this request.
        """
        lost: list[int] = []
        for group, layout, theirs, ids in zip(
            self._groups, self._layouts, load.detail.offer.groups, load.detail.offer.blocks
        ):
            if layout.is_state or all(ids):
                continue
            has = np.repeat(np.array(ids) > 0, theirs.block_size)[: load.end_token]
            has[: load.first_token] = True
            size, table = layout.block_size, self._manager.block_ids(load.request, group)
            for number, block in enumerate(table[: load.end_token // size].tolist()):
                if block and not has[number * size : (number + 1) * size].all():
                    lost.append(block)
        if lost:
            self._manager.cache.evict(lost)

    def _offer(self, request: Request, num_tokens: int, seconds: float) -> Offer | None:
        lookahead = self._identity.lookahead
        num_computed = num_tokens
        num_tokens = min(num_computed, request.num_tokens - lookahead)
        has_other_state = num_tokens < num_computed and any(each.is_state for each in self._layouts)
        is_stale = self._manager.cache.is_stale(request)
        if num_tokens < 1 or request in self._loads or has_other_state or is_stale:
            return None
        lease = self._numbers.take(request.request_id, seconds)
        if lease is None:
            return None
        blocks = []
        for group, layout, kind in zip(self._groups, self._layouts, self._kinds):
            table = self._table(request, group, layout, num_tokens)
            if not layout.is_state:
                # Blocks that have left the window are released, so they cannot be offered.
                past = kind.first_needed_token(num_tokens) // layout.block_size
                table[:past] = [0] * past
            blocks.append(tuple(table))
        return Offer(
            self._engine_id,
            request.request_id,
            num_tokens,
            self._digest(request, num_tokens + lookahead),
            self._identity,
            self._layouts,
            tuple(blocks),
            tuple(rank.handshake.address for rank in self._ranks),
            lease,
        )

    def _table(
        self, request: Request, group: int, layout: GroupLayout, num_tokens: int
    ) -> list[int]:
        """Return the blocks that hold a request's first `num_tokens` tokens.

        For a group of states, return only the last block.
        """
        size = self._manager.block_sizes[group]
        table = self._manager.block_ids(request, group)[: -(-num_tokens // size)].tolist()
        return table[-1:] if layout.is_state else table

    def _lease_seconds(self, lease_s: float | None) -> float:
        return self._options.lease_s if lease_s is None else checked_seconds(lease_s, "lease_s")

    def _lease_is_over(self, request_id: str) -> None:
        request, over = self._kept[request_id]
        self._kept[request_id] = request, over + 1
        if over + 1 == len(self._ranks):
            del self._kept[request_id]
            self._manager.release_blocks(request)
            self._numbers.give_back(request_id)

    @property
    def _identity(self) -> KVIdentity:
        """The identity of this engine's KV now. Read from several threads."""
        return replace(self._initial_identity, version=self._manager.cache.model_version)

    def _follow_cache(self) -> None:
        """End all leases if content was found to be invalid: it may be content of leased blocks. If
        the manager has started a new epoch, also end all matches and loads of earlier weights.
        """
        cache = self._manager.cache
        is_new_epoch = self._epoch != cache.epoch
        if not is_new_epoch and self._num_invalidations == cache.num_invalidations:
            return
        self._epoch, self._num_invalidations = cache.epoch, cache.num_invalidations
        step = Step(ends=set(self._numbers))
        if is_new_epoch:
            step.unread = [load.detail.offer for load in self._loads.forget_all()]
            for load in self._loads.under_way:
                if load.state is LoadState.LOADING:
                    load.detail.error = load.detail.error or "the weights have changed"
                    step.cancels.add(load.request.request_id)
        if not step.is_empty:
            self._begin(step)

    def _begin(self, step: Step) -> None:
        for rank in self._ranks:
            rank.begin(step)

    def _digest(self, request: Request, num_tokens: int) -> str:
        items = [each for each in request.mm_items if each[1] < num_tokens]
        rows, lora, embeds = request.prompt_embeds, request.lora, None
        if rows is not None:
            digest = digest_of_rows(rows, 0, num_tokens, request.prompt_is_token_ids)
            embeds = digest and f"{min(num_tokens, len(rows))} {digest.hex()}"
        if (root := self._manager.cache.adapter_root(request)) is not None:
            lora = *lora, root.hex()  # no other engine has KV of this adapter
        return digest_of(
            request.token_ids[:num_tokens], lora, items, salt=request.cache_salt, embeds=embeds
        )
