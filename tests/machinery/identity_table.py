# SPDX-License-Identifier: Apache-2.0
"""Lists every field that describes KV, with the effect of a change: whether a store has another key,
and whether another engine's offer is refused.

`python -m tests.machinery.identity_table` prints the table. `test_identity.py`
enumerates the same classes and signatures and fails for a field without a row here.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kvcache import (
    CacheOptions,
    ContextParallel,
    GroupSpec,
    KVCacheManager,
    KVStorage,
    LayerSpec,
    Pages,
    Request,
    build,
    plan_cache,
)
from kvcache.allocator import PrefixCache
from kvcache.kinds import kind_class, make_kind
from kvcache.layouts import AttentionBackend
from kvcache.memory_plan import CachePlan
from kvcache.transfer import CacheDescription, StateDescription, StateTensor
from kvcache.worker.pages.memory import PageContents
from kvcache.worker.pages.parts import BlockParts
from kvcache_exchange.disaggregation import Connector, layouts_of_plan
from kvcache_exchange.disaggregation.layout import GroupLayout
from kvcache_exchange.disaggregation.offer import RankAddress
from kvcache_exchange.disaggregation.steps import RankHandshake
from kvcache_exchange.identity import KVIdentity
from kvcache_exchange.store import Share, fingerprint

LAYER = {
    "name": "a", "kind": "full_attention", "block_size": 16, "num_kv_heads": 2, "head_size": 64,
}  # fmt: skip
CP = ContextParallel(dcp_world_size=2)


class SilentRank:
    """A rank that transfers nothing."""

    def __init__(self, layouts, rank):
        addresses = tuple((0,) * each.num_regions(rank) for each in layouts)
        self.handshake = RankHandshake(layouts, RankAddress("none", "", addresses, 0))

    def begin(self, step):
        pass


@dataclass
class Made:
    """An engine: the fingerprint of its blocks in a store, and its connector if it has one."""

    key: bytes | None = None
    connector: Connector | None = None
    manager: KVCacheManager | None = None

    @classmethod
    def of(cls, key, manager, layouts, model=None):
        if not layouts:
            return cls(key)
        ranks = range(layouts[0].description.world_size)
        ranks = [SilentRank(tuple(layouts), each) for each in ranks]
        name = layouts[0].description.engine_id
        return cls(key, Connector(manager, ranks, engine_id=name, model=model), manager)

    def refuses(self, sender):
        """Return the reason why this engine refuses the offers of another engine, or None."""
        request = request_of(sender.manager, "sent", 70)
        sender.manager.step(new=[request])
        offer = json.loads(json.dumps(sender.connector.publish(request)))
        try:
            found = self.connector.match(request_of(self.manager, "asked", 72), offer)
        except ValueError as error:
            return str(error)
        assert found > 0
        return None


def request_of(manager, name, num_tokens):
    """Return a request, with hashes if an engine has to supply them."""
    cache, hashes = manager.cache, None
    if cache.hash_algorithm.startswith("engine:"):
        hashes = [bytes([i] * cache.hash_bytes) for i in range(num_tokens // cache.hash_block_size)]
    return Request(name, range(num_tokens), block_hashes=hashes)


class Identified(Made):
    """An engine of which only the identity is known."""

    def refuses(self, sender):
        """Return the reason why this identity does not accept another one, or None."""
        try:
            self.connector.check(sender.connector, "e")
        except ValueError as error:
            return str(error)
        return None


def of_layer(plan=None, made=None, names=("a", "b"), scales=None, **layer):
    """Return an engine with a cache of two equal layers made by `kvcache.build`."""
    own = {**LAYER, **layer}
    given = {"enable_events": True, "max_num_reqs": 4, **(made or {})}
    names = (own["name"], names[1])
    specs = [LayerSpec(**{**own, "name": name}) for name in names]
    plan = plan_cache(specs, **{"budget_bytes": 2**22, "max_model_len": 256, **(plan or {})})
    cache = build(plan, **given)
    if scales is not None:
        cache.storages[0].set_scales(*(scale * torch.ones(2, 1) for scale in scales))
    key = fingerprint(cache.manager, cache.pages, model="m")
    if not any(kind_class(group.kind).pages.is_transferable for group in plan.groups):
        return Made(key)
    storages = KVStorage.for_plan(plan, layout=given.get("layout", "NHD"))
    if scales is not None:
        storages = cache.storages
    states = {
        number: [StateTensor(sections=[(group.state_bytes // 4, 1)], dtype="float32")]
        for number, group in enumerate(specs[:1])
        if group.state_bytes
    }
    layouts = layouts_of_plan(plan, storages, engine_id="e", states=states)
    return Made.of(key, cache.manager, layouts)


def of_plan(**plan):
    return of_layer(plan=plan)


def of_build(**options):
    return of_layer(made=options)


def of_kernels(**options):
    """Like `of_build`, with blocks of 32 tokens."""
    return of_layer(made=options, block_size=32)


def of_windows(**options):
    """Like `of_build`, with sliding windows."""
    return of_layer(made=options, kind="sliding_window", options={"window": 32})


def of_group(context_parallel=None, interleave=1, **group):
    """Return an engine with one group over fixed pages."""
    spec = GroupSpec(**{"kind": "full_attention", "block_size": 16, **group})
    manager = KVCacheManager.for_groups([spec], 99, 256, context_parallel=context_parallel)
    pages = Pages.allocate(99, [[4096]])
    key = fingerprint(
        manager, pages, model="m", contents="bytes", cp_kv_cache_interleave_size=interleave
    )
    kind = kind_class(spec.kind).pages
    if not (spec.transferred and kind.is_transferable):
        return Made(key)
    size = 1 if spec.replicated else manager.cache.context_parallel.world_size
    sizes = {"engine_id": "e", "num_layers": 1, "cp_world_size": size}
    if kind.has_slots:
        description = CacheDescription(
            **sizes, total_num_kv_heads=2, head_size=64, block_size=spec.block_size
        )
    else:
        description = StateDescription(**sizes, tensors=[StateTensor(sections=[(8, 1)])])
    return Made.of(key, manager, [GroupLayout(spec.layers[:1] or ("a",), description, 1, 99)])


def of_storage(num_blocks=9, **storage):
    """Return an engine over the pages of a separate storage."""
    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "num_layers": 2, **storage}
    manager = KVCacheManager(16, 9, 128)
    made = KVStorage(num_blocks, **sizes)
    num_bytes = made.scale_cache(0).shape[2] if made.has_scales else 0
    description = CacheDescription(
        engine_id="e",
        num_layers=made.num_layers,
        total_num_kv_heads=made.num_kv_heads,
        head_size=made.head_size,
        v_head_size=made.v_head_size,
        block_size=16,
        dtype=made.dtype,
        memory_order=made.memory_order,
        scale_bytes_per_head=num_bytes // made.num_kv_heads,
        kv_format=made.kv_format.name if made.kv_format else "",
    )
    layout = GroupLayout(tuple("ab"[: made.num_layers]), description, 1, 9)
    return Made.of(fingerprint(manager, made.pages, model="m"), manager, [layout])


def of_backend(storage=None, **backend):
    described = {"name": "X", "dims": ("block", "kv", "token", "head", "element"), **backend}
    return of_storage(backend=AttentionBackend(**described), **(storage or {}))


def of_identity(**arguments):
    """Return an engine after changes to the identity arguments that a caller passes."""
    manager = KVCacheManager.for_groups(
        [GroupSpec("full_attention", 16)], 99, 256, context_parallel=CP
    )
    given = {
        "model": "m", "contents": "k and v", "cp_kv_cache_interleave_size": 1,
        "pages": Pages.allocate(99, [[4096]]), "manager": manager, **arguments,
    }  # fmt: skip
    model = {"name": given["model"]}
    key = fingerprint(given.pop("manager"), given.pop("pages"), **given)
    return Made.of(key, manager, [of_description(cp_world_size=2).layout], model)


def of_share(**share):
    """Return the engine of a rank that holds this share of blocks with states."""
    given = {
        "layers": (0, 1),
        "num_layers": 2,
        "heads": (0, 1),
        "num_heads": 2,
        "tp": (0, 2),
        **share,
    }
    groups = [GroupSpec("full_attention", 16), GroupSpec("recurrent", 16)]
    manager = KVCacheManager.for_groups(groups, 9, 64)
    pages = Pages.allocate(9, [[4096]])
    return Made(fingerprint(manager, pages, model="m", contents="bytes", rank=Share(**given)))


def of_version(model_version=None):
    """Return an engine whose weights have changed."""
    manager = KVCacheManager(16, 9, 128)
    if model_version is not None:
        manager.cache.start_epoch(model_version)
    made = KVStorage(9, 16, 2, 8)
    key = fingerprint(manager, made.pages, model="m")
    return Made.of(key, manager, [of_description().layout])


def of_value(**changes):
    """Return the engine with this `KVIdentity` of its own, if all of its values were given."""
    given = {
        "model": {"name": "m"},
        "groups": ({"kind": "full_attention", "options": {}, "transferred": True},),
        "hashing": {"algorithm": "a", "seed": "s", "bytes": 32}, **changes,
    }  # fmt: skip
    identity = KVIdentity(**given)
    return Identified(identity.digest, identity)


def of_description(**changes):
    """Return an engine with this description of its pages. A store knows nothing of it."""
    sizes = {"num_layers": 2, "total_num_kv_heads": 2, "head_size": 8, "block_size": 16}
    description = CacheDescription(engine_id="e", **{**sizes, **changes})
    return of_layout(layers=tuple("abcd"[: description.num_layers]), description=description)


def of_states(tensor=None, **changes):
    """Like `of_description`, for a group of states."""
    given = {"sections": [(8, 4)], "row_size": 3, **(tensor or {})}
    sizes = {"engine_id": "e", "num_layers": 2, "tensors": [StateTensor(**given)]}
    description = StateDescription(**{**sizes, **changes})
    return of_layout(layers=tuple("abcd"[: description.num_layers]), description=description)


def of_tensor(**tensor):
    return of_states(tensor)


def of_layout(**changes):
    """Return an engine with this layout of its only group."""
    if "description" not in changes:
        changes["description"] = of_description().layout.description
    layout = GroupLayout(
        **{"layers": ("a", "b"), "pages_per_block": 1, "num_blocks": 99, **changes}
    )
    spec = GroupSpec("recurrent" if layout.is_state else "full_attention", 16)
    cp = None
    if not layout.is_state:
        spec = replace(spec, block_size=layout.block_size // layout.description.cp_world_size)
        cp = ContextParallel(dcp_world_size=layout.description.cp_world_size)
    manager = KVCacheManager.for_groups([spec], 99, 256, context_parallel=cp)
    made = Made.of(None, manager, [layout])
    made.layout = layout
    return made


@dataclass(frozen=True)
class Row:
    """Two engines that differ in one field only.

    `same` states why their keys in a store are equal, and `ACCEPTED` why one accepts the other's
    offers. Without `changed`, `same` names another field that distinguishes the engines, or states
    why the field cannot be tested.
    """

    of: Any
    changed: dict[str, Any] | None = None
    base: dict[str, Any] | None = None
    same: str = ""

    def engines(self) -> tuple[Made, Made]:
        base = self.base or {}
        return self.of(**base), self.of(**{**base, **self.changed})

    @property
    def verdict(self) -> str:
        if self.changed is None:
            return f"elsewhere: {self.same}"
        return f"same key: {self.same}" if self.same else "another key"


FP8 = {"dtype": "float8_e4m3fn", "scales": (0.02, 1.0)}
WINDOW = {"kind": "sliding_window", "options": {"window": 32}}
STATE = {
    "kind": "recurrent", "num_kv_heads": 0, "head_size": 0, "dtype": "float32", "state_bytes": 4096,
}  # fmt: skip
REFUSED = "other versions are refused when a description is created"
OF_GROUPS = "checked against the manager's groups, whose fields are rows of their own"
HOW_MANY = "affects the engine's memory or time, not the content of a block"
WHEN = "affects when blocks are kept, moved or reported, not their content"
STEPS = "distributes tokens over steps; the content of blocks is the same"


def rows(prefix: str, of: Any, /, base=None, same="", **changed: object) -> dict[str, Row]:
    """Return a row for each field of a class or parameter of a function."""
    return {f"{prefix}.{name}": Row(of, {name: x}, base, same) for name, x in changed.items()}


TABLE: dict[str, Row] = {
    **rows("LayerSpec", of_layer, name="c", block_size=32, num_kv_heads=4, head_size=32,
        v_head_size=32, dtype="float16", scale_bytes_per_token=16, transferred=False,
        drafts=True, kv_format="int8_token_head"),
    **rows("LayerSpec", of_layer, options={"window": 48}, base=WINDOW),
    **rows("LayerSpec", of_layer, replicated=True, base={"plan": {"context_parallel": CP}}),
    **rows("LayerSpec", of_layer, state_bytes=8192, base=STATE),
    **rows("LayerSpec", of_layer, is_mla=True, base={"num_kv_heads": 1, "head_size": 32,
        "v_head_size": 16}),
    **rows("LayerSpec", of_layer, cached=False, base={"transferred": False}),
    **rows("GroupSpec", of_group, kind="recurrent", block_size=8, cached=False,
        transferred=False, drafts=True),
    **rows("GroupSpec", of_group, options={"window": 48}, base=WINDOW),
    **rows("GroupSpec", of_group, replicated=True, base={"context_parallel": CP}),
    **rows("GroupSpec", of_group, layers=("b", "a"), base={"layers": ("a", "b")}),
    **rows("CachePlan", of_plan, layer_page_bytes=16384, context_parallel=CP),
    **rows("CachePlan", of_plan, max_model_len=128, same=HOW_MANY),
    **rows("CachePlan", of_plan, max_num_batched_tokens=32, same=STEPS),
    **rows("AttentionBackend", of_backend, name="Y", same="only the memory orders matter"),
    **rows("AttentionBackend", of_backend, dims=("block", "token", "kv", "head", "element"),
        nhd=("block", "token", "kv", "head", "element")),
    **rows("AttentionBackend", of_backend, hnd=("block", "head", "kv", "token", "element"),
        base={"storage": {"layout": "HND"}}),
    **rows("AttentionBackend", of_backend,
        nhd_cross_layers=("block", "layer", "token", "kv", "head", "element"),
        base={
            "nhd_cross_layers": ("block", "layer", "kv", "token", "head", "element"),
            "storage": {"cross_layers": True},
        }),
    **rows("AttentionBackend", of_backend,
        hnd_cross_layers=("block", "head", "layer", "kv", "token", "element"),
        base={
            "hnd_cross_layers": ("block", "layer", "kv", "head", "token", "element"),
            "storage": {"cross_layers": True, "layout": "HND"},
        }),
    **rows("AttentionBackend", of_backend, unequal_head_sizes=True,
        base={"dims": ("block", "token", "head", "element")}),
    **rows("KVStorage", of_storage, num_blocks=20, same=HOW_MANY),
    **rows("KVStorage", of_storage, block_size=8, head_size=16, v_head_size=4, num_layers=1,
        dtype="float16", layout="HND", scale_bytes_per_token=8, kv_format="int8_token_head"),
    **rows("KVStorage", of_storage, backend="FLASH_ATTN_DIFFKV", base={"backend": "FLASHINFER"}),
    **rows("KVStorage", of_storage, cross_layers=True, base={"backend": "TRITON_ATTN",
        "layout": "HND"}),
    **rows("build", of_build, max_num_reqs=8, num_host_blocks=9, num_preallocate_tokens=0,
        same=HOW_MANY),
    **rows("build", of_build, backend="FLASH_ATTN_DIFFKV", layout="HND", enable_caching=False),
    **rows("build", of_kernels, kernel_sizes=[16]),
    **rows("build", of_build, num_speculative_tokens=3, same=STEPS),
    **rows("build", of_build, clear="fresh", same="only bytes that no token owns are cleared"),
    **rows("CacheOptions", of_build, hash_block_size=8, hash_seed="s",
        hash_algorithm="xxh3_128_cbor"),
    **rows("CacheOptions", of_build, watermark=0.1, same=HOW_MANY),
    **rows("CacheOptions", of_build, fence_frees=True, engine_copies_states=True, prefault=False,
        eviction="learned", same=WHEN),
    **rows("CacheOptions", of_build, enable_events=False, same="a tier requires events"),
    **rows("CacheOptions", of_build, explain_misses=1, same="only affects statistics"),
    **rows("CacheOptions", of_build, hash_bytes=16, base={"hash_algorithm": "engine:x",
        "hash_bytes": 32}),
    **rows("CacheOptions", of_build, num_hash_lookahead_tokens=1,
        base={"hash_algorithm": "engine:x"}),
    **rows("CacheOptions", of_windows, retention_interval=0, same=WHEN),
    **rows("CacheOptions", of_build, eviction_options={}, base={"eviction": "learned"}, same=WHEN),
    **rows("CacheOptions", of_build, host_eviction="learned", base={"num_host_blocks": 9,
        "eviction": "learned"}, same=WHEN),
    **rows("CacheOptions", of_build, host_eviction_options={}, base={"num_host_blocks": 9,
        "host_eviction": "lru"}, same=WHEN),
    **rows("CacheOptions", of_build, host_write="through", base={"num_host_blocks": 9}, same=WHEN),
    **rows("CacheOptions", of_build, min_gain_to_write=0.1, base={"num_host_blocks": 9,
        "eviction": "learned", "host_eviction": "learned"}, same=WHEN),
    **rows("fingerprint", of_identity, pages=Pages.allocate(9, [[2048, 2048]]), model="n",
        rank="tp 1 of 2", contents="v and k", cp_kv_cache_interleave_size=2),
    **rows("start_epoch", of_version, model_version="step 1"),
    **rows("Share", of_share, layers=(1, 2), num_layers=3, heads=(1, 2), num_heads=3,
        cp_world_size=2, tp=(1, 2)),
    **rows("Share", of_share, cp_rank=1, base={"cp_world_size": 2}),
    **rows("KVIdentity", of_value, model={"name": "n"}, version="step 1", groups=(),
        hashing={"algorithm": "b", "seed": "s", "bytes": 32}, lookahead=1, part={"rank": "1"}),
    **rows("CacheDescription", of_description, tp_size=2, pp_size=2, stages=[(1, 1), (1, 2)],
        num_layers=4, total_num_kv_heads=4, cp_world_size=2, head_size=16, block_size=32,
        v_head_size=4, dtype="float16", memory_order=("block", "kv", "head", "token", "element"),
        scale_bytes_per_head=4, kv_format="int8_token_head"),
    **rows("CacheDescription", of_description, cp_interleave=4, base={"cp_world_size": 2}),
    **rows("CacheDescription", of_description, page_stride=4096, base={"memory_order": ("layer",
        "block", "kv", "token", "head", "element")}),
    **rows("CacheDescription", of_description, k_scale=[[1.0], [2.0]],
        v_scale=[[1.0, 1.0], [1.0, 2.0]], base={"dtype": "float8_e4m3fn"}),
    **rows("StateDescription", of_states, num_layers=4, tp_size=2, pp_size=2, cp_world_size=2,
        stages=[(1, 1), (1, 2)], page_stride=4096),
    **rows("StateTensor", of_tensor, sections=[(4, 8)], row_size=4, channels_last=True,
        dtype="float32"),
    **rows("GroupLayout", of_layout, layers=("a", "c"), pages_per_block=2, num_blocks=120,
        interior="vec"),
    "LayerSpec.kind": Row(of_layer, WINDOW),
    "options of sliding_window.window": Row(of_group, {"options": {"window": 48}}, WINDOW),
    "options of chunked_local.chunk_size": Row( of_group, {"options": {"chunk_size": 64}},
        {"kind": "chunked_local", "options": {"chunk_size": 32}},),
    "options of circular_window.window": Row( of_group, {"options": {"window": 24,
        "buffer": 64}}, {"kind": "circular_window", "options": {"window": 32, "buffer": 64},
        "cached": False},),
    "options of circular_window.buffer": Row( of_group, {"options": {"window": 32,
        "buffer": 96}}, {"kind": "circular_window", "options": {"window": 32, "buffer": 64},
        "cached": False},),
    "options of recurrent.num_speculative_blocks": Row( of_group,
        {"options": {"num_speculative_blocks": 2}}, {"kind": "recurrent"}),
    "ContextParallel.pcp_world_size": Row( of_group,
        {"context_parallel": ContextParallel(pcp_world_size=2)}),
    "ContextParallel.pcp_rank": Row( of_group,
        {"context_parallel": ContextParallel(pcp_world_size=2, pcp_rank=1)},
        {"context_parallel": ContextParallel(pcp_world_size=2)},),
    "ContextParallel.dcp_world_size": Row(of_group, {"context_parallel": CP}),
    "ContextParallel.dcp_rank": Row( of_group,
        {"context_parallel": ContextParallel(dcp_world_size=2, dcp_rank=1)},
        {"context_parallel": CP},),
    "CachePlan.layers": Row(of_layer, {"names": ("a", "c")}),
    "CachePlan.groups": Row(of_layer, WINDOW),
    "CachePlan.page_bytes": Row(of_plan, {"layer_page_bytes": 16384}),
    "CachePlan.num_pages": Row(of_plan, {"budget_bytes": 2**23}, same=HOW_MANY),
    "CachePlan.padding_bytes": Row(of_plan, {"layer_page_bytes": 16384}),
    "CachePlan.max_encoder_tokens": Row( of_layer, {"plan": {"max_encoder_tokens": 64}},
        {"kind": "cross_attention"}, HOW_MANY),
    "KVStorage.num_kv_heads": Row(of_storage, {"num_kv_heads": 4, "head_size": 4}),
    "build.cp_kv_cache_interleave_size": Row( of_layer,
        {"made": {"cp_kv_cache_interleave_size": 4}}, {"plan": {"context_parallel": CP}},),
    "build.swap_options": Row(of_build, {"num_host_blocks": 9, "swap_options": {}}, same=WHEN),
    "KVStorage.set_scales.k_scale": Row(of_layer, {"scales": (0.5, 1.0)}, FP8),
    "KVStorage.set_scales.v_scale": Row(of_layer, {"scales": (0.02, 0.5)}, FP8),
    "BlockParts.blocks_per_page": Row(of_kernels, {"kernel_sizes": [16]}),
    "BlockParts.views": Row(of_storage, {"dtype": "float16"}),
    "PageContents.storages": Row(of_storage, {"layout": "HND"}),
    "PageContents.cp_interleave": Row( of_layer, {"made": {"cp_kv_cache_interleave_size": 4}},
        {"plan": {"context_parallel": CP}}),
    "CacheDescription.is_mla": Row( of_description, {"is_mla": True, "head_size": 16,
        "v_head_size": 0}, {"total_num_kv_heads": 1, "head_size": 16, "v_head_size": 0},),
    "StateDescription.tensors": Row(of_tensor, {"sections": [(8, 4), (2, 1)]}),
    "GroupLayout.description": Row(of_description, {"head_size": 16}),
    "CachePlan.examples": Row(of_plan, same="formats of groups without layers on this rank"),
    "KVStorage.device": Row(of_storage, same="the host gets the same bytes from every device"),
    "build.plan": Row(of_layer, same="covered by the fields of CachePlan"),
    "build.device": Row(of_build, same="the host gets the same bytes from every device"),
    "fingerprint.manager": Row(of_identity, same="covered by the groups and options above"),
    "PageContents.groups": Row(of_storage, same=OF_GROUPS),
    "CacheDescription.engine_id": Row(of_description, same="a name; all engines share one store"),
    "CacheDescription.hash_algorithm": Row(of_description,
        same="informs the caller; the identity has the algorithm of the manager"),
    "CacheDescription.version": Row(of_description, same=REFUSED),
    "StateDescription.engine_id": Row(of_states, same="a name"),
    "StateDescription.version": Row(of_states, same=REFUSED),
    "GroupLayout.spec": Row(of_layout, same=OF_GROUPS),
}  # fmt: skip

CONVERTED = "a transfer plan converts between the two"
OWN = "each engine has its own; the KV of a token is the same"
HITS = "it decides which blocks an engine caches, not their content"
BY_LAYOUT = "offers contain the layout of the pages"


def names(prefix: str, fields_: str) -> list[str]:
    return [f"{prefix}.{name}" for name in fields_.split()]


# Fields in which an engine may differ from another one whose offers it accepts.
ACCEPTED: dict[str, str] = {
    **dict.fromkeys([
        *names("LayerSpec", "block_size replicated"),
        *names("GroupSpec", "block_size replicated"),
        *(f"ContextParallel.{field.name}" for field in fields(ContextParallel)),
        *names("CachePlan", "page_bytes layer_page_bytes padding_bytes context_parallel"),
        *names("AttentionBackend", "dims nhd hnd nhd_cross_layers hnd_cross_layers"),
        *names("KVStorage", "block_size backend layout cross_layers"),
        *names("build", "backend layout cp_kv_cache_interleave_size"),
        *names("PageContents", "storages cp_interleave"),
        *names("CacheDescription", "tp_size pp_size stages cp_world_size cp_interleave block_size"),
        *names("CacheDescription", "memory_order page_stride"),
        *names("StateDescription", "tp_size pp_size stages cp_world_size page_stride"),
        *("StateTensor.channels_last", "GroupLayout.pages_per_block"),
    ], CONVERTED),
    **dict.fromkeys([
        *names("CachePlan", "num_pages max_model_len max_num_batched_tokens"),
        *("AttentionBackend.name", "KVStorage.num_blocks", "GroupLayout.num_blocks"),
        *names("build", "max_num_reqs num_speculative_tokens num_host_blocks swap_options clear"),
        *names("build", "num_preallocate_tokens kernel_sizes"),
        "BlockParts.blocks_per_page",
        *names("CacheOptions", "watermark fence_frees engine_copies_states enable_events prefault"),
        "CacheOptions.explain_misses",
    ], OWN),
    **dict.fromkeys([
        *("LayerSpec.drafts", "GroupSpec.cached", "GroupSpec.drafts", "build.enable_caching"),
        *names("CacheOptions", "hash_block_size retention_interval eviction eviction_options"),
        *names("CacheOptions", "host_eviction host_eviction_options host_write min_gain_to_write"),
    ], HITS),
    **dict.fromkeys([
        *names("fingerprint", "pages rank contents cp_kv_cache_interleave_size"),
        "KVIdentity.part",
    ], BY_LAYOUT),
}  # fmt: skip

WITHOUT_STORE = (of_description, of_states, of_tensor, of_layout)
TABLE |= {
    name: replace(row, same="a store knows the pages instead")
    for name, row in TABLE.items()
    if row.of in WITHOUT_STORE and row.changed is not None
}

KINDS = {
    "full_attention": {},
    "sliding_window": {"window": 8},
    "chunked_local": {"chunk_size": 8},
    "circular_window": {"window": 8, "buffer": 16},
    "recurrent": {},
    "cross_attention": {},
}


def walked() -> list[str]:
    """Return every field that must have a row."""
    classes = (LayerSpec, GroupSpec, ContextParallel, CachePlan, AttentionBackend, CacheDescription)
    classes += (StateDescription, StateTensor, GroupLayout, Share, KVIdentity)
    found = [f"{each.__name__}.{field.name}" for each in classes for field in fields(each)]
    for each in (BlockParts, PageContents):
        found += [f"{each.__name__}.{name}" for name in each._fields]
    for prefix, function in (
        ("KVStorage.set_scales", KVStorage.set_scales),
        ("start_epoch", PrefixCache.start_epoch),
    ):
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        found += [f"{prefix}.{name}" for name in names]
    in_build = inspect.signature(build).parameters
    found += [f"build.{name}" for name in in_build if name != "options"]
    found += [
        f"CacheOptions.{field.name}" for field in fields(CacheOptions) if field.name not in in_build
    ]
    found += [f"KVStorage.{name}" for name in inspect.signature(KVStorage).parameters]
    found += [f"fingerprint.{name}" for name in inspect.signature(fingerprint).parameters]
    for kind, options in KINDS.items():
        signature = inspect.signature(type(make_kind(kind, options)).__init__)
        keywords = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
        found += [f"options of {kind}.{name}" for name in keywords]
    return found


def main() -> None:
    width = max(map(len, TABLE))
    for name, row in TABLE.items():
        offers = f"offers accepted: {ACCEPTED[name]}" if name in ACCEPTED else "offers refused"
        print(f"{name:{width}}  {row.verdict}" + (f"; {offers}" if row.changed else ""))
    print(len(TABLE), "fields")


if __name__ == "__main__":
    main()
