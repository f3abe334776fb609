# SPDX-License-Identifier: Apache-2.0
"""Computes a few tokens with the paged cache and compares them with the model's dense forward pass.

The prompts are split into chunks and batched together. They use a small separate cache, so that the
cache returned by `attach` is not modified.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from kvcache.allocator import Request
from kvcache.assembly import KVCache, build
from kvcache.memory_plan import plan_cache
from kvcache_serve.engine.batch import Batch
from kvcache_serve.engine.scheduler import Scheduler
from kvcache_serve.engine.sequence import Sequence
from kvcache_serve.engine.transformers.calls import call_arguments
from kvcache_serve.engine.transformers.layer_shapes import ModelShape

_TOKENS_PER_STEP = 11  # splits the prompts at positions that are not block boundaries
_NUM_DECODED = 4
_LARGEST_WINDOW = 64  # largest window that the prompts are guaranteed to exceed
# Tolerances for differences of logits, in standard deviations of a token's logits. In half precision,
# the tolerance applies to the median over a request's tokens, because rounding may route individual
# tokens to other experts. The float64 tolerance allows for models that compute partly in float32.
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-2}
_HALF_TOLERANCE = 0.5


class Paged(Protocol):
    """The interface of a model that computes a batch with a paged cache."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the logits of `batch.logits_indices`."""


class Difference(NamedTuple):
    """The first token whose logits differ from the dense logits. `largest` is the largest
    difference.

    `layer`: the first module whose output differs for this token. None if it is unknown.
    """

    request: int
    position: int
    largest: float
    tolerance: float
    chunk: tuple[int, int]  # positions computed in the same step
    layer: str | None = None

    def __str__(self) -> str:
        first, stop = self.chunk
        layer = "" if self.layer is None else f", first in {self.layer}"
        return (
            f"at position {self.position} of request {self.request} (positions {first} to {stop - 1} in "
            f"one step) logits differ from the dense logits by {self.largest:.2g} (tolerance "
            f"{self.tolerance:.2g}){layer}: {self.cause}"
        )

    @property
    def cause(self) -> str:
        """The most likely cause of the difference."""
        if self.position == 0:
            return (
                "the first token attends to later tokens or other requests, or has a wrong position"
            )
        if self.position < self.chunk[1] and self.chunk[0] == 0:
            return "attention is not causal or reads other requests, or tokens have wrong positions"
        return "attention to tokens of earlier steps differs from the dense pass, or positions are wrong"


class SelfCheck:
    """Prompts, and the model's own logits for these prompts.

    `difference` compares these logits with those of a paged model.
    """

    def __init__(self, model: PreTrainedModel, shape: ModelShape, max_model_len: int) -> None:
        self._model, self._shape = model, shape
        windows = [
            next(iter(spec.options.values()))
            for spec in shape.specs
            if spec.kind in ("sliding_window", "chunked_local")
        ]
        block = min(spec.block_size for spec in shape.specs)
        longest = max(
            [block + block // 2 + 3, *(w + block // 2 for w in windows if w <= _LARGEST_WINDOW)]
        )
        lengths = [longest, 5, block + 2]
        most = max(1, max_model_len - _NUM_DECODED)
        self._prompt_lengths = [min(length, most) for length in lengths]
        self._num_decoded = min(_NUM_DECODED, max_model_len - 1)
        self.tokens = _tokens(model, [n + self._num_decoded for n in self._prompt_lengths])
        # For each request, the logits [tokens, vocab_size] of the model without a cache.
        self.dense: list[torch.Tensor] = []

    def compute_dense(self) -> None:
        """Compute the model's own logits, which are the reference for `difference`."""
        for tokens in self.tokens:
            line = torch.from_numpy(tokens)[None].to(self._model.device)
            output = self._model(**call_arguments(self._model, line, 0, cache=None))
            self.dense.append(output.logits[0])

    def cache(self) -> KVCache:
        """Create a cache for the check, with just enough pages."""
        most = max(map(len, self.tokens))
        plan = plan_cache(
            self._shape.specs, 2**60, max_model_len=most, max_num_batched_tokens=_TOKENS_PER_STEP
        )
        num_pages = len(self.tokens) * plan.pages_per_request(most) + 1
        return build(
            dataclasses.replace(plan, num_pages=num_pages),
            max_num_reqs=len(self.tokens),
            device=self._model.device,
            enable_caching=False,
            num_preallocate_tokens=0,
        )

    def run(self, paged: Paged, cache: KVCache) -> Iterator[tuple[Batch, list[int], torch.Tensor]]:
        """Yield all batches with their logits.

        The prompts come first, followed by single tokens.
        """
        scheduler = Scheduler(cache.manager, max_num_batched_tokens=_TOKENS_PER_STEP)
        known = {}
        for number, tokens in enumerate(self.tokens):
            prompt = tokens[: self._prompt_lengths[number]]
            sequence = Sequence(Request(str(number), prompt), rank=(0, number))
            known[sequence] = list(tokens[len(prompt) :])
            scheduler.add(sequence)
        while (step := scheduler.schedule()) is not None:
            report = cache.worker.apply(step.plan)
            counts = [len(tokens) for tokens in step.token_ids]
            batch = Batch(cache, step.rows, step.starts, step.token_ids, num_logits=counts)
            yield (
                batch,
                [int(each.request.request_id) for each in step.sequences],
                paged.forward(batch),
            )
            scheduler.complete(step, report)
            for sequence, is_ready in zip(step.sequences, step.num_logits):
                if not is_ready:
                    continue
                if known[sequence]:
                    scheduler.accept(sequence, [int(known[sequence].pop(0))])
                else:
                    scheduler.finish(sequence)

    def difference(self, paged: Paged, cache: KVCache) -> Difference | None:
        """Return the first token, in the order of requests, whose logits differ from the dense logits.
        Return None if no logits differ.
        """
        errors = [np.zeros(len(tokens)) for tokens in self.tokens]
        chunks: list[list[tuple[int, int]]] = [[(0, 0)] * len(tokens) for tokens in self.tokens]
        for batch, requests, logits in self.run(paged, cache):
            for i, request in enumerate(requests):
                first, stop = int(batch.starts[i]), int(batch.seq_lens[i])
                at = slice(*batch.query_start_loc[i : i + 2])
                dense = self.dense[request][first:stop].double()
                found = (logits[at].double() - dense).abs().amax(-1)
                spread = dense.std(-1, correction=0).clamp_min(torch.finfo(torch.float32).tiny)
                errors[request][first:stop] = (found / spread).cpu().numpy()
                chunks[request][first:stop] = [(first, stop)] * (stop - first)
        tolerance = self._tolerance()
        for request, found in enumerate(errors):
            # NaN exceeds every tolerance.
            wrong = ~(found <= tolerance)
            if self._is_half and wrong.mean() <= 0.5:
                continue
            if wrong.any():
                at = int(wrong.argmax())
                spread = float(self.dense[request][at].double().std(correction=0))
                return Difference(
                    request, at, found[at] * spread, tolerance * spread, chunks[request][at]
                )
        return None

    def located(self, paged: Paged, cache: KVCache, difference: Difference) -> Difference:
        """Return the given difference with `layer` set, after computing all batches again."""
        blocks = self._blocks()
        request, position = difference.request, difference.position
        with _Outputs(blocks) as outputs:
            line = torch.from_numpy(self.tokens[request])[None].to(self._model.device)
            self._model(**call_arguments(self._model, line, 0, cache=None))
            dense = {name: states[position] for name, states in outputs.take().items()}
            for batch, requests, _ in self.run(paged, cache):
                states = outputs.take()
                if request not in requests:
                    continue
                i = requests.index(request)
                at = position - int(batch.starts[i])
                if not 0 <= at < batch.query_lens[i]:
                    continue
                for name in dense:
                    wanted = dense[name].double()
                    found = states[name][int(batch.query_start_loc[i]) + at].double()
                    within = (found - wanted).abs().max() <= self._tolerance() * wanted.std()
                    if not within and difference.layer is None:
                        difference = difference._replace(layer=name)
        return difference

    def _blocks(self) -> dict[str, torch.nn.Module]:
        """Return the model's layers, keyed by name. They are in the first module list with one entry per
        layer.
        """
        config = self._model.config.get_text_config(decoder=True)
        count = getattr(config, "num_hidden_layers", None)
        for name, module in self._model.named_modules():
            if isinstance(module, torch.nn.ModuleList) and len(module) == count:
                return {f"{name}.{i}": block for i, block in enumerate(module)}
        return {}

    @property
    def _is_half(self) -> bool:
        return self._model.dtype not in _TOLERANCES

    def _tolerance(self) -> float:
        if self._is_half:
            return _HALF_TOLERANCE
        kept = {part.dtype for layer in self._shape.layers for part in layer.state_parts}
        # Recurrent layers compute in float32 regardless of the model's dtype.
        dtype = torch.float32 if kept else self._model.dtype
        return _TOLERANCES[dtype]


class _Outputs:
    """Records the outputs of modules within a `with` block.

    `take` returns the outputs as [tokens, size].
    """

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        self._modules = modules
        self._found: dict[str, list[torch.Tensor]] = {name: [] for name in modules}

    def __enter__(self) -> _Outputs:
        self._hooks = [self._watch(name, module) for name, module in self._modules.items()]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def take(self) -> dict[str, torch.Tensor]:
        """Return each module's concatenated outputs since the last call of this method."""
        taken = {name: torch.cat(calls) for name, calls in self._found.items() if calls}
        for calls in self._found.values():
            calls.clear()
        return taken

    def _watch(self, name: str, module: torch.nn.Module) -> torch.utils.hooks.RemovableHandle:
        def note(_: torch.nn.Module, __: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple) else output
            self._found[name].append(first[0] if first.ndim == 3 else first)

        return module.register_forward_hook(note)


def _tokens(model: PreTrainedModel, lengths: list[int]) -> list[np.ndarray]:
    """Return requests of these lengths with arbitrary tokens."""
    num_tokens = model.get_input_embeddings().weight.shape[0]
    config = model.config.get_text_config(decoder=True)
    num_tokens = min(num_tokens, getattr(config, "vocab_size", num_tokens))
    special = {
        value
        for each in (model.config, config)
        for name, value in each.to_dict().items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    plain = np.array([token for token in range(num_tokens) if token not in special] or [0])
    rng = np.random.default_rng(0)
    return [plain[rng.integers(0, len(plain), length)].astype(np.int64) for length in lengths]
