# SPDX-License-Identifier: Apache-2.0
"""PyTorch replacements for parts of SGLang 0.5.23 that only exist for GPUs."""

import os
import types


def register() -> None:
    """Add the parts that HiCache needs on a CPU if KVCACHE_TESTS_HICACHE is set, and what fp8
    KV and MLA need if KVCACHE_TESTS_FP8 or KVCACHE_TESTS_MLA is set. SGLang calls this function in
    each process of an engine.
    """
    if os.environ.get("KVCACHE_TESTS_HICACHE"):
        add_hicache_copies()
    if os.environ.get("KVCACHE_TESTS_FP8"):
        use_fp8_pool_of_gpus()
    if os.environ.get("KVCACHE_TESTS_MLA"):
        attend_to_latent_vectors()


def add_hicache_copies() -> None:
    """Add HiCache's copy function for the layout `layer_first` with `hicache_io_backend="direct"`.

    Host memory is not pinned.
    """
    from sglang.srt.mem_cache.pool_host import common, mha

    def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
        for source, target in zip(src_layers, dst_layers):
            target[dst_indices] = source[src_indices]

    mha.transfer_kv_direct = transfer_kv_direct
    common._cuda_host_register = lambda *arguments, **options: None


def use_fp8_pool_of_gpus() -> None:
    """Use SGLang's fp8 pools for GPUs, which the backend `torch_native` writes and reads.

    On CPUs, SGLang requires AMX for fp8 KV, and uses another format.
    """
    from sglang.srt.mem_cache import kv_cache_configurator, kv_cache_dtype

    class Platform(type(kv_cache_dtype.current_platform)):
        def is_cpu(self):
            return False

    kv_cache_configurator.current_platform = kv_cache_dtype.current_platform = Platform()


def attend_to_latent_vectors() -> None:
    """Use the latent vectors in all phases of MLA, because the backend `torch_native` cannot attend to
    the K and V of a prompt without writing them to the pool.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register("torch_native", handler._dispatch_mla_subtype)


def read_windows_from_their_pool() -> None:
    """Patch the backend `torch_native` to read the KV of window layers from the slots to which it
    was written.

    If windows have a separate pool, the original backend writes to the slots of that pool but reads
    from the slots of the full-attention pool.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def translated(original):
        def forward(backend, q, k, v, layer, *arguments, **options):
            pool = backend.req_to_token_pool
            is_window = (layer.sliding_window_size or -1) > 0
            if is_window and backend.use_sliding_window_kv_pool:
                rows = backend.token_to_kv_pool.full_to_swa_index_mapping[pool.req_to_token.long()]
                backend.req_to_token_pool = types.SimpleNamespace(req_to_token=rows)
            try:
                return original(backend, q, k, v, layer, *arguments, **options)
            finally:
                backend.req_to_token_pool = pool

        return forward

    for name in ("forward_extend", "forward_decode"):
        setattr(TorchNativeAttnBackend, name, translated(getattr(TorchNativeAttnBackend, name)))
