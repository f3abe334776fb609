"""A rank whose pages are `KVStorage`s: it is read by transfer plans, and reads by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvcache.checks import instance, instances, shown
from kvcache.disaggregation.layout import GroupLayout, check_like
from kvcache.disaggregation.leases import Progress
from kvcache.disaggregation.offer import Offer
from kvcache.disaggregation.options import ConnectorOptions
from kvcache.disaggregation.rank import RankThread
from kvcache.disaggregation.reading import Pending, Read, Reader, readers_of_sources
from kvcache.disaggregation.steps import Load
from kvcache.memory_plan import CachePlan
from kvcache.transfer.description import CacheDescription
from kvcache.transfer.fetching import GroupFetch, fetch, spans_of
from kvcache.transfer.memory import region_addresses
from kvcache.transfer.plan.fragments import Runs
from kvcache.transfer.plan.token_range import plan_range
from kvcache.transfer.plan.transfer_plan import TransferPlan, plan_transfer
from kvcache.transfer.states import StateDescription, StateTensor, StateTransferPlan, plan_states
from kvcache.transfer.transport.base import Transport, make_transport
from kvcache.worker.pages.pages import Pages
from kvcache.worker.pages.storage import KVStorage

Plan = TransferPlan | StateTransferPlan


def layouts_of_plan(
    plan: CachePlan,
    storages: Sequence[KVStorage],
    *,
    engine_id: str,
    states: Mapping[int, Sequence[StateTensor]] | None = None,
    layers: Mapping[int, Sequence[str]] | None = None,
    **sizes: int,
) -> tuple[GroupLayout, ...]:
    """The layouts of a plan's transferred groups, over the storages that `KVStorage.for_plan` made.

    states: by group, what the states of recurrent layers consist of. layers: by group, the names of all
    stages' layers, with `pp_size`; the plan is then that of one stage, and stages are alike. sizes:
    `tp_size`, `pp_size`, `total_num_kv_heads` and `cp_interleave`, as for `CacheDescription`. ValueError
    for groups whose blocks cannot be read by another engine.
    """
    instance(plan, CachePlan, "plan")
    storages = instances(storages, KVStorage, "storages")
    if len(storages) != len(plan.groups):
        raise ValueError(
            f"storages has {len(storages)} entries: expected {len(plan.groups)}, one per group"
        )
    for name, value in (("states", states), ("layers", layers)):
        if value is not None:
            instance(value, Mapping, name)
    cp_size = 1 if plan.context_parallel is None else plan.context_parallel.world_size
    found = []
    for number in plan.transferred_groups:
        group, storage = plan.groups[number], storages[number]
        names = tuple((layers or {}).get(number, group.layers))
        if tensors := (states or {}).get(number):
            description = StateDescription(
                engine_id=engine_id,
                num_layers=len(names),
                tensors=tuple(tensors),
                tp_size=sizes.get("tp_size", 1),
                pp_size=sizes.get("pp_size", 1),
                cp_world_size=cp_size,
                page_stride=plan.layer_page_bytes,
            )
        else:
            description = CacheDescription.of_group(
                group,
                plan.layers,
                engine_id=engine_id,
                cp_world_size=cp_size,
                memory_order=storage.memory_order,
                page_stride=plan.layer_page_bytes,
                **sizes,
            )
        if len(names) != description.num_layers:
            raise ValueError(
                f"layers of group {number} are {shown(list(names))}: expected {description.num_layers}, "
                "those of all stages"
            )
        found.append(GroupLayout(names, description, 1, plan.num_pages))
    return tuple(found)


class CacheRank(RankThread):
    """One rank's pages, for other engines to read, and filled from them. It listens until `close`.

    layouts: of the transferred groups; storages: this rank's, in the same order, in the manager's
    blocks. secret: what peers must have to connect.

    ValueError or TypeError where storages are not laid out as described, and for the transport's errors
    as `make_transport`.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        storages: Sequence[KVStorage],
        *,
        rank: int = 0,
        options: ConnectorOptions | None = None,
        secret: bytes = b"",
    ) -> None:
        options = ConnectorOptions() if options is None else options
        instance(options, ConnectorOptions, "options")
        layouts = instances(layouts, GroupLayout, "layouts")
        storages = instances(storages, KVStorage, "storages")
        if len(layouts) != len(storages) or not layouts:
            raise ValueError(
                f"there are {len(layouts)} layouts and {len(storages)} storages: expected one storage "
                "for each of one layout or more"
            )
        addresses = [_addresses(*each, rank) for each in zip(layouts, storages)]
        transport = make_transport(
            f"{layouts[0].description.engine_id}/{rank}",
            options.transport,
            host=options.host,
            port=options.port_of(rank),
            advertise=options.advertise,
            secret=secret,
            digest=options.digest,
        )
        try:
            for pages in {each.pages.base: each.pages for each in storages}.values():
                transport.register(pages)
            reader = _PlanReader(transport, layouts, storages, addresses, rank)
            super().__init__(
                reader, layouts, addresses, lambda load: _PlanRead(reader, load, options.timeout_s)
            )
        except BaseException:
            transport.close()
            raise


class _PlanReader(Reader):
    """A rank's pages, and its plans by remote engine."""

    def __init__(
        self,
        transport: Transport,
        layouts: Sequence[GroupLayout],
        storages: Sequence[KVStorage],
        addresses: Sequence[np.ndarray],
        rank: int,
    ) -> None:
        super().__init__(transport, storages[0].pages.device)
        self.storages, self.addresses = storages, addresses
        self._layouts, self._rank = tuple(layouts), rank
        self._plans: dict[tuple, tuple[tuple[Plan, ...], Mapping[int, int]]] = {}

    def plans(
        self, remote: tuple[GroupLayout, ...], allow_permutation: bool
    ) -> tuple[tuple[Plan, ...], Mapping[int, int]]:
        """A plan per group, and how many ranks each remote rank waits for; made once. ValueError."""
        key = remote, allow_permutation
        if key not in self._plans:
            check_like(self._layouts, remote)
            plans = tuple(
                plan_states(mine.description, theirs.description, self._rank)
                if mine.is_state
                else plan_transfer(
                    mine.description,
                    theirs.description,
                    self._rank,
                    allow_permutation=allow_permutation,
                )
                for mine, theirs in zip(self._layouts, remote)
            )
            self._plans[key] = plans, readers_of_sources(self._layouts, remote, self._rank)
        return self._plans[key]


class _PlanRead(Read):
    """A load by transfer plans: whole, or as far as the sender's layers are computed."""

    _reader: _PlanReader

    def __init__(self, reader: _PlanReader, load: Load, timeout_s: float) -> None:
        super().__init__(reader, load, timeout_s)
        # Tokens that have been read, of each layer of a remote rank, by group and rank.
        self._read: dict[tuple[int, int], np.ndarray] | None = None
        self._has_begun = False

    def _plan(self) -> Mapping[int, int]:
        offer, load = self._load.offer, self._load
        plans, readers = self._reader.plans(offer.groups, not offer.order)
        self._groups = []
        if load.end_token > load.first_token:
            for group, (plan, layout) in enumerate(zip(plans, offer.groups)):
                ids = [
                    np.array(each, np.int64) for each in (load.blocks[group], offer.blocks[group])
                ]
                if layout.is_state:  # only the last one comes
                    ids = [each[-1:] for each in ids]
                remote = {r: np.array(offer.ranks[r].addresses[group]) for r in plan.remote_ranks}
                self._groups.append(
                    GroupFetch(
                        plan,
                        *ids,
                        self._reader.addresses[group],
                        remote,
                        self._reader.storages[group],
                    )
                )
        if offer.order:
            self._parts = _Parts(offer)
            self._read = {
                (number, rank): np.full(self._parts.num_layers(number, rank), load.first_token)
                for number, group in enumerate(self._groups)
                for rank in group.plan.remote_ranks
            }
        return readers

    def _begin(self, progress: Mapping[int, Progress] | None) -> Iterator[Pending]:
        load = self._load
        if progress is None or self._read is None:
            self._has_begun = True
            if self._groups:
                yield fetch(
                    self._reader.transport,
                    self._peers,
                    self._groups,
                    load.first_token,
                    load.end_token,
                    timeout_s=self.left_s,
                )
            return
        for (number, rank), read in self._read.items():
            group = self._groups[number]
            there = self._parts.computed(number, rank, progress[rank])
            there = np.minimum(there, load.end_token)
            if isinstance(group.plan, StateTransferPlan):  # of the last token, or of none
                there[there < load.end_token] = 0
            for first, end in sorted(set(zip(read.tolist(), there.tolist()))):
                if end > first:
                    layers = np.flatnonzero((read == first) & (there == end))
                    yield from self._begin_part(number, rank, layers, first, end)
            np.maximum(read, there, out=read)

    def _begin_part(
        self, number: int, rank: int, layers: np.ndarray, first: int, end: int
    ) -> Iterator[Pending]:
        group = self._groups[number]
        if isinstance(group.plan, StateTransferPlan):
            runs = group.plan.apply(group.local_ids, group.remote_ids)
        else:
            runs = plan_range(group.plan, group.local_ids, group.remote_ids, first, end).runs
        for each in runs.by_rank:
            if each.remote_rank != rank:
                continue
            if (part := self._parts.of_layers(each, number, layers)).num_fragments:
                yield self._reader.transport.read_spans(
                    self._peers[rank], *spans_of(group, part), timeout_s=self.left_s
                )

    def _has_all(self) -> bool:
        if self._read is None:
            return self._has_begun
        return all((read >= self._load.end_token).all() for read in self._read.values())


class _Parts:
    """Which layers of a sender's ranks are computed, and in which regions they lie."""

    def __init__(self, offer: Offer) -> None:
        self._groups = offer.groups
        place = {
            name: (number, layer)
            for number, layout in enumerate(offer.groups)
            for layer, name in enumerate(layout.layers)
        }
        self._order = [place[name] for name in offer.order]

    def num_layers(self, group: int, rank: int) -> int:
        """Layers of a group that a rank holds."""
        return len(self._groups[group].description.layers(rank))

    def computed(self, group: int, rank: int, progress: Progress) -> np.ndarray:
        """int64[layers]: tokens that each of a rank's layers of a group has."""
        held = [each.description.layers(rank) for each in self._groups]
        of_rank = [(g, layer) for g, layer in self._order if layer in held[g]]
        ahead = np.zeros(self.num_layers(group, rank), bool)
        for g, layer in of_rank[: progress.num_layers]:
            if g == group:
                ahead[layer - held[g].start] = True
        if self._layers_of_regions(group, rank) is None:  # they lie together
            ahead[:] = ahead.all()
        tokens = max(progress.num_tokens, progress.end_token)
        return np.where(ahead, tokens, progress.num_tokens)

    def of_layers(self, runs: Runs, group: int, layers: np.ndarray) -> Runs:
        """Those of some layers of the rank that is read."""
        of_regions = self._layers_of_regions(group, runs.remote_rank)
        if of_regions is None:
            return runs
        wanted = np.isin(of_regions[runs.descriptors[:, 0]], layers)
        return replace(runs, descriptors=runs.descriptors[wanted])

    def _layers_of_regions(self, group: int, rank: int) -> np.ndarray | None:
        """int64[regions]: the layer of each; None where a region has several."""
        layout = self._groups[group]
        if layout.is_state:
            return np.arange(layout.num_regions(rank))
        placed = layout.description.stage_of(rank).placement
        of_heads = np.arange(placed.head_count) * placed.head_regions
        found = np.full(layout.num_regions(rank), -1)
        for layer, own in enumerate(placed.regions):
            for region in set(np.add.outer(own, of_heads).ravel().tolist()):
                if found[region] >= 0:
                    return None
                found[region] = layer
        return found


def _addresses(layout: GroupLayout, storage: KVStorage, rank: int) -> np.ndarray:
    """Where the regions of a group begin in a rank's pages. Pages may have layers more than the group."""
    instance(storage, KVStorage, "storages")
    if layout.pages_per_block != 1:
        raise ValueError(
            f"pages_per_block is {shown(layout.pages_per_block)}: expected 1, storages in the manager's "
            "blocks"
        )
    pages, num_layers = storage.pages, len(layout.description.layers(rank))
    if num_layers < pages.num_layers:
        pages = Pages.over([pages.layer(layer) for layer in range(num_layers)])
    return region_addresses(layout.description, pages, rank)
