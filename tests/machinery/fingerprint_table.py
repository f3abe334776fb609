# SPDX-License-Identifier: Apache-2.0
"""Lists every field of specs, layouts, plans and parallel sizes with its effect on a store's
fingerprint.

`python -m tests.machinery.fingerprint_table` prints the table. `tests/sources/test_fingerprint.py`
enumerates the same classes and signatures and fails for a field without a row here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import Any

from kvcache import (
    CacheOptions,
    ContextParallel,
    GroupSpec,
    KVCacheManager,
    KVStorage,
    LayerSpec,
    Pages,
    build,
    plan_cache,
)
from kvcache.kinds import make_kind
from kvcache.layouts import AttentionBackend
from kvcache.memory_plan import CachePlan
from kvcache.sources.store import fingerprint
from kvcache.transfer import CacheDescription

LAYER = {
    "name": "a", "kind": "full_attention", "block_size": 16, "num_kv_heads": 2, "head_size": 64,
}  # fmt: skip
CP = ContextParallel(dcp_world_size=2)


def of_layer(plan=None, made=None, names=("a", "b"), **layer):
    """Return the fingerprint of a cache of two equal layers made by `kvcache.build`."""
    own = {**LAYER, **layer}
    given = {"enable_events": True, "max_num_reqs": 4, **(made or {})}
    names = (own["name"], names[1])
    specs = [LayerSpec(**{**own, "name": name}) for name in names]
    plan = plan_cache(specs, **{"budget_bytes": 2**22, "max_model_len": 256, **(plan or {})})
    cache = build(plan, **given)
    return fingerprint(cache.manager, cache.pages, model="m")


def of_plan(**plan):
    return of_layer(plan=plan)


def of_build(**options):
    return of_layer(made=options)


def of_kernels(**options):
    """Like `of_build`, with blocks of 32 tokens."""
    return of_layer(made=options, block_size=32)


def of_group(context_parallel=None, interleave=1, **group):
    """Return the fingerprint of a manager with one group over fixed pages."""
    spec = GroupSpec(**{"kind": "full_attention", "block_size": 16, **group})
    manager = KVCacheManager.for_groups([spec], 9, 256, context_parallel=context_parallel)
    pages = Pages.allocate(9, [[4096]])
    return fingerprint(
        manager, pages, model="m", contents="bytes", cp_kv_cache_interleave_size=interleave
    )


def of_storage(num_blocks=9, **storage):
    """Return the fingerprint of a manager over the pages of a separate storage."""
    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "num_layers": 2, **storage}
    manager = KVCacheManager(16, 9, 64)
    return fingerprint(manager, KVStorage(num_blocks, **sizes).pages, model="m")


def of_backend(storage=None, **backend):
    described = {"name": "X", "dims": ("block", "kv", "token", "head", "element"), **backend}
    return of_storage(backend=AttentionBackend(**described), **(storage or {}))


def of_identity(**arguments):
    """Return the fingerprint after changes to the identity arguments that a caller passes."""
    manager = KVCacheManager.for_groups(
        [GroupSpec("full_attention", 16)], 9, 256, context_parallel=CP
    )
    given = {
        "model": "m", "contents": "k and v", "cp_kv_cache_interleave_size": 1,
        "pages": Pages.allocate(9, [[4096]]), "manager": manager, **arguments,
    }  # fmt: skip
    return fingerprint(given.pop("manager"), given.pop("pages"), **given)


def of_description(**_):
    """Fail, because no fingerprint is computed from a `CacheDescription`."""


@dataclass(frozen=True)
class Row:
    """Two engines that differ in one field only. `same` states why their fingerprints are equal.

    Without `changed`, `same` names another field that distinguishes the engines, or states why the
    field cannot be tested.
    """

    of: Any
    changed: dict[str, Any] | None = None
    base: dict[str, Any] | None = None
    same: str = ""

    def fingerprints(self) -> tuple[bytes, bytes]:
        base = self.base or {}
        return self.of(**base), self.of(**{**base, **self.changed})

    @property
    def verdict(self) -> str:
        if self.changed is None:
            return f"elsewhere: {self.same}"
        return f"irrelevant: {self.same}" if self.same else "another fingerprint"


WINDOW = {"kind": "sliding_window", "options": {"window": 32}}
STATE = {
    "kind": "recurrent", "num_kv_heads": 0, "head_size": 0, "dtype": "float32", "state_bytes": 4096,
}  # fmt: skip
HOW_MANY = "affects the engine's memory or time, not the content of a block"
WHEN = "affects when blocks are kept, moved or reported, not their content"
STEPS = "distributes tokens over steps; the content of blocks is the same"
BY_RANK = "covered by the caller's text `rank`: a manager has no data about other ranks"
BY_SPEC = "covered by LayerSpec and GroupSpec: stores create no CacheDescription"

TABLE: dict[str, Row] = {
    "LayerSpec.name": Row(of_layer, {"name": "c"}),
    "LayerSpec.kind": Row(of_layer, WINDOW),
    "LayerSpec.block_size": Row(of_layer, {"block_size": 32}),
    "LayerSpec.num_kv_heads": Row(of_layer, {"num_kv_heads": 4}),
    "LayerSpec.head_size": Row(of_layer, {"head_size": 32}),
    "LayerSpec.v_head_size": Row(of_layer, {"v_head_size": 32}),
    "LayerSpec.dtype": Row(of_layer, {"dtype": "float16"}),
    "LayerSpec.options": Row(of_layer, {"options": {"window": 48}}, WINDOW),
    "LayerSpec.replicated": Row(
        of_layer, {"replicated": True}, {"plan": {"context_parallel": CP}}
    ),
    "LayerSpec.state_bytes": Row(of_layer, {"state_bytes": 8192}, STATE),
    "LayerSpec.scale_bytes_per_token": Row(of_layer, {"scale_bytes_per_token": 16}),
    "LayerSpec.is_mla": Row(
        of_layer, {"is_mla": True}, {"num_kv_heads": 1, "head_size": 32, "v_head_size": 16}
    ),
    "LayerSpec.cached": Row(of_layer, {"cached": False}, {"transferred": False}),
    "LayerSpec.transferred": Row(of_layer, {"transferred": False}),
    "LayerSpec.drafts": Row(of_layer, {"drafts": True}),
    "GroupSpec.kind": Row(of_group, {"kind": "recurrent"}),
    "GroupSpec.block_size": Row(of_group, {"block_size": 8}),
    "GroupSpec.options": Row(of_group, {"options": {"window": 48}}, WINDOW),
    "GroupSpec.replicated": Row(of_group, {"replicated": True}, {"context_parallel": CP}),
    "GroupSpec.layers": Row(of_group, {"layers": ("b", "a")}, {"layers": ("a", "b")}),
    "GroupSpec.cached": Row(of_group, {"cached": False}),
    "GroupSpec.transferred": Row(of_group, {"transferred": False}),
    "GroupSpec.drafts": Row(of_group, {"drafts": True}),
    "options of sliding_window.window": Row(of_group, {"options": {"window": 48}}, WINDOW),
    "options of chunked_local.chunk_size": Row(
        of_group, {"options": {"chunk_size": 64}},
        {"kind": "chunked_local", "options": {"chunk_size": 32}},
    ),
    "options of circular_window.window": Row(
        of_group, {"options": {"window": 24, "buffer": 64}},
        {"kind": "circular_window", "options": {"window": 32, "buffer": 64}, "cached": False},
    ),
    "options of circular_window.buffer": Row(
        of_group, {"options": {"window": 32, "buffer": 96}},
        {"kind": "circular_window", "options": {"window": 32, "buffer": 64}, "cached": False},
    ),
    "options of recurrent.num_speculative_blocks": Row(
        of_group, {"options": {"num_speculative_blocks": 2}}, {"kind": "recurrent"}
    ),
    "ContextParallel.pcp_world_size": Row(
        of_group, {"context_parallel": ContextParallel(pcp_world_size=2)}
    ),
    "ContextParallel.pcp_rank": Row(
        of_group, {"context_parallel": ContextParallel(pcp_world_size=2, pcp_rank=1)},
        {"context_parallel": ContextParallel(pcp_world_size=2)},
    ),
    "ContextParallel.dcp_world_size": Row(of_group, {"context_parallel": CP}),
    "ContextParallel.dcp_rank": Row(
        of_group, {"context_parallel": ContextParallel(dcp_world_size=2, dcp_rank=1)},
        {"context_parallel": CP},
    ),
    "CachePlan.layers": Row(of_layer, {"names": ("a", "c")}),
    "CachePlan.groups": Row(of_layer, WINDOW),
    "CachePlan.page_bytes": Row(of_plan, {"layer_page_bytes": 16384}),
    "CachePlan.num_pages": Row(of_plan, {"budget_bytes": 2**23}, same=HOW_MANY),
    "CachePlan.layer_page_bytes": Row(of_plan, {"layer_page_bytes": 16384}),
    "CachePlan.padding_bytes": Row(of_plan, {"layer_page_bytes": 16384}),
    "CachePlan.max_model_len": Row(of_plan, {"max_model_len": 128}, same=HOW_MANY),
    "CachePlan.max_num_batched_tokens": Row(of_plan, {"max_num_batched_tokens": 32}, same=STEPS),
    "CachePlan.context_parallel": Row(of_plan, {"context_parallel": CP}),
    "CachePlan.max_encoder_tokens": Row(
        of_layer, {"plan": {"max_encoder_tokens": 64}}, {"kind": "cross_attention"}, HOW_MANY
    ),
    "AttentionBackend.name": Row(of_backend, {"name": "Y"}, same="only the memory orders matter"),
    "AttentionBackend.dims": Row(
        of_backend, {"dims": ("block", "token", "kv", "head", "element")}
    ),
    "AttentionBackend.nhd": Row(of_backend, {"nhd": ("block", "token", "kv", "head", "element")}),
    "AttentionBackend.hnd": Row(
        of_backend, {"hnd": ("block", "head", "kv", "token", "element")},
        {"storage": {"layout": "HND"}},
    ),
    "AttentionBackend.nhd_cross_layers": Row(
        of_backend, {"nhd_cross_layers": ("block", "layer", "token", "kv", "head", "element")},
        {"nhd_cross_layers": ("block", "layer", "kv", "token", "head", "element"),
         "storage": {"cross_layers": True}},
    ),
    "AttentionBackend.hnd_cross_layers": Row(
        of_backend, {"hnd_cross_layers": ("block", "head", "layer", "kv", "token", "element")},
        {"hnd_cross_layers": ("block", "layer", "kv", "head", "token", "element"),
         "storage": {"cross_layers": True, "layout": "HND"}},
    ),
    "AttentionBackend.unequal_head_sizes": Row(
        of_backend, {"unequal_head_sizes": True}, {"dims": ("block", "token", "head", "element")}
    ),
    "KVStorage.num_blocks": Row(of_storage, {"num_blocks": 20}, same=HOW_MANY),
    "KVStorage.block_size": Row(of_storage, {"block_size": 8}),
    "KVStorage.num_kv_heads": Row(of_storage, {"num_kv_heads": 4, "head_size": 4}),
    "KVStorage.head_size": Row(of_storage, {"head_size": 16}),
    "KVStorage.v_head_size": Row(of_storage, {"v_head_size": 4}),
    "KVStorage.num_layers": Row(of_storage, {"num_layers": 1}),
    "KVStorage.dtype": Row(of_storage, {"dtype": "float16"}),
    "KVStorage.device": Row(of_storage, same="the host gets the same bytes from every device"),
    "KVStorage.backend": Row(
        of_storage, {"backend": "FLASH_ATTN_DIFFKV"}, {"backend": "FLASHINFER"}
    ),
    "KVStorage.layout": Row(of_storage, {"layout": "HND"}),
    "KVStorage.cross_layers": Row(
        of_storage, {"cross_layers": True},
        {"backend": "TRITON_ATTN", "layout": "HND"},
    ),
    "KVStorage.scale_bytes_per_token": Row(of_storage, {"scale_bytes_per_token": 8}),
    "build.plan": Row(of_layer, same="covered by the fields of CachePlan"),
    "build.max_num_reqs": Row(of_build, {"max_num_reqs": 8}, same=HOW_MANY),
    "build.device": Row(of_build, same="the host gets the same bytes from every device"),
    "build.backend": Row(of_build, {"backend": "FLASH_ATTN_DIFFKV"}),
    "build.layout": Row(of_build, {"layout": "HND"}),
    "build.kernel_sizes": Row(of_kernels, {"kernel_sizes": [16]}),
    "build.num_speculative_tokens": Row(of_build, {"num_speculative_tokens": 3}, same=STEPS),
    "build.cp_kv_cache_interleave_size": Row(
        of_layer, {"made": {"cp_kv_cache_interleave_size": 4}},
        {"plan": {"context_parallel": CP}},
    ),
    "build.num_host_blocks": Row(of_build, {"num_host_blocks": 9}, same=HOW_MANY),
    "build.swap_options": Row(of_build, {"num_host_blocks": 9, "swap_options": {}}, same=WHEN),
    "build.enable_caching": Row(of_build, {"enable_caching": False}, same="a tier requires caching"),
    "build.num_preallocate_tokens": Row(of_build, {"num_preallocate_tokens": 0}, same=HOW_MANY),
    "CacheOptions.hash_block_size": Row(of_build, {"hash_block_size": 8}),
    "CacheOptions.watermark": Row(of_build, {"watermark": 0.1}, same=HOW_MANY),
    "CacheOptions.fence_frees": Row(of_build, {"fence_frees": True}, same=WHEN),
    "CacheOptions.engine_copies_states": Row(of_build, {"engine_copies_states": True}, same=WHEN),
    "CacheOptions.in_step_hits": Row(of_build, {"in_step_hits": "wait"}, same=WHEN),
    "CacheOptions.enable_events": Row(of_build, {"enable_events": False}, same="a tier requires events"),
    "CacheOptions.announce_reused": Row(of_build, {"announce_reused": True}, same=WHEN),
    "CacheOptions.track_residency": Row(of_build, {"track_residency": True}, same=WHEN),
    "CacheOptions.prefault": Row(of_build, {"prefault": False}, same=WHEN),
    "CacheOptions.stats_window": Row(of_build, {"stats_window": 10}, same="only affects statistics"),
    "CacheOptions.explain_misses": Row(of_build, {"explain_misses": 1}, same="only affects statistics"),
    "CacheOptions.hash_seed": Row(of_build, {"hash_seed": "s"}),
    "CacheOptions.hash_algorithm": Row(of_build, {"hash_algorithm": "xxh3_128_cbor"}),
    "CacheOptions.hash_bytes": Row(
        of_build, {"hash_bytes": 16}, {"hash_algorithm": "engine:x", "hash_bytes": 32}
    ),
    "CacheOptions.num_hash_lookahead_tokens": Row(
        of_build, {"num_hash_lookahead_tokens": 1}, {"hash_algorithm": "engine:x"}
    ),
    "CacheOptions.retention_interval": Row(of_build, {"retention_interval": 0}, same=WHEN),
    "CacheOptions.eviction": Row(of_build, {"eviction": "s3_fifo"}, same=WHEN),
    "CacheOptions.eviction_options": Row(
        of_build, {"eviction_options": {}}, {"eviction": "s3_fifo"}, same=WHEN
    ),
    "CacheOptions.host_eviction": Row(
        of_build, {"host_eviction": "s3_fifo"}, {"num_host_blocks": 9}, same=WHEN
    ),
    "CacheOptions.host_eviction_options": Row(
        of_build, {"host_eviction_options": {}}, {"num_host_blocks": 9, "host_eviction": "s3_fifo"},
        same=WHEN,
    ),
    "CacheOptions.host_write": Row(
        of_build, {"host_write": "through"}, {"num_host_blocks": 9}, same=WHEN
    ),
    "CacheOptions.num_hits_to_write": Row(of_build, {"num_hits_to_write": 3}, same=WHEN),
    "CacheOptions.min_gain_to_write": Row(of_build, {"min_gain_to_write": 0.1}, same=WHEN),
    "CacheOptions.page_bytes": Row(of_build, same="covered by CachePlan.page_bytes"),
    "fingerprint.manager": Row(of_identity, same="covered by the groups and options above"),
    "fingerprint.pages": Row(of_identity, {"pages": Pages.allocate(9, [[2048, 2048]])}),
    "fingerprint.model": Row(of_identity, {"model": "n"}),
    "fingerprint.rank": Row(of_identity, {"rank": "tp 1 of 2"}),
    "fingerprint.contents": Row(of_identity, {"contents": "v and k"}),
    "fingerprint.cp_kv_cache_interleave_size": Row(of_identity, {"cp_kv_cache_interleave_size": 2}),
    "CacheDescription.engine_id": Row(of_description, same="a name; all engines share one store"),
    "CacheDescription.tp_size": Row(of_description, same=BY_RANK),
    "CacheDescription.pp_size": Row(of_description, same=BY_RANK),
    "CacheDescription.stages": Row(of_description, same=BY_RANK),
    "CacheDescription.num_layers": Row(of_description, same=BY_RANK),
    "CacheDescription.total_num_kv_heads": Row(of_description, same=BY_RANK),
    "CacheDescription.cp_world_size": Row(of_description, same="ContextParallel"),
    "CacheDescription.cp_interleave": Row(of_description, same="build and fingerprint"),
    "CacheDescription.head_size": Row(of_description, same=BY_SPEC),
    "CacheDescription.block_size": Row(of_description, same=BY_SPEC),
    "CacheDescription.v_head_size": Row(of_description, same=BY_SPEC),
    "CacheDescription.is_mla": Row(of_description, same=BY_SPEC),
    "CacheDescription.dtype": Row(of_description, same=BY_SPEC),
    "CacheDescription.memory_order": Row(of_description, same="AttentionBackend and layout"),
    "CacheDescription.page_stride": Row(of_description, same="bytes are stored without gaps"),
    "CacheDescription.scale_bytes_per_head": Row(of_description, same=BY_SPEC),
    "CacheDescription.k_scale": Row(of_description, same="covered by the caller's text `model`"),
    "CacheDescription.v_scale": Row(of_description, same="covered by the caller's text `model`"),
    "CacheDescription.hash_algorithm": Row(of_description, same="CacheOptions.hash_algorithm"),
    "CacheDescription.version": Row(of_description, same="FORMAT_VERSION of identity.py"),
}  # fmt: skip

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
    found = [f"{each.__name__}.{field.name}" for each in classes for field in fields(each)]
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
        print(f"{name:{width}}  {row.verdict}")
    counts = [row.verdict.split(":")[0] for row in TABLE.values()]
    print({each: counts.count(each) for each in sorted(set(counts))})


if __name__ == "__main__":
    main()
