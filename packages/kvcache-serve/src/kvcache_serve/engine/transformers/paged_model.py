# SPDX-License-Identifier: Apache-2.0
"""Runs a transformers model on a `KVCache` that is planned and built for the model. The cache is accessed
by slots.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvcache.allocator import PolicyArguments
from kvcache.assembly import KVCache, build
from kvcache.checks import byte_count, flag, instance, integer
from kvcache.memory_plan import plan_cache
from kvcache_serve.engine.batch import Batch
from kvcache_serve.engine.transformers.attention import CURRENT, NAME, register
from kvcache_serve.engine.transformers.calls import (
    cache_argument,
    call_arguments,
    parameters_of,
    takes_positions,
    undisturbed,
)
from kvcache_serve.engine.transformers.layer_shapes import FilledCache, ModelShape, model_shape
from kvcache_serve.engine.transformers.mixers import unwrap, wrap
from kvcache_serve.engine.transformers.paged_cache import PagedCache
from kvcache_serve.engine.transformers.segments import segments_of
from kvcache_serve.engine.transformers.self_check import Difference, SelfCheck
from kvcache_serve.engine.transformers.unsupported import UnsupportedModel

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LOG = logging.getLogger("kvcache.serve")
_NO_TRAINING = "expected model.eval(), because dropout would change answers and cached KV"
# Names under which configurations define the maximum context length. The first one present is used.
_LENGTHS = ("max_position_embeddings", "max_target_positions", "max_seq_len")


class _Taken(NamedTuple):
    """The state of an attached model: the number of attachments, and the settings to restore."""

    count: int
    attention: str
    mixers: tuple[str, ...]


_TAKEN: WeakKeyDictionary[PreTrainedModel, _Taken] = WeakKeyDictionary()


class Way(NamedTuple):
    """How a model computes a batch.

    `by_request`: whether each request is computed separately with the model's own attention. If
    False, all tokens are concatenated and computed with paged attention. `resumes`: whether
    recurrent layers can process several tokens at once from an existing state. If False, these
    tokens are processed one by one.
    """

    by_request: bool
    resumes: bool

    def __str__(self) -> str:
        rest = "" if self.resumes else ", token by token after the first chunk"
        return ("request by request" if self.by_request else "batched") + rest


class PagedModel:
    """A model and the cache that it reads and writes. Created by `attach`.

    `cache` contains the manager, tables, storages and worker. `forward` computes a batch. `detach`
    restores the model. `by_request` is True if requests are computed one by one, because the model's
    attention does not support batches of requests with different lengths. `why_by_request` is the
    reason.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        shape: ModelShape,
        way: Way,
        why_by_request: str = "",
    ) -> None:
        self.model = model
        self.cache = cache
        self.vocab_size = shape.vocab_size
        self.by_request, self.why_by_request = way.by_request, why_by_request
        self._way = way
        self._paged = PagedCache(cache, shape.layers, way.resumes)
        self._has_states = bool(self._paged.states)
        # transformers does not modify a four-dimensional mask, and the attention function ignores the
        # mask.
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        self._cache_argument = cache_argument(model)
        self._takes_positions = takes_positions(model)
        self._keeps_logits = "logits_to_keep" in parameters_of(model)
        if not way.by_request:
            _take(model, shape)
        self._is_attached = True

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the tokens of a batch.

        Args:
            batch: The batch, after the worker has applied its plan.

        Returns:
            Logits [len(batch.logits_indices), vocab_size].

        Raises:
            RuntimeError: The model was detached, is in training mode, or bypasses paged attention.
        """
        if not self._is_attached:
            raise RuntimeError("the model is detached: attach it again")
        if self.model.training:
            raise RuntimeError(f"the model is in training mode: {_NO_TRAINING}")
        instance(batch, Batch, "batch")
        self._paged.begin(batch)
        try:
            return self._by_request(batch) if self.by_request else self._batched(batch)
        finally:
            self._paged.begin(None)

    def _batched(self, batch: Batch) -> torch.Tensor:
        wanted = batch.logits_indices
        token = CURRENT.set(self._paged)
        try:
            output = self.model(
                input_ids=batch.token_ids[None],
                attention_mask=self._mask,
                use_cache=False,
                **({"position_ids": batch.positions[None]} if self._takes_positions else {}),
                **({"logits_to_keep": wanted} if self._keeps_logits else {}),
                **{self._cache_argument: self._paged},
            )
        finally:
            CURRENT.reset(token)
        self._paged.end()
        return output.logits[0] if self._keeps_logits else output.logits[0, wanted]

    def _by_request(self, batch: Batch) -> torch.Tensor:
        logits = []
        for request in range(len(batch)):
            first_wanted = int(batch.query_start_loc[request + 1] - batch.num_logits[request])
            for segment in segments_of(
                batch, request, has_states=self._has_states, resumes=self._way.resumes
            ):
                cache = self._paged.of_request(request, segment)
                tokens = batch.token_ids[None, segment.first : segment.stop]
                num_wanted = segment.stop - max(segment.first, first_wanted)
                options = {"logits_to_keep": max(num_wanted, 1)} if self._keeps_logits else {}
                arguments = call_arguments(self.model, tokens, segment.start, cache=cache)
                output = self.model(**arguments, **options)
                cache.store()
                if num_wanted > 0:
                    logits.append(output.logits[0, -num_wanted:])
        if not logits:
            return torch.empty(0, self.vocab_size, dtype=self.model.dtype, device=self.model.device)
        return torch.cat(logits)

    def detach(self) -> None:
        """Restore the model. The cache remains valid."""
        if self._is_attached:
            self._is_attached = False
            if not self.by_request:
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
    check: bool = True,
    **options: Unpack[PolicyArguments],
) -> PagedModel:
    """Attach a causal language model to a paged cache of `budget` bytes ("2GiB").

    The model first computes one token with its own cache, from which `attach` detects what each layer
    caches (`layer_specs`). `attach` then plans the memory and builds tables, storages and the manager.
    Weights are not changed. Outside `PagedModel.forward`, the model runs as before.

    Most models compute a batch of concatenated tokens, with an attention function registered in
    transformers' attention interface. Models whose attention does not use that interface, or that derive
    positions and masks from the length of their cache, run request by request with their own attention
    over gathered K and V (`PagedModel.by_request`). This is correct but slower, because weights are read
    once per request.

    Before allocating the cache, `attach` runs a self-check. It computes three short prompts, split
    into chunks and batched together, with a small paged cache. The logits are compared with the
    logits of the model's own forward pass without a cache. The fastest method that agrees is used.
    The check computes about a hundred tokens per method, and does not change generators, training
    flags or hooks.

    Args:
        model: Any causal language model of transformers.
        budget: Memory for K, V and states on the model's device, in bytes or with a unit.
        max_model_len: Maximum number of tokens per request (prompt and output). None: the model's
            limit, or the largest number that fits if that is smaller. Models with longrope are
            limited to `original_max_position_embeddings`, because for longer requests they use
            different rotary factors for all keys of the request.
        max_num_seqs: Maximum number of concurrent sequences.
        max_num_batched_tokens: Maximum number of tokens per step.
        block_size: Tokens per block.
        kv_cache_dtype: The dtype of K and V, or the name of a quantized format (`kvcache.formats`). None:
            the model's dtype. With the dtypes of fp8, all scales are initially 1 (see
            `KVStorage.set_scales`).
        host_budget: Size of the host tier, to which sequences are swapped out.
        num_speculative_tokens: Maximum number of draft tokens per step for models with recurrent
            layers. Other models allow any number.
        state_interval: Block size of recurrent groups, as in `plan_cache`.
        check: Whether the self-check compares logits. If False, the fastest method that runs without an
            error is used, and wrong answers are not detected.
        options: Fields of `CacheOptions`, such as the eviction policy.

    Returns:
        The model with its cache. Call `detach` to restore the model.

    Raises:
        UnsupportedModel: No method reproduces the model's own answers. The message states the model and
            the reason and, if logits differ, the request, position, difference and tolerance. A
            subclass of ValueError.
        TypeError, ValueError: An argument is invalid.

    >>> from kvcache_serve.engine.transformers.tiny_models import tiny_model
    >>> from kvcache_serve.engine import Engine, SamplingParams
    >>> engine = Engine(attach(tiny_model("llama"), "1MiB", max_model_len=128))
    >>> (answer,) = engine.generate([range(40)], SamplingParams(max_tokens=4))
    >>> len(answer.samples[0].token_ids)
    4
    """
    instance(model, PreTrainedModel, "model")
    if any(module.training for module in model.modules()):
        raise ValueError(f"model is in training mode: {_NO_TRAINING}")
    budget = byte_count(budget, "budget")
    host_budget = byte_count(host_budget, "host_budget", least=0)
    check = flag(check, "check")
    longest, reason = longest_request(model)
    if max_model_len is not None and integer(max_model_len, "max_model_len", least=1) > longest:
        raise ValueError(f"max_model_len is {max_model_len}: expected at most {longest}, {reason}")
    block_size = integer(block_size, "block_size", least=1)
    num_drafts = integer(num_speculative_tokens, "num_speculative_tokens")
    filled = FilledCache(model)
    shape = model_shape(model, filled, block_size, kv_cache_dtype, num_drafts)
    plan = plan_cache(
        shape.specs,
        budget,
        max_model_len=longest if max_model_len is None else max_model_len,
        fit_max_model_len=max_model_len is None,
        max_num_batched_tokens=max_num_batched_tokens,
        state_interval=state_interval,
    )
    # Check without drafts and without rounding, so that any difference is a defect. Blocks are small,
    # so that few tokens fill them.
    plain = model_shape(model, filled, min(block_size, 16), None, 0)
    way, why = _proven_way(model, plain, plan.max_model_len, check)
    if way.by_request:
        _LOG.warning("%s is served request by request, not batched: %s", type(model).__name__, why)
    num_host_blocks = host_budget // plan.page_bytes
    cache = build(
        plan,
        max_num_reqs=integer(max_num_seqs, "max_num_seqs", least=1),
        device=model.device,
        num_speculative_tokens=num_speculative_tokens,
        num_host_blocks=num_host_blocks + 1 if num_host_blocks else 0,
        **options,
    )
    for storage in cache.storages:
        is_fp8 = storage.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        if is_fp8 and storage.kv_format is None:
            ones = torch.ones(storage.num_layers, 1)
            storage.set_scales(ones, ones)
    return PagedModel(model, cache, shape, way, why if way.by_request else "")


def longest_request(model: PreTrainedModel) -> tuple[int, str]:
    """Return the length of the longest request that the model supports, and the reason for the limit."""
    config = model.config.get_text_config(decoder=True)
    limits = (getattr(config, name, None) for name in _LENGTHS)
    longest = next(filter(None, limits), 2**20)
    reason = "the model's maximum context length"
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            short = parameters.get("original_max_position_embeddings") or longest
            if short < longest:
                longest, reason = (
                    short,
                    (
                        "because longrope uses different factors for longer requests, which would "
                        "also have to apply to the keys of earlier chunks"
                    ),
                )
    return longest, reason


def _take(model: PreTrainedModel, shape: ModelShape) -> None:
    before = _TAKEN.get(model)
    if before is not None:
        _TAKEN[model] = before._replace(count=before.count + 1)
        return
    register()
    mixers = tuple(layer.mixer for layer in shape.layers if layer.mixer is not None)
    attention = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
    except BaseException:
        model.set_attn_implementation(attention)
        raise
    _TAKEN[model] = _Taken(1, attention, mixers)
    for name in mixers:
        wrap(model.get_submodule(name))


def _release(model: PreTrainedModel) -> None:
    taken = _TAKEN.pop(model)
    if taken.count > 1:
        _TAKEN[model] = taken._replace(count=taken.count - 1)
        return
    model.set_attn_implementation(taken.attention)
    for name in taken.mixers:
        unwrap(model.get_submodule(name))


def _proven_way(
    model: PreTrainedModel,
    shape: ModelShape,
    max_model_len: int,
    compares: bool,
) -> tuple[Way, str]:
    """Return the fastest method that reproduces the model's own results, and the reason why faster
    methods do not.

    Raises `UnsupportedModel` if no method does. If `compares` is False, returns the fastest method
    that runs without an error.
    """
    check = SelfCheck(model, shape, max_model_len)
    found: list[tuple[Way, Difference | str]] = []
    try:
        if compares:
            with undisturbed(model):
                check.compute_dense()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    # The model's code may raise any exception.
    except Exception as error:
        raise UnsupportedModel(
            model, f"it cannot compute a prompt without a cache ({type(error).__name__}: {error})"
        ) from error
    for way in _ways(model, shape):
        reason = _reason_against(way, model, shape, check, compares)
        if reason is None:
            return way, _listed(found)
        found.append((way, reason))
    differs = any(isinstance(reason, Difference) for _, reason in found)
    hint = ". Pass check=False to attach it without this check" if differs else ""
    raise UnsupportedModel(model, _listed(found) + hint)


def _listed(found: list[tuple[Way, Difference | str]]) -> str:
    return "; ".join(f"{way}: {reason}" for way, reason in found)


def _ways(model: PreTrainedModel, shape: ModelShape) -> list[Way]:
    """Return all candidate methods, fastest first."""
    has_states = any(layer.state is not None for layer in shape.layers)
    return [
        Way(by_request, resumes)
        for by_request in (False, True)
        for resumes in ((True, False) if has_states else (True,))
    ]


def _reason_against(
    way: Way,
    model: PreTrainedModel,
    shape: ModelShape,
    check: SelfCheck,
    compares: bool,
) -> Difference | str | None:
    if not way.by_request:
        attends = any(layer.attention is not None for layer in shape.layers)
        names_positions = "position_ids" in parameters_of(model)
        # A model may forward `**kwargs` (correct) or drop them (wrong). Only a comparison of the results
        # can distinguish these cases.
        if attends and not (names_positions or (compares and takes_positions(model))):
            return "its forward does not name position_ids"
        for layer in shape.layers:
            if layer.state is not None and layer.mixer is None:
                return f"no module maintains only the state of layer {layer.index}"
    paged = None
    try:
        with undisturbed(model):
            cache = check.cache()
            paged = PagedModel(model, cache, shape, way)
            if not compares:
                for _ in check.run(paged, cache):
                    pass
                return None
            difference = check.difference(paged, cache)
            if difference is not None and way == _ways(model, shape)[-1]:
                return check.located(paged, cache, difference)
            return difference
    except (MemoryError, torch.OutOfMemoryError):
        raise
    # The model's code may raise any exception when called in an unusual way.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if paged is not None:
            paged.detach()
