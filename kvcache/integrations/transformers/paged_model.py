"""A transformers model over a `KVCache`: planned, built and read by slots."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, Unpack
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvcache.allocator import PolicyArguments
from kvcache.assembly import KVCache, build
from kvcache.checks import byte_count, instance, integer, shown
from kvcache.integrations.transformers.attention import CURRENT, NAME, register
from kvcache.integrations.transformers.layer_shapes import (
    LayerShape,
    cache_argument,
    layer_shapes,
    specs_of,
)
from kvcache.integrations.transformers.mixers import mixers_of, unwrap, wrap
from kvcache.integrations.transformers.paged_cache import PagedCache
from kvcache.memory_plan import plan_cache
from kvcache.serving.batch import Batch

# How often each model is attached, and the attention that it had before.
_ATTACHED: WeakKeyDictionary[PreTrainedModel, tuple[int, str]] = WeakKeyDictionary()


class PagedModel:
    """A model and the cache that it reads and writes; made by `attach`.

    `cache`: manager, tables, storages and worker. `forward` computes a batch. `detach` gives the model
    back as it was.
    """

    def __init__(
        self, model: PreTrainedModel, cache: KVCache, shapes: list[LayerShape], attention: str
    ) -> None:
        self.model = model
        self.cache = cache
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self._paged = PagedCache(cache, shapes)
        if attention == "flashinfer":
            self._paged.use_flashinfer(_layers_with_sinks(model), model.dtype)
        # Four dimensions: masks are ready, and the attention function reads none.
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        self._cache_argument = cache_argument(model)
        self._is_attached = True

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Computes the tokens of a batch; logits [len(batch.logits_indices), vocab_size].

        RuntimeError after `detach`.
        """
        if not self._is_attached:
            raise RuntimeError("the model is detached: attach it again")
        self._paged.begin(batch)
        token = CURRENT.set(self._paged)
        try:
            output = self.model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                attention_mask=self._mask,
                use_cache=False,
                logits_to_keep=batch.logits_indices,
                **{self._cache_argument: self._paged},
            )
        finally:
            CURRENT.reset(token)
            self._paged.begin(None)
        return output.logits[0]

    def detach(self) -> None:
        """Gives the model back as it was; the cache stays."""
        if self._is_attached:
            self._is_attached = False
            _release(self.model)


def attach(
    model: PreTrainedModel,
    budget: int | str,
    *,
    max_model_len: int | None = None,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 512,
    block_size: int = 16,
    kv_cache_dtype: torch.dtype | str | None = None,
    host_budget: int | str = 0,
    num_speculative_tokens: int = 0,
    state_interval: int | None = None,
    attention: Literal["sdpa", "flashinfer"] = "sdpa",
    **options: Unpack[PolicyArguments],
) -> PagedModel:
    """Puts a causal language model on a paged cache of `budget` bytes ("2GiB").

    Its layers say what they cache (`layer_specs`), the memory is planned, tables, storages and manager
    are made, and the model's attention becomes one that reads them. Weights are not touched, and outside
    of `PagedModel.forward` the model runs as before.

    - `max_model_len`: tokens of a request with its answer; None: the model's, or as many as fit.
    - `max_num_seqs`: sequences at a time. `max_num_batched_tokens`: tokens of a step.
    - `kv_cache_dtype`: of K and V; None: the model's. fp8 has scale 1 at first, see
      `KVStorage.set_scales`.
    - `host_budget`: bytes of a tier in host memory, to which sequences are swapped out.
    - `num_speculative_tokens`: drafts of a step at most, for models with recurrent layers; the others
      take any.
    - `state_interval`: of recurrent layers, as `plan_cache` takes it.
    - `attention`: "sdpa": contexts are gathered, and attention is PyTorch's. "flashinfer": FlashInfer's
      kernels read the pages, in layers that they serve (`FlashInferAttention`), on a GPU.
    - `options`: fields of `CacheOptions`, the eviction policy for example.

    TypeError or ValueError for wrong arguments and for models that nothing here can serve.

    >>> from kvcache.integrations.transformers.tiny_models import tiny_model
    >>> from kvcache.serving import Engine, SamplingParams
    >>> engine = Engine(attach(tiny_model("llama"), "1MiB", max_model_len=128))
    >>> (answer,) = engine.generate([range(40)], SamplingParams(max_tokens=4))
    >>> len(answer.samples[0].token_ids)
    4
    """
    instance(model, PreTrainedModel, "model")
    budget = byte_count(budget, "budget")
    host_budget = byte_count(host_budget, "host_budget", least=0)
    _check_attention(attention, model.device)
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or 2**20
    if max_model_len is not None and integer(max_model_len, "max_model_len", least=1) > longest:
        raise ValueError(
            f"max_model_len is {max_model_len}: expected at most {longest}, what the model is made for"
        )
    shapes = layer_shapes(
        model,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        num_speculative_tokens=num_speculative_tokens,
    )
    mixers = mixers_of(model)
    for shape in shapes:
        if shape.state is not None and shape.index not in mixers:
            raise ValueError(
                f"layer {shape.index} of the model keeps a state, and no module of it takes the "
                "cache: such layers are not supported"
            )
    plan = plan_cache(
        specs_of(shapes),
        budget,
        max_model_len=longest if max_model_len is None else max_model_len,
        fit_max_model_len=max_model_len is None,
        max_num_batched_tokens=max_num_batched_tokens,
        state_interval=state_interval,
    )
    num_host_blocks = host_budget // plan.page_bytes
    cache = build(
        plan,
        max_num_reqs=max_num_seqs,
        device=model.device,
        num_speculative_tokens=num_speculative_tokens,
        num_host_blocks=num_host_blocks + 1 if num_host_blocks else 0,
        **options,
    )
    for storage in cache.storages:
        if storage.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            ones = torch.ones(storage.num_layers, 1)
            storage.set_scales(ones, ones)
    paged = PagedModel(model, cache, shapes, attention)
    _take(model)
    return paged


def _check_attention(attention: str, device: torch.device) -> None:
    if attention not in ("sdpa", "flashinfer"):
        raise ValueError(f"attention is {shown(attention)}: expected sdpa or flashinfer")
    if attention == "sdpa":
        return
    if device.type != "cuda":
        raise ValueError(
            f"attention is 'flashinfer' for a model on {device}: expected one on a GPU, or 'sdpa'"
        )
    if find_spec("flashinfer") is None:
        raise ModuleNotFoundError(
            "attention is 'flashinfer', which is not installed: pip install flashinfer-python"
        )


def _layers_with_sinks(model: PreTrainedModel) -> set[int]:
    return {
        module.layer_idx
        for module in model.modules()
        if hasattr(module, "layer_idx") and getattr(module, "sinks", None) is not None
    }


def _take(model: PreTrainedModel) -> None:
    count, before = _ATTACHED.get(model, (0, model.config._attn_implementation))
    if count == 0:
        register()
        model.set_attn_implementation(NAME)
        for module in mixers_of(model).values():
            wrap(module)
    _ATTACHED[model] = (count + 1, before)


def _release(model: PreTrainedModel) -> None:
    count, before = _ATTACHED.pop(model)
    if count > 1:
        _ATTACHED[model] = (count - 1, before)
        return
    model.set_attn_implementation(before)
    for module in mixers_of(model).values():
        unwrap(module)
