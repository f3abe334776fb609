# SPDX-License-Identifier: Apache-2.0
"""A rank that keeps its pages in `KVStorage` objects and exchanges them with transfer plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvcache.checks import instance, instances, shown
from kvcache.memory_plan import CachePlan
from kvcache.transfer import (
    CacheDescription,
    GroupFetch,
    StateDescription,
    StateTensor,
    StateTransferPlan,
    TransferPlan,
    Transport,
    fetch,
    plan_states,
    plan_transfer,
    region_addresses,
)
from kvcache.worker import KVStorage, Pages
from kvcache_exchange.disaggregation.layout import GroupLayout, check_like
from kvcache_exchange.disaggregation.options import ConnectorOptions
from kvcache_exchange.disaggregation.rank import RankThread
from kvcache_exchange.disaggregation.reading import Pending, Read, Reader, readers_of_sources
from kvcache_exchange.transport.factory import make_transport

Plan = TransferPlan | StateTransferPlan
Scales = Sequence[Sequence[float]]  # as in `CacheDescription`


def layouts_of_plan(
    plan: CachePlan,
    storages: Sequence[KVStorage],
    *,
    engine_id: str,
    states: Mapping[int, Sequence[StateTensor]] | None = None,
    layers: Mapping[int, Sequence[str]] | None = None,
    scales: Mapping[int, tuple[Scales, Scales]] | None = None,
    stages: Sequence[CachePlan] | None = None,
    **sizes: int,
) -> tuple[GroupLayout, ...]:
    """Return the layouts of the groups that a plan transfers, for storages created by
    `KVStorage.for_plan`.

    Args:
        plan: The plan of one pipeline stage.
        storages: One storage per group of the plan.
        engine_id: Name of the engine.
        states: The tensors of recurrent states, keyed by group index.
        layers: The layer names of all stages, keyed by group index. Required with `pp_size`. All
            stages must have the same structure.
        scales: `k_scale` and `v_scale` as in `CacheDescription`, keyed by group index. None: those
            of the storages. Required with `pp_size`, or for scales per head with `tp_size`.
        stages: The plans of all pipeline stages, from `plan_cache(stages=)`, instead of `layers` and
            `pp_size`. The stages may hold different layers.
        sizes: Values for `tp_size`, `pp_size`, `total_num_kv_heads` and `cp_interleave` of
            `CacheDescription`.

    Returns:
        One layout per transferred group.

    Raises:
        ValueError: A group's blocks cannot be read by another engine, the scales of other ranks are
            not known, or the stages' plans differ in their groups or number of pages.
    """
    instance(plan, CachePlan, "plan")
    storages = instances(storages, KVStorage, "storages")
    if len(storages) != len(plan.groups):
        raise ValueError(
            f"storages has {len(storages)} entries: expected {len(plan.groups)}, one per group"
        )
    for name, value in (("states", states), ("layers", layers), ("scales", scales)):
        if value is not None:
            instance(value, Mapping, name)
    if stages is not None:
        _check_stages(plan, stages, layers, sizes)
    cp_size = 1 if plan.context_parallel is None else plan.context_parallel.world_size
    tp_size = sizes.pop("tp_size", 1)
    pp_size = sizes.pop("pp_size", 1) if stages is None else len(stages)
    parallel = {"tp_size": tp_size, "pp_size": pp_size}
    all_layers = [layer for each in stages or [plan] for layer in each.layers]
    found = []
    for number in plan.transferred_groups:
        group, storage = plan.groups[number], storages[number]
        names = tuple((layers or {}).get(number, group.layers))
        if stages is not None:
            own = [each.groups[number].layers for each in stages]
            names = tuple(name for each in own for name in each)
            parallel = {"stages": tuple((len(each), tp_size) for each in own)}
            group = replace(group, layers=names)
        if tensors := (states or {}).get(number):
            description = StateDescription(
                engine_id=engine_id,
                num_layers=len(names),
                tensors=tuple(tensors),
                cp_world_size=cp_size,
                page_stride=plan.layer_page_bytes,
                **parallel,
            )
        else:
            k_scale, v_scale = (scales or {}).get(number) or _scales_of(
                storage, number, tp_size, pp_size
            )
            description = CacheDescription.of_group(
                group,
                all_layers,
                engine_id=engine_id,
                cp_world_size=cp_size,
                memory_order=storage.memory_order,
                page_stride=plan.layer_page_bytes,
                **parallel,
                k_scale=k_scale,
                v_scale=v_scale,
                **sizes,
            )
        if len(names) != description.num_layers:
            raise ValueError(
                f"layers of group {number} are {shown(list(names))}: expected {description.num_layers} "
                "names, one per layer of all stages"
            )
        found.append(GroupLayout(names, description, 1, plan.num_pages, spec=group.summary))
    return tuple(found)


def _check_stages(
    plan: CachePlan, stages: Sequence[CachePlan], layers: object, sizes: Mapping[str, int]
) -> None:
    """Raise TypeError or ValueError unless `stages` are plans of one `plan_cache(stages=)` call, one of
    which is `plan`.
    """
    for name, value in (("layers", layers), ("pp_size", sizes.get("pp_size"))):
        if value is not None:
            raise TypeError(f"{name} is {shown(value)}: expected no {name} with stages")
    stages = instances(stages, CachePlan, "stages")
    if plan not in stages:
        raise ValueError("plan is not one of stages: expected the plans of all pipeline stages")
    groups, *of_stages = ([group.summary for group in each.groups] for each in (plan, *stages))
    for i, (each, own) in enumerate(zip(stages, of_stages)):
        if (own, each.num_pages) != (groups, plan.num_pages):
            raise ValueError(
                f"stages[{i}] has {each.num_pages} pages and the groups {shown(own)}: expected "
                f"{plan.num_pages} pages and {shown(groups)}, as in plan; plan all pipeline stages "
                "together, with plan_cache(stages=)"
            )


def _scales_of(storage: KVStorage, group: int, tp_size: int, pp_size: int) -> tuple:
    """Return a storage's `k_scale` and `v_scale`. Raises ValueError if other ranks may have others."""
    if storage.k_scale is None:
        return None, None
    is_per_head = max(storage.k_scale.shape[1], storage.v_scale.shape[1]) > 1
    if pp_size > 1 or (is_per_head and tp_size > 1):
        raise ValueError(
            f"scales is None, and group {group} has fp8 scales on this rank: expected the scales of all "
            "layers and heads of the model, because other ranks may have others"
        )
    k_scale, v_scale = (each.cpu().tolist() for each in (storage.k_scale, storage.v_scale))
    return k_scale, v_scale if storage.v_head_size else None


def _check_scales(layout: GroupLayout, storage: KVStorage, rank: int) -> None:
    """Raise ValueError unless a rank's storage has the scales of its layout."""
    own = layout.description
    for name in () if layout.is_state else ("k_scale", "v_scale")[: 1 + bool(own.v_head_size)]:
        told, scale = getattr(own, name), getattr(storage, name)
        told = np.broadcast_to(
            np.float32(1 if told is None else told), (own.num_layers, own.total_num_kv_heads)
        )[np.ix_(own.layers(rank), own.heads(rank))]
        if not np.array_equal(
            told, np.broadcast_to(1 if scale is None else scale.cpu(), told.shape)
        ):
            raise ValueError(
                f"storages has another {name} on rank {rank} than its layout, {told.tolist()}: expected "
                "set_scales before layouts_of_plan, and equal scales"
            )


class CacheRank(RankThread):
    """Serves one rank's pages to other engines, and loads KV from other engines into these pages.
    Listens for peers until `close`.

    Args:
        layouts: Layouts of the transferred groups.
        storages: This rank's storages in the same order, divided into the manager's blocks.
        rank: Index of this rank.
        options: Connection options.
        secret: Secret that all peers must share.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The storages do not match the layouts. `make_transport` may raise other errors.
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
                f"there are {len(layouts)} layouts and {len(storages)} storages: expected at least one "
                "layout, and one storage per layout"
            )
        addresses = [_addresses(*each, rank) for each in zip(layouts, storages)]
        for layout, storage in zip(layouts, storages):
            _check_scales(layout, storage, rank)
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
                reader,
                layouts,
                addresses,
                lambda load: _PlanRead(reader, load, options.timeout_s),
                rank,
            )
            self._described = [each.scale_home[0].described_by for each in storages]
            for described in self._described:
                described.add(self)
        except BaseException:
            transport.close()
            raise

    def close(self) -> None:
        """Stop the thread and close the transport. Loads in flight are abandoned."""
        super().close()
        for each in self._described:
            each.discard(self)


class _PlanReader(Reader):
    """Reads into a rank's pages, and caches the rank's transfer plans for each remote engine."""

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
        self._plans: dict[tuple[GroupLayout, ...], tuple[tuple[Plan, ...], Mapping[int, int]]] = {}

    def plans(self, remote: tuple[GroupLayout, ...]) -> tuple[tuple[Plan, ...], Mapping[int, int]]:
        """Return one plan per group and, for each remote rank, the number of local ranks that it
        waits for.

        Results are cached.
        """
        if remote not in self._plans:
            check_like(self._layouts, remote)
            plans = tuple(
                plan_states(mine.description, theirs.description, self._rank)
                if mine.is_state
                else plan_transfer(mine.description, theirs.description, self._rank)
                for mine, theirs in zip(self._layouts, remote)
            )
            self._plans[remote] = plans, readers_of_sources(self._layouts, remote, self._rank)
        return self._plans[remote]


class _PlanRead(Read):
    """A load that is performed with transfer plans."""

    _reader: _PlanReader

    def _plan(self) -> Mapping[int, int]:
        offer, load = self._load.offer, self._load
        plans, readers = self._reader.plans(offer.groups)
        self._groups = []
        if load.end_token > load.first_token:
            for group, (plan, layout) in enumerate(zip(plans, offer.groups)):
                ids = [
                    np.array(each, np.int64) for each in (load.blocks[group], offer.blocks[group])
                ]
                if layout.is_state:  # transfer only the last state
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
        return readers

    def _begin(self) -> Iterator[Pending]:
        if self._groups:
            yield fetch(
                self._reader.transport,
                self._peers,
                self._groups,
                self._load.first_token,
                self._load.end_token,
                timeout_s=self.left_s,
            )


def _addresses(layout: GroupLayout, storage: KVStorage, rank: int) -> np.ndarray:
    """Return the start address of each of a group's regions in a rank's pages.

    The pages may also contain layers that do not belong to the group.
    """
    instance(storage, KVStorage, "storages")
    if layout.pages_per_block != 1:
        raise ValueError(
            f"layouts has pages_per_block {shown(layout.pages_per_block)}: expected 1, storages in the "
            "manager's blocks"
        )
    pages, num_layers = storage.pages, len(layout.description.layers(rank))
    if num_layers == 0:  # nothing is transferred
        return np.full(layout.num_regions(rank), pages.base, np.int64)
    if num_layers < pages.num_layers:
        pages = Pages.over([pages.layer(layer) for layer in range(num_layers)])
    try:
        return region_addresses(layout.description, pages, rank)
    except ValueError as error:
        if storage.blocks_per_page == 1:
            raise
        raise ValueError(
            f"storages has pages of {storage.blocks_per_page} kernel blocks each, whose bytes are in "
            "another order: expected pages of one block (`kvcache.build` without kernel_sizes)"
        ) from error
