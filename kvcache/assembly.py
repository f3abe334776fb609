"""Both planes from one plan: manager, block tables, storages, pages and worker in one call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch

from kvcache.allocator import CacheOptions, KVCacheManager, PolicyArguments
from kvcache.checks import check_range, instance, integer, integers, shown
from kvcache.layouts import AttentionBackend, EngineBackend
from kvcache.memory_plan import CachePlan
from kvcache.worker import BlockTable, KVStorage, MultiGroupBlockTable, Pages, SwapEngine, Worker
from kvcache.worker.pages.contents import PageContents
from kvcache.worker.pages.pages import Tensors

# Arguments of the parts that follow from a plan.
_GIVEN_BY_PLAN = (
    "groups",
    "num_gpu_blocks",
    "max_model_len",
    "max_num_batched_tokens",
    "max_encoder_tokens",
    "context_parallel",
    "page_bytes",
)


@dataclass(frozen=True, eq=False)
class KVCache:
    """The parts of one cache, made to fit by `build`; each is used as it is used alone.

    A scheduler asks `manager.step`, the `worker` applies the plan, `tables.compute_slot_mapping` says
    where tokens go, and layers are written and read by name.
    """

    plan: CachePlan
    manager: KVCacheManager
    tables: MultiGroupBlockTable  # one per group
    storages: tuple[KVStorage, ...]  # one per group, in kernel blocks, over the memory of `pages`
    pages: Pages
    host_pages: Pages | None  # None without a host tier
    worker: Worker

    def __post_init__(self) -> None:
        parts = {"plan": CachePlan, "manager": KVCacheManager, "tables": MultiGroupBlockTable}
        for name, kind in (parts | {"pages": Pages, "worker": Worker}).items():
            instance(getattr(self, name), kind, f"{name} of the cache")

    def group(self, layer_name: str) -> int:
        """The cache group of a layer. ValueError for a layer that the plan has not."""
        return self._place(layer_name)[0]

    def kv_cache(self, layer_name: str) -> Tensors:
        """The tensor that the layer's attention kernel takes, as `KVStorage.kv_caches` has it.

        Its blocks are those of the layer's table (kernel blocks). Of a recurrent layer: its states,
        [num_pages, 1, elements]. ValueError for an unknown layer.
        """
        group, index = self._place(layer_name)
        return self.storages[group].kv_caches[index]

    def slots(self, layer_name: str, num_tokens: int) -> torch.Tensor:
        """int64[num_tokens]: slots of the step's first tokens in this layer, a view on the device.

        As `tables.compute_slot_mapping` left them; for a layer with cross-attention, as its group's
        own did (`tables[cache.group(layer_name)].compute_slot_mapping`). ValueError for more tokens
        than that was given, or than `tables.commit_slot_mapping` left, and for a recurrent layer,
        which has no slots.
        """
        num_tokens = integer(num_tokens, "num_tokens")
        return self._slots(layer_name, num_tokens, f"num_tokens is {num_tokens}")

    def _slots(self, layer_name: str, num_tokens: int, what: str) -> torch.Tensor:
        table = self.tables[self.group(layer_name)]
        most = _num_slots(table)
        if num_tokens > most:
            raise ValueError(
                f"{what}: expected at most {most}, the tokens of layer {layer_name!r} whose slots "
                "compute_slot_mapping and commit_slot_mapping have left"
            )
        return table.slot_mapping.gpu[:num_tokens]

    def write(
        self,
        layer_name: str,
        key: torch.Tensor,
        value: torch.Tensor | None,
        slots: torch.Tensor | None = None,
    ) -> None:
        """Writes key, value [n, num_kv_heads, (v_)head_size]; see `KVStorage.write`.

        `slots`: int64[n], by default `self.slots(layer_name, n)`, those of all tokens of the step:
        ValueError for more or fewer. A recurrent layer takes pages as slots, its state as key
        [n, 1, elements], and no value. ValueError for an unknown layer.
        """
        group, index = self._place(layer_name)
        if slots is None:
            instance(key, torch.Tensor, "key")
            num_tokens = key.shape[0] if key.ndim else 0
            slots = self._slots(layer_name, num_tokens, f"key has {num_tokens} tokens")
            num_computed = self.tables[group].num_computed_slots
            if num_computed is not None and num_tokens < num_computed:
                raise ValueError(
                    f"key has {num_tokens} tokens: expected {num_computed}, all whose slots "
                    f"compute_slot_mapping has left for layer {layer_name!r}, or slots for these"
                )
        self.storages[group].write(index, key, value, slots)

    def gather(
        self, layer_name: str, slots: torch.Tensor, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(key, value) of the tokens at slots int64[n]; see `KVStorage.gather`."""
        group, index = self._place(layer_name)
        return self.storages[group].gather(index, slots, dtype)

    def gather_context(
        self,
        layer_name: str,
        rows: Sequence[int],
        num_tokens: Sequence[int],
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(key, value) of the first num_tokens[i] tokens of each row rows[i], one row after the other.

        Through the tables as they are on the host, with slots in a buffer of their own: those of the
        step (`slots`) stay. Tokens that slid out of a window are zeros, and so are those that another
        context-parallel rank holds. Of a circular group num_tokens[i] is all that the row has computed:
        what was written over by then is zeros. ValueError for an unknown layer or row, for tokens that a
        row has no blocks for, and for a recurrent layer.

        >>> from kvcache import LayerSpec, Request, plan_cache
        >>> plan = plan_cache([LayerSpec("a", "full_attention", 16, 2, 64)], 2**20, max_model_len=64)
        >>> cache = build(plan, max_num_reqs=4)
        >>> report = cache.worker.apply(cache.manager.step(new=[Request("r1", range(40))]))
        >>> cache.gather_context("a", rows=[0], num_tokens=[40])[0].shape
        torch.Size([40, 2, 64])
        """
        group, index = self._place(layer_name)
        rows = integers(rows, "rows", ())
        lengths = integers(num_tokens, "num_tokens", ())
        layout = self.tables[group].layout
        if len(rows) != len(lengths):
            raise ValueError(
                f"num_tokens has {len(lengths)} entries: expected one for each of the {len(rows)} rows"
            )
        most = self.plan.max_model_len if layout.is_circular else layout.num_places
        check_range("num_tokens", "is", lengths, 0, most + 1)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        if len(rows) and rows.min() < 0:
            raise ValueError(f"rows is {rows.tolist()}: expected rows of the tables, 0 or more")
        of = np.repeat(rows, lengths)
        if layout.is_circular:
            is_left = positions >= np.repeat(lengths, lengths) - layout.num_places
            of = np.where(is_left, of, -1)
        slots = self.tables[group].slots_of(of, positions)
        return self.storages[group].gather(index, slots, dtype)

    def _place(self, layer_name: str) -> tuple[int, int]:
        """Group of a layer, and which of the group's layers it is."""
        if isinstance(layer_name, str):
            for group, spec in enumerate(self.plan.groups):
                if layer_name in spec.layers:
                    return group, spec.layers.index(layer_name)
        names = [layer.name for layer in self.plan.layers]
        raise ValueError(f"layer_name is {shown(layer_name)}: expected one of {', '.join(names)}")


def build(
    plan: CachePlan,
    *,
    max_num_reqs: int,
    device: torch.device | str = "cpu",
    backend: str | AttentionBackend | EngineBackend | None = None,
    layout: str = "NHD",
    kernel_sizes: Sequence[int] | None = None,
    num_speculative_tokens: int = 0,
    cp_kv_cache_interleave_size: int = 1,
    num_host_blocks: int = 0,
    swap_options: Mapping[str, object] | None = None,
    enable_caching: bool = True,
    num_preallocate_tokens: int = 64,
    **options: Unpack[PolicyArguments],
) -> KVCache:
    """All parts of a cache for one device. Models differ in their plans only.

    The plan gives groups, pages, bytes per page, `max_model_len`, `max_num_batched_tokens`,
    `max_encoder_tokens` and context parallelism. The other arguments:

    - `max_num_reqs`: requests admitted at a time.
    - `device`, `backend`, `layout`: of the pages, as `KVStorage.for_plan` takes them.
    - `kernel_sizes`: tokens per block that the attention kernel takes, the preferred first. Larger
      blocks of the plan are cut into such blocks, in the tables and in `kv_cache`. None: not cut.
    - `num_speculative_tokens`, `cp_kv_cache_interleave_size`: as `MultiGroupBlockTable` takes them.
    - `num_host_blocks`: pages of a tier in host memory, its null page counted; 0: no such tier.
    - `swap_options`: the options of `SwapEngine`, where there is a host tier.
    - `enable_caching`, `num_preallocate_tokens`, `options` (`eviction`, `host_write`, ...): fields of
      `CacheOptions`.

    Raises TypeError or ValueError, MemoryError where the host has less memory.

    >>> from kvcache import LayerSpec, Request, plan_cache
    >>> layers = [LayerSpec(f"layers.{i}", "full_attention", 16, 2, 64) for i in range(4)]
    >>> plan = plan_cache(layers, 2**23, max_model_len=256)
    >>> cache = build(plan, max_num_reqs=4)
    >>> step = cache.manager.step(new=[Request("r1", range(100))])
    >>> report = cache.worker.apply(step)
    >>> cache.kv_cache("layers.3").shape
    torch.Size([256, 2, 16, 2, 64])
    """
    if not isinstance(plan, CachePlan):
        raise TypeError(f"plan is {shown(plan)}: expected a CachePlan, as plan_cache makes it")
    for name in _GIVEN_BY_PLAN:
        if name in options:
            raise TypeError(
                f"{name} is {shown(options[name])}: expected no {name}, the plan gives it"
            )
    CacheOptions.check_names("kvcache.build", options)
    swap_options = _checked_swap_options(swap_options)
    manager = KVCacheManager.for_groups(
        plan.groups,
        plan.num_pages,
        plan.max_model_len,
        context_parallel=plan.context_parallel,
        max_encoder_tokens=plan.max_encoder_tokens,
        enable_caching=enable_caching,
        num_preallocate_tokens=num_preallocate_tokens,
        max_num_reqs=max_num_reqs,
        num_host_blocks=num_host_blocks,
        page_bytes=plan.page_bytes,
        **options,
    )
    tables = MultiGroupBlockTable.for_groups(
        plan.groups,
        max_num_reqs=max_num_reqs,
        max_model_len=plan.max_model_len,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        device=device,
        kernel_sizes=kernel_sizes,
        context_parallel=plan.context_parallel,
        max_encoder_tokens=plan.max_encoder_tokens or None,
        num_speculative_tokens=num_speculative_tokens,
        cp_kv_cache_interleave_size=cp_kv_cache_interleave_size,
    )
    by_page = KVStorage.for_plan(plan, device=device, backend=backend, layout=layout)
    storages = tuple(
        _in_kernel_blocks(plan, group, storage, tables[group].blocks_per_kv_block)
        for group, storage in enumerate(by_page)
    )
    pages = by_page[0].pages
    pages.contents = PageContents.of(pages, storages, cp_kv_cache_interleave_size)
    host_pages = pages.on_host(num_host_blocks) if num_host_blocks else None
    worker = Worker(by_page, tables, host_pages, **swap_options)
    return KVCache(plan, manager, tables, storages, pages, host_pages, worker)


def _num_slots(table: BlockTable) -> int:
    """Tokens of the group that have slots on the device, or may have."""
    num_computed = table.num_computed_slots
    return len(table.slot_mapping.gpu) if num_computed is None else num_computed


def _checked_swap_options(swap_options: Mapping[str, object] | None) -> dict[str, object]:
    if swap_options is None:
        return {}
    if not isinstance(swap_options, Mapping):
        raise TypeError(
            f"swap_options is {shown(swap_options)}: expected a mapping of names to values"
        )
    parameters = inspect.signature(SwapEngine).parameters.values()
    names = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    for name in swap_options:
        if name not in names:
            raise TypeError(f"swap_options has {shown(name)}: expected some of {', '.join(names)}")
    return dict(swap_options)


def _in_kernel_blocks(plan: CachePlan, group: int, storage: KVStorage, ratio: int) -> KVStorage:
    """The same memory as blocks of the attention kernel's size: each page is cut into `ratio` equal
    parts, and each part holds K and V of a kernel block."""
    if ratio == 1:
        return storage
    if plan.layer_page_bytes % (ratio * storage.dtype.itemsize):
        raise ValueError(
            f"kernel_sizes cut a block of group {group} into {ratio}, and a layer has "
            f"{plan.layer_page_bytes} bytes of a page: expected a multiple of {ratio} elements of "
            f"{storage.dtype.itemsize} bytes, so kernel_sizes with other candidates"
        )
    names = plan.groups[group].layers
    parts = [
        storage.pages.layer(i).view(-1, plan.layer_page_bytes // ratio) for i in range(len(names))
    ]
    spec = next(layer for layer in plan.layers if layer.name == names[0])
    return KVStorage.over(
        Pages.over(parts),
        storage.block_size // ratio,
        storage.num_kv_heads,
        storage.head_size,
        v_head_size=storage.v_head_size,
        dtype=storage.dtype,
        backend=storage.backend,
        layout=storage.layout,
        scale_bytes_per_token=spec.scale_bytes_per_token,
        num_null_blocks=ratio,
    )
