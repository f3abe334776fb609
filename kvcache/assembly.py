"""Both planes from one plan: manager, block tables, storages, pages and worker in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvcache.allocator import KVCacheManager
from kvcache.layouts import AttentionBackend
from kvcache.memory_plan import CachePlan
from kvcache.worker import KVStorage, MultiGroupBlockTable, Pages, Worker
from kvcache.worker.pages.pages import Tensors


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
        """The slots of the step's first tokens in this layer, a view on the device.

        As `tables.compute_slot_mapping` left them. ValueError for a recurrent layer, which has none.
        """
        return self.tables[self.group(layer_name)].slot_mapping.gpu[:num_tokens]

    def write(
        self,
        layer_name: str,
        key: torch.Tensor,
        value: torch.Tensor | None,
        slots: torch.Tensor | None = None,
    ) -> None:
        """Writes key, value [n, num_kv_heads, (v_)head_size]; see `KVStorage.write`.

        `slots`: int64[n], by default `self.slots(layer_name, n)`. A recurrent layer takes pages as
        slots, its state as key [n, 1, elements], and no value. ValueError for an unknown layer.
        """
        group, index = self._place(layer_name)
        if slots is None:
            slots = self.slots(layer_name, len(key))
        self.storages[group].write(index, key, value, slots)

    def gather(
        self, layer_name: str, slots: torch.Tensor, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(key, value) of the tokens at slots int64[n]; see `KVStorage.gather`."""
        group, index = self._place(layer_name)
        return self.storages[group].gather(index, slots, dtype)

    def _place(self, layer_name: str) -> tuple[int, int]:
        """Group of a layer, and which of the group's layers it is."""
        for group, spec in enumerate(self.plan.groups):
            if layer_name in spec.layers:
                return group, spec.layers.index(layer_name)
        names = [layer.name for layer in self.plan.layers]
        raise ValueError(f"layer_name is {layer_name!r}: expected one of {', '.join(names)}")


def build(
    plan: CachePlan,
    *,
    max_num_reqs: int,
    device: torch.device | str = "cpu",
    backend: str | AttentionBackend | None = None,
    layout: str = "NHD",
    kernel_sizes: Sequence[int] | None = None,
    num_speculative_tokens: int = 0,
    cp_kv_cache_interleave_size: int = 1,
    num_host_blocks: int = 0,
    swap_options: Mapping[str, object] | None = None,
    **options: object,
) -> KVCache:
    """All parts of a cache for one device. Models differ in their plans only.

    The plan gives groups, pages, bytes per page, `max_model_len`, `max_num_batched_tokens` and
    context parallelism. The other arguments:

    - `max_num_reqs`: requests admitted at a time.
    - `device`, `backend`, `layout`: of the pages, as `KVStorage.for_plan` takes them.
    - `kernel_sizes`: tokens per block that the attention kernel takes, the preferred first. Larger
      blocks of the plan are cut into such blocks, in the tables and in `kv_cache`. None: not cut.
    - `num_speculative_tokens`, `cp_kv_cache_interleave_size`: as `MultiGroupBlockTable` takes them.
    - `num_host_blocks`: pages of a tier in host memory, its null page counted; 0: no such tier.
    - `swap_options`: the options of `SwapEngine`, where there is a host tier.
    - `options`: those of `KVCacheManager.for_groups` (`eviction`, `host_write`, `use_eagle`, ...).

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
        raise TypeError(f"plan is {plan!r}: expected a CachePlan, as plan_cache makes it")
    manager = KVCacheManager.for_groups(
        plan.groups,
        plan.num_pages,
        plan.max_model_len,
        context_parallel=plan.context_parallel,
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
        num_speculative_tokens=num_speculative_tokens,
        cp_kv_cache_interleave_size=cp_kv_cache_interleave_size,
    )
    by_page = KVStorage.for_plan(plan, device=device, backend=backend, layout=layout)
    storages = tuple(
        _in_kernel_blocks(plan, group, storage, tables[group].blocks_per_kv_block)
        for group, storage in enumerate(by_page)
    )
    pages = by_page[0].pages
    host_pages = pages.on_host(num_host_blocks) if num_host_blocks else None
    worker = Worker(by_page, tables, host_pages, **(swap_options or {}))
    return KVCache(plan, manager, tables, storages, pages, host_pages, worker)


def _in_kernel_blocks(plan: CachePlan, group: int, storage: KVStorage, ratio: int) -> KVStorage:
    """The same memory as blocks of the attention kernel's size: each page is cut into `ratio` equal
    parts, and each part holds K and V of a kernel block."""
    if ratio == 1:
        return storage
    if plan.layer_page_bytes % ratio:
        raise ValueError(
            f"kernel_sizes cut a block of group {group} into {ratio}, and a layer has "
            f"{plan.layer_page_bytes} bytes of a page: expected a multiple of {ratio}"
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
    )
