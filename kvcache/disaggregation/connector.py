"""Prefill in one engine, decode in another: the side of the manager, which decides by requests alone."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvcache.allocator.event_stream import digest_of_rows
from kvcache.allocator.manager import KVCacheManager
from kvcache.allocator.request import Request
from kvcache.checks import check_name, instance, integer, listed, shown
from kvcache.disaggregation.layout import GroupLayout, check_like, is_complete
from kvcache.disaggregation.leases import LeaseNumbers, Progress
from kvcache.disaggregation.offer import Offer, digest_of
from kvcache.disaggregation.options import ConnectorOptions, checked_seconds
from kvcache.disaggregation.steps import Load, RankHandshake, Results, Step
from kvcache.kinds import make_kind

_PATIENCE_S = 1.0  # for the word of a rank that has given up in time
_NOT_MOVED = ("circular_window", "cross_attention")


class Rank(Protocol):
    """A rank of this engine: a `CacheRank`, or what speaks to one in another process."""

    handshake: RankHandshake

    def begin(self, step: Step) -> None: ...

    def advance(self, request_id: str, progress: Progress) -> None: ...

    def take_results(self) -> Results: ...


@dataclass(frozen=True)
class Loaded:
    """A load that has ended, by `Connector.poll`.

    num_computed_tokens: where the request goes on; None where it was freed, because the transport may
    still write to its blocks: then admit it anew, as any other. error: why its KV did not come.
    """

    request: Request
    num_computed_tokens: int | None
    error: str | None = None


@dataclass
class _Load:
    request: Request
    offer: Offer
    end: int
    hit: int  # tokens that were not read
    deadline: float = 0.0  # of all ranks
    error: str | None = None
    received: int = 0  # ranks
    released: int = 0
    is_quarantined: bool = False  # its request was freed, its blocks are kept


class Connector:
    """Publishes finished requests of a manager under leases, and loads requests that others published.

    An engine is sender, receiver, or both. The calls belong to the manager's thread and do not wait. Of
    a sender: `publish` in place of `free`; `poll` in every step. Of a receiver: `num_external_tokens`,
    then `manager.step` with that number and `delay_cache_blocks`, then `begin` once the plan is applied;
    `poll` says when the request goes on.

    ranks: all ranks of this engine. engine_id: what others call it. model: plain values that must be
    equal in both engines beside layouts and kinds (a name, a revision). options: `lease_s` is used here,
    the others by the ranks. clock: seconds; another one for replays.

    ValueError where a group that is transferred holds no run of tokens and no state, and where ranks
    were made for other groups.
    """

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
            if spec.kind in _NOT_MOVED:
                raise ValueError(
                    f"a group is of kind {spec.kind!r} and transferred: expected transferred=False, its "
                    "blocks hold no run of tokens"
                )
        self._kinds = [make_kind(spec.kind, spec.options) for spec in specs]
        self._layouts = self._ranks[0].handshake.groups
        sizes = [None if each.is_state else each.block_size for each in self._layouts]
        wanted = [
            None if layout.is_state else manager.block_sizes[g]
            for layout, g in zip(self._layouts, self._groups)
        ]
        if sizes != wanted or len(self._layouts) != len(specs):
            raise ValueError(
                f"ranks have blocks of {sizes} tokens: expected {wanted}, those of the manager's "
                "transferred groups"
            )
        if (size := self._layouts[0].description.world_size) != len(self._ranks):
            raise ValueError(f"there are {len(self._ranks)} ranks: expected {size}, as described")
        kinds = [[spec.kind, dict(spec.options)] for spec in specs]
        self._model = {**(model or {}), "groups": kinds}
        self._numbers = LeaseNumbers()
        self._kept: dict[str, tuple[Request, int]] = {}  # and ranks whose lease is over
        self._early: dict[str, Request] = {}  # under lease, and still computing
        self._matched: dict[str, _Load] = {}  # not begun
        self._loads: dict[str, _Load] = {}
        self.num_received_bytes = 0

    # Of a sender.

    def publish(
        self, request: Request, *, lease_s: float | None = None, **free: Any
    ) -> dict[str, Any] | None:
        """Frees a request whose blocks others may read, and keeps these until they have, or time is up.

        Its bytes must be in memory: on a GPU, once its last step has run, as when a token was sampled.
        Returns the offer, for JSON. None where nothing can be offered (no token is computed, no slot of
        a lease is free, blocks of its name are kept already): then it is freed at once. free: what
        `KVCacheManager.free` takes. An offer that `publish_early` made stays good. TypeError or
        ValueError, with nothing changed, for a `lease_s` that is no number of seconds above 0, up to a
        day.
        """
        instance(request, Request, "request")
        seconds = self._lease_seconds(lease_s)
        request_id = request.request_id
        if request_id in self._early:
            self.advance(request, self._manager.num_computed_tokens(request))
            self._keep(request, free)
            return None
        num_tokens = min(self._manager.num_computed_tokens(request), request.num_tokens)
        offer = self._offer(request, num_tokens, (), seconds)
        if offer is None:
            self._manager.free(request, **free)
            return None
        try:
            self._keep(request, free)
        except BaseException:
            self._numbers.give_back(request_id)
            raise
        self._begin_lease(offer, seconds, Progress(num_tokens))
        return offer.to_dict()

    def publish_early(
        self, request: Request, order: Sequence[str], *, lease_s: float | None = None
    ) -> dict[str, Any] | None:
        """Offers the tokens that a step computes, before it has: their slots are those of the last plan.

        order: all layers of the transferred groups, as the model computes them. Say with `advance` what
        is computed, then `publish` the request, or `withdraw` it. None, and nothing changes, where
        nothing can be offered. Readers' `timeout_s` and the lease begin now. TypeError or ValueError, as
        for `publish`, and for an order that does not name each layer once.
        """
        instance(request, Request, "request")
        seconds, order = self._lease_seconds(lease_s), self._checked_order(order)
        num_tokens = min(self._manager.num_computed_tokens(request), request.num_tokens)
        offer = self._offer(request, num_tokens, order, seconds)
        if offer is None:
            return None
        self._early[request.request_id] = request
        self._begin_lease(offer, seconds, Progress(0))
        return offer.to_dict()

    def advance(
        self,
        request: Request,
        num_tokens: int,
        end_token: int = 0,
        num_layers: int = 0,
        rank: int | None = None,
    ) -> None:
        """Tells readers of an early offer what a rank has computed; None: what each has.

        Tokens [0, num_tokens) in all layers of the rank, and tokens [0, end_token) in its first
        `num_layers`, in the offer's order. Their bytes must be in memory: on a GPU, after the layer's
        stream was waited for. Facts only grow. Nothing for a lease that is over.
        """
        instance(request, Request, "request")
        if rank is not None:
            rank = integer(rank, "rank", most=len(self._ranks) - 1)
        progress = Progress(
            integer(num_tokens, "num_tokens"),
            integer(end_token, "end_token"),
            integer(num_layers, "num_layers", most=4096),
        )
        for each in self._ranks if rank is None else [self._ranks[rank]]:
            each.advance(request.request_id, progress)

    def withdraw(self, request: Request) -> None:
        """Ends a lease before its time, as where a step has failed.

        Readers compute the request themselves. One that is still computing is freed: its blocks are used
        again once no reader can take them for its own. Nothing for a request without a lease.
        """
        instance(request, Request, "request")
        if request.request_id not in self._numbers:
            return
        if request.request_id in self._early:
            self._keep(request, {})
        self._begin(Step(ends={request.request_id}))

    @property
    def num_leased_requests(self) -> int:
        """Requests whose blocks are kept for readers."""
        return len(self._numbers)

    # Of a receiver.

    def num_external_tokens(self, request: Request, offer: Mapping[str, Any]) -> int:
        """How many of a request's tokens, behind its hit, can be loaded from an offer; 0: none.

        Nothing is read yet, and nothing changes in the manager. ValueError, in one line, for an offer of
        another version, model, layout, dtype or hash, or of other tokens, and where the sender no longer
        has what is needed: then compute the request. It may be asked again, as long as a step answers
        `WAIT`.
        """
        instance(request, Request, "request")
        load = self._matched.get(request.request_id)
        if load is None or load.request is not request:
            load = self._match_anew(request, offer)
        load.hit = self._manager.cached_tokens(request).with_host
        if load.end <= load.hit:
            self._matched.pop(request.request_id, None)
            self._begin(Step(unread=[load.offer]))
            return 0
        self._matched[request.request_id] = load
        return load.end - load.hit

    def begin(self, request: Request) -> None:
        """Begins to load a request that was admitted with `delay_cache_blocks`; its plan is applied.

        ValueError, and nothing changes, for any other request, and where its hit is no longer the one
        that `num_external_tokens` found: `cancel` it then. On a GPU blocks are read once all has run that
        was launched on the current stream so far; RuntimeError, and nothing changes, while that stream is
        captured in a graph.
        """
        instance(request, Request, "request")
        load = self._matched.get(request.request_id)
        is_known = load is not None and load.request is request
        if not is_known or not self._is_receiving(request):
            raise ValueError(
                f"request {request.request_id!r} is not to be loaded: expected num_external_tokens, then "
                "a step that admits it with delay_cache_blocks"
            )
        if (end := self._manager.num_computed_tokens(request)) != load.end:
            raise ValueError(
                f"request {request.request_id!r} was admitted with {end} tokens, its hit and those to be "
                f"loaded: expected {load.end}, as its hit was {load.hit}; cancel it, and ask "
                "num_external_tokens right before the step"
            )
        blocks = []
        for group, layout in zip(self._groups, self._layouts):
            blocks.append(self._table(request, group, layout, load.end))
        step = Load(load.offer, load.hit, load.end, tuple(blocks))
        load.deadline = self._clock() + self._options.timeout_s + _PATIENCE_S
        self._begin(Step(loads={request.request_id: step}))
        del self._matched[request.request_id]
        self._loads[request.request_id] = load

    def cancel(self, request: Request) -> None:
        """Frees a request that is loading, or is to be; its blocks are used again once nothing is written
        to them."""
        instance(request, Request, "request")
        load = self._matched.pop(request.request_id, None)
        if load is not None:
            self._begin(Step(unread=[load.offer]))
        load = self._loads.get(request.request_id)
        if load is None or load.is_quarantined:
            if load is None and self._is_receiving(
                request
            ):  # not begun: no one writes to its blocks
                self._manager.finish_receiving(request, 0)
            self._manager.free(request)
            return
        load.error = "it was given up"
        self._quarantine(load)
        self._begin(Step(cancels={request.request_id}))

    @property
    def num_loading_requests(self) -> int:
        """Requests whose blocks may still be written to by others' reads."""
        return len(self._loads)

    # Of both.

    def poll(self) -> list[Loaded]:
        """Takes what the ranks report; returns loads that have ended since the last call."""
        found: list[Loaded] = []
        for rank in self._ranks:
            results = rank.take_results()
            self.num_received_bytes += results.num_bytes
            for request_id in results.sent:
                self._lease_is_over(request_id)
            for request_id, error in results.failed.items():
                self._fail(self._loads[request_id], error)
            for request_id in results.received:
                self._loads[request_id].received += 1
            for request_id in results.released:
                self._loads[request_id].released += 1
        now = self._clock()
        for request_id, load in list(self._loads.items()):
            if load.error is None and now > load.deadline:
                self._fail(load, "a rank did not answer in time")
            if (ended := self._outcome(load)) is not None:
                found.append(ended)
            if load.received + load.released == len(self._ranks):
                del self._loads[request_id]
        return found

    def _outcome(self, load: _Load) -> Loaded | None:
        """What a load has come to, once; changes the manager accordingly."""
        is_over = load.received + load.released == len(self._ranks)
        if load.is_quarantined:
            if is_over:
                self._manager.release_blocks(load.request)
            return None
        if load.error is None:
            if not is_over:
                return None
            num_tokens = self._manager.finish_receiving(load.request)
            self._forget_incomplete(load)
            return Loaded(load.request, num_tokens)
        if is_over:
            return Loaded(load.request, self._manager.finish_receiving(load.request, 0), load.error)
        self._quarantine(load)
        return Loaded(load.request, None, load.error)

    def _fail(self, load: _Load, error: str) -> None:
        if load.error is None:
            load.error = error
            if len(self._ranks) > 1:
                self._begin(Step(cancels={load.request.request_id}))

    def _quarantine(self, load: _Load) -> None:
        self._manager.free(load.request, keep_blocks=True)
        load.is_quarantined = True

    def _match_anew(self, request: Request, offer: Mapping[str, Any]) -> _Load:
        """Matches a request; the sender of an earlier one of its name, which did not come, is told."""
        earlier, load = self._matched.pop(request.request_id, None), None
        try:
            load = self._match(request, Offer.from_dict(offer))
        finally:
            if earlier is not None and (load is None or load.offer != earlier.offer):
                self._begin(Step(unread=[earlier.offer]))
        return load

    def _match(self, request: Request, offer: Offer) -> _Load:
        if request.request_id in self._loads or request.request_id in self._kept:
            what = "an earlier load may still write to"
            if request.request_id in self._kept:
                what = "are under lease"
            raise ValueError(
                f"request {request.request_id!r} has blocks that {what}: expected another request"
            )
        offer.check_answers(self._model, self._hashing())
        check_like(self._layouts, offer.groups)
        offer.check_prompt(request.num_tokens, lambda count: _digest(request, count))
        end = min(offer.num_tokens, request.num_tokens - 1)  # the last one must run
        for kind, layout, blocks in zip(self._kinds, offer.groups, offer.blocks):
            if layout.is_state:
                if end < offer.num_tokens:
                    raise ValueError(
                        f"the request has {request.num_tokens} tokens, and the offer has states behind "
                        f"{offer.num_tokens}: expected a token more, the first that the sender sampled"
                    )
                is_there = len(blocks) == 1 and blocks[0] > 0
            else:
                first = kind.first_needed_token(end)
                is_there = is_complete(blocks, layout.block_size, first, end)
            if not is_there:
                raise ValueError("the sender has freed blocks of a window that are needed")
        return _Load(request, offer, end, 0)

    def _forget_incomplete(self, load: _Load) -> None:
        """Blocks of which the sender had a part alone are right for this request, and hits for none."""
        lost: list[int] = []
        for group, layout, theirs, ids in zip(
            self._groups, self._layouts, load.offer.groups, load.offer.blocks
        ):
            if layout.is_state or all(ids):
                continue
            has = np.repeat(np.array(ids) > 0, theirs.block_size)[: load.end]
            has[: load.hit] = True
            size, table = layout.block_size, self._manager.block_ids(load.request, group)
            for number, block in enumerate(table[: load.end // size].tolist()):
                if block and not has[number * size : (number + 1) * size].all():
                    lost.append(block)
        if lost:
            self._manager.evict(lost)

    def _offer(
        self, request: Request, num_tokens: int, order: tuple[str, ...], seconds: float
    ) -> Offer | None:
        if num_tokens < 1 or request.request_id in self._loads:
            return None
        lease = self._numbers.take(request.request_id, seconds)
        if lease is None:
            return None
        blocks = []
        for group, layout, kind in zip(self._groups, self._layouts, self._kinds):
            table = self._table(request, group, layout, num_tokens)
            if not layout.is_state:  # those before are not held any longer than the window needs
                past = kind.first_needed_token(num_tokens) // layout.block_size
                table[:past] = [0] * past
            blocks.append(tuple(table))
        return Offer(
            self._engine_id,
            request.request_id,
            num_tokens,
            _digest(request, num_tokens),
            self._hashing(),
            self._model,
            self._layouts,
            tuple(blocks),
            tuple(rank.handshake.address for rank in self._ranks),
            lease,
            order,
        )

    def _is_receiving(self, request: Request) -> bool:
        try:
            return self._manager.is_receiving(request)
        except ValueError:  # it is not admitted
            return False

    def _table(
        self, request: Request, group: int, layout: GroupLayout, num_tokens: int
    ) -> list[int]:
        """A request's blocks of the first tokens; of states the one behind them."""
        size = self._manager.block_sizes[group]
        table = self._manager.block_ids(request, group)[: -(-num_tokens // size)].tolist()
        return table[-1:] if layout.is_state else table

    def _lease_seconds(self, lease_s: float | None) -> float:
        return self._options.lease_s if lease_s is None else checked_seconds(lease_s, "lease_s")

    def _checked_order(self, order: Sequence[str]) -> tuple[str, ...]:
        names = sorted(name for layout in self._layouts for name in layout.layers)
        found = listed(order, "order", "the names of layers")
        if isinstance(order, str) or not all(isinstance(each, str) for each in found):
            raise TypeError(f"order is {shown(order)}: expected the names of layers")
        if sorted(found) != names:
            raise ValueError(
                f"order is {shown(order)}: expected each of {shown(names)} once, the layers of the "
                "transferred groups"
            )
        return tuple(found)

    def _begin_lease(self, offer: Offer, seconds: float, progress: Progress) -> None:
        self._begin(Step(leases={offer.request_id: (offer.lease, seconds, progress)}))

    def _keep(self, request: Request, free: Mapping[str, Any]) -> None:
        self._manager.free(request, keep_blocks=True, **free)
        self._early.pop(request.request_id, None)
        over = self._kept.pop(request.request_id, (request, 0))[1]
        self._kept[request.request_id] = request, over
        self._release_if_over(request.request_id)

    def _lease_is_over(self, request_id: str) -> None:
        request, over = self._kept.get(request_id, (self._early.get(request_id), 0))
        self._kept[request_id] = request, over + 1
        self._release_if_over(request_id)

    def _release_if_over(self, request_id: str) -> None:
        request, over = self._kept[request_id]
        if over == len(self._ranks) and request_id not in self._early:
            del self._kept[request_id]
            self._manager.release_blocks(request)
            self._numbers.give_back(request_id)

    def _begin(self, step: Step) -> None:
        for rank in self._ranks:
            rank.begin(step)

    def _hashing(self) -> dict[str, str] | None:
        options = self._manager.options
        if not options.enable_caching:
            return None
        seed = hashlib.sha256(repr(options.hash_seed).encode()).hexdigest()[:16]
        return {"algorithm": self._manager.hash_algorithm, "seed": seed}


def _digest(request: Request, num_tokens: int) -> str:
    items, rows = [each for each in request.mm_items if each[1] < num_tokens], request.prompt_embeds
    embeds = None
    if rows is not None:
        shape = f"{rows.dtype.str} {rows.shape[1:]} {min(num_tokens, len(rows))}"
        embeds = f"{shape} {digest_of_rows(rows, 0, num_tokens).hex()}"
    return digest_of(
        request.token_ids[:num_tokens],
        request.lora,
        items,
        salt=request.cache_salt,
        embeds=embeds,
    )
