# SPDX-License-Identifier: Apache-2.0
"""Builds all parts of a cache from one plan: manager, block tables, storages, pages and worker."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcache.allocator import CacheOptions, KVCacheManager, PolicyArguments
from kvcache.checks import instance, integer, shown
from kvcache.formats import SCALE_BYTES
from kvcache.layouts import AttentionBackend, EngineBackend
from kvcache.memory_plan import CachePlan
from kvcache.worker import BlockTables, GroupTable, KVStorage, Pages, SwapEngine, Worker
from kvcache.worker.pages.parts import contents_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Arguments that are derived from the plan.
_GIVEN_BY_PLAN = (
    "groups",
    "num_gpu_blocks",
    "max_model_len",
    "max_num_batched_tokens",
    "max_encoder_tokens",
    "context_parallel",
)


@dataclass(frozen=True, eq=False)
class KVCache:
    """All parts of one cache, created by `build`. Each part can also be used on its own.

    A scheduler calls `manager.step`, and `worker` applies the returned plan.
    `tables.compute_slot_mapping` computes the slots of the step's tokens. `write` and `gather` access
    a layer's KV by the layer's name.
    """

    plan: CachePlan
    manager: KVCacheManager
    tables: BlockTables  # one per group
    storages: tuple[KVStorage, ...]  # one per group, with kernel blocks, over the memory of `pages`
    pages: Pages
    host_pages: Pages | None  # None without a host tier
    worker: Worker

    def __post_init__(self) -> None:
        parts = {"plan": CachePlan, "manager": KVCacheManager, "tables": BlockTables}
        for name, kind in (parts | {"pages": Pages, "worker": Worker}).items():
            instance(getattr(self, name), kind, f"{name} of the cache")

    def group(self, layer_name: str) -> int:
        """Return the cache group of a layer. Raises ValueError for an unknown layer."""
        return self._place(layer_name)[0]

    def kv_cache(self, layer_name: str) -> torch.Tensor:
        """Return the tensor that the layer's attention kernel reads.

        The block dimension is indexed by kernel block, like the layer's block table. For a recurrent
        layer, the tensor contains the states and has shape [num_pages, 1, elements].

        Args:
            layer_name: Name of the layer.

        Returns:
            An entry of `KVStorage.kv_caches`, which describes its shape.

        Raises:
            ValueError: The layer is unknown, or K and V are two tensors, because their head sizes differ
                (`KVStorage.key_cache`, `KVStorage.value_cache`).
        """
        group, index = self._place(layer_name)
        found = self.storages[group].kv_caches[index]
        if not isinstance(found, torch.Tensor):
            raise ValueError(
                f"layer {layer_name!r} has K and V in two tensors, because their head sizes differ: "
                f"expected one tensor; call key_cache({index}) and value_cache({index}) of "
                f"storages[{group}]"
            )
        return found

    def slots(self, layer_name: str, num_tokens: int) -> torch.Tensor:
        """Return the slots of the step's first `num_tokens` tokens in a layer, as a device view.

        The slots were computed by the last call to `tables.compute_slot_mapping`. Slots of a
        cross-attention layer are computed separately, by
        `tables[cache.group(layer_name)].compute_slot_mapping`.

        Args:
            layer_name: Name of the layer.
            num_tokens: Number of tokens.

        Returns:
            int64[num_tokens].

        Raises:
            ValueError: `num_tokens` exceeds the number of tokens in the last call to
                `compute_slot_mapping` or `commit_slot_mapping`, or the layer is recurrent and has no
                slots.
        """
        num_tokens = integer(num_tokens, "num_tokens")
        return self._slots(layer_name, num_tokens, f"num_tokens is {num_tokens}")

    def _slots(self, layer_name: str, num_tokens: int, what: str) -> torch.Tensor:
        table = self.tables[self.group(layer_name)]
        most = _num_slots(table)
        if num_tokens > most:
            raise ValueError(
                f"{what}: expected at most {most}, the number of tokens for which the last "
                f"compute_slot_mapping or commit_slot_mapping prepared slots of layer {layer_name!r}"
            )
        return table.slot_mapping.gpu[:num_tokens]

    def write(
        self,
        layer_name: str,
        key: torch.Tensor,
        value: torch.Tensor | None,
        slots: torch.Tensor | None = None,
    ) -> None:
        """Write the K and V of tokens to a layer's cache with `KVStorage.write`.

        For a recurrent layer, pass page numbers as `slots`, the states as `key` [n, 1, elements], and
        None as `value`.

        Args:
            layer_name: Name of the layer.
            key: [n, num_kv_heads, head_size].
            value: [n, num_kv_heads, v_head_size].
            slots: int64[n]. None: the slots of all tokens in the step.

        Raises:
            ValueError: The layer is unknown, or `slots` is None and n differs from the number of
                tokens in the step.
        """
        group, index = self._place(layer_name)
        if slots is None:
            instance(key, torch.Tensor, "key")
            num_tokens = key.shape[0] if key.ndim else 0
            slots = self._slots(layer_name, num_tokens, f"key has {num_tokens} tokens")
            num_computed = self.tables[group].num_computed_slots
            if num_computed is not None and num_tokens < num_computed:
                raise ValueError(
                    f"key has {num_tokens} tokens: expected {num_computed}, the number of slots that "
                    f"compute_slot_mapping prepared for layer {layer_name!r}; alternatively, pass `slots`"
                )
        self.storages[group].write(index, key, value, slots)

    def gather(
        self, layer_name: str, slots: torch.Tensor, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (key, value) of the tokens at `slots`, int64[n]. See `KVStorage.gather`."""
        group, index = self._place(layer_name)
        return self.storages[group].gather(index, slots, dtype)

    def _place(self, layer_name: str) -> tuple[int, int]:
        """Return a layer's group and its index within the group."""
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
    clear: str | None = None,
    **options: Unpack[PolicyArguments],
) -> KVCache:
    """Build all parts of a cache on one device. Everything that depends on the model is in the plan.

    The plan determines the groups, number of pages, page size, `max_model_len`,
    `max_num_batched_tokens`, `max_encoder_tokens` and context parallelism.

    Args:
        plan: The plan.
        max_num_reqs: Maximum number of admitted requests.
        device: Device on which the pages are allocated.
        backend: Attention backend, as in `KVStorage.for_plan`. None: FLASHINFER, whose `kv_cache` is
            [blocks, 2, block_size, num_kv_heads, head_size].
        layout: "NHD" or "HND".
        kernel_sizes: Candidates for the attention kernel's block size in tokens, in order of
            preference. If the plan's blocks are larger, the block tables and `kv_cache` split them
            into kernel blocks. None: blocks are not split.
        num_speculative_tokens: Maximum number of draft tokens, as in `BlockTables`.
        cp_kv_cache_interleave_size: Number of consecutive tokens stored on one context-parallel
            rank before the following tokens are stored on the next rank.
        num_host_blocks: Pages of the host tier, including its null page. 0: no host tier.
        swap_options: Options of `SwapEngine`. Used only with a host tier.
        enable_caching: See `CacheOptions`.
        num_preallocate_tokens: See `CacheOptions`.
        clear: Which pages the worker zeroes, as in `Worker`. None: "fresh" if several groups
            share the pages and their dtypes differ, or they hold recurrent states, scales or packed
            values, whose bytes another group may read as NaN. Otherwise "zero".
        options: Other fields of `CacheOptions`, such as `eviction` and `host_write`.

    Returns:
        The cache.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range.
        MemoryError: The host does not have enough memory.

    Example:
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
        raise TypeError(f"plan is {shown(plan)}: expected a CachePlan, as returned by plan_cache")
    for name in _GIVEN_BY_PLAN:
        if name in options:
            raise TypeError(
                f"{name} is {shown(options[name])}: expected no {name}, because the plan sets it"
            )
    CacheOptions.check_names("kvcache.build", options)
    swap_options = _checked_swap_options(swap_options)
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"device is {shown(str(device))}: expected cpu, because torch {torch.__version__} finds no "
            "CUDA device"
        )
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
        **options,
    )
    tables = BlockTables.for_groups(
        plan.groups,
        max_num_reqs=max_num_reqs,
        max_model_len=plan.max_model_len,
        max_num_tokens=plan.max_num_batched_tokens,
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
    pages.contents = contents_of(
        pages, [each.parts for each in storages], cp_kv_cache_interleave_size, plan.groups
    )
    host_pages = pages.on_host(num_host_blocks) if num_host_blocks else None
    if clear is None:
        clear = "fresh" if _has_foreign_bytes(plan) else "zero"
    worker = Worker(by_page, tables, host_pages, clear=clear, **swap_options)
    if clear == "zero":
        pages.memory.zero_()  # memory that was never used may contain anything
    return KVCache(plan, manager, tables, storages, pages, host_pages, worker)


def _has_foreign_bytes(plan: CachePlan) -> bool:
    """Return whether a page may hold bytes of one group that are NaN when another group reads them."""
    kinds = {layer.dtype for layer in plan.layers}
    is_packed = "uint8" in kinds or any(
        layer.state_bytes or layer.scale_bytes_per_token for layer in plan.layers
    )
    return len(plan.groups) > 1 and (len(kinds) > 1 or is_packed)


def _num_slots(table: GroupTable) -> int:
    """Return how many slots were computed on the device, or the buffer size if the number is unknown."""
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
    """Return a view of the storage with the attention kernel's block size.

    Each page is divided into `ratio` equal parts. Each part holds the K and V of one kernel block.
    """
    if ratio == 1 or not storage.num_layers:
        return storage
    item = SCALE_BYTES if storage.kv_format else storage.dtype.itemsize
    if plan.layer_page_bytes % (ratio * item):
        raise ValueError(
            f"kernel_sizes split a block of group {group} into {ratio} kernel blocks, but a layer has "
            f"{plan.layer_page_bytes} bytes per page: expected a multiple of {ratio} elements of "
            f"{item} bytes; pass other kernel_sizes"
        )
    names = plan.groups[group].layers
    parts = [
        storage.pages.layer(i).view(-1, plan.layer_page_bytes // ratio) for i in range(len(names))
    ]
    spec = next(layer for layer in plan.layers if layer.name == names[0])
    found = KVStorage.over(
        Pages.over(parts),
        storage.block_size // ratio,
        storage.num_kv_heads,
        storage.token_sizes[0],
        v_head_size=storage.token_sizes[1],
        dtype=storage.dtype,
        backend=storage.backend,
        layout=storage.layout,
        scale_bytes_per_token=0 if spec.kv_format else spec.scale_bytes_per_token,
        kv_format=spec.kv_format,
        num_null_blocks=ratio,
    )
    found.scale_home = storage.scale_home
    return found
