# SPDX-License-Identifier: Apache-2.0
"""Stage: compares bf16 attention over pages with FlashInfer and over gathered contexts with
PyTorch.

Both methods run through `kvcache_serve.engine.transformers` on the same cache. For each token, their
outputs are compared with float32 attention over the same K and V, relative to the norm of the
output. FlashInfer compiles its kernels at first use; the compilation time is reported separately.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.gpu import machine, say, sizes
from benchmarks.gpu.timing import stream_seconds
from benchmarks.gpu_kernels import copy_gb_per_s
from kvcache import LayerSpec, Request, build, plan_cache
from kvcache.assembly import KVCache
from kvcache_serve.engine.batch import Batch

_PACKAGES = {"flashinfer": "flashinfer-python", "transformers": "transformers"}
_WAYS = ("flashinfer", "gathered")
_HEADS, _KV_HEADS, _HEAD_SIZE, _BLOCK = 32, 8, 128, 16
_WINDOW = 100
# Rounding to bf16 causes errors of about 0.3 %. One extra or missing key in 400 causes about 5 %.
_TOLERANCE = 0.02
_LENGTHS = (1, 15, 16, 17, 31, 100, 101, 255, 400)  # context lengths, including the step's tokens
_CHUNK = 40  # tokens per prefill request in a mixed batch
_TIMED = (64, 4096)  # number of requests, context length


class Layer(NamedTuple):
    """The index and the attention window of a layer."""

    number: int
    window: int | None

    def __str__(self) -> str:
        return "full attention" if self.window is None else f"a window of {self.window}"


_LAYERS = (Layer(0, None), Layer(1, _WINDOW))


def main() -> int:
    missing = [pip for name, pip in _PACKAGES.items() if not machine.has_module(name)]
    if missing:
        say.skipped(
            f"{' and '.join(missing)} not installed (pip install {' '.join(missing)}): attention over "
            "pages was not compared"
        )
        return say.exit_code()
    for layer in _LAYERS:
        for kind in ("decode", "mixed"):
            case = f"{kind} batch, {layer}"
            if say.seconds_left() < 5:
                say.failed(f"{case}: not compared, no time left")
                continue
            with say.attempt(case):
                compare(case, layer, kind)
    with say.attempt("decode, timed"):
        measure()
    return say.exit_code()


class Attention:
    """A batch of queries, K and V, with a randomly filled cache and both attention methods."""

    def __init__(self, seq_lens: np.ndarray, query_lens: np.ndarray) -> None:
        from kvcache_serve.engine.transformers.layer_places import places_of
        from kvcache_serve.engine.transformers.layer_shapes import LayerShape, attention_name
        from kvcache_serve.engine.transformers.paged_cache import PagedCache

        longest, total = int(seq_lens.max()), int(seq_lens.sum())
        shape = {"num_kv_heads": _KV_HEADS, "head_size": _HEAD_SIZE, "dtype": "bfloat16"}
        specs = []
        for layer in _LAYERS:
            kind = "full_attention" if layer.window is None else "sliding_window"
            options = {} if layer.window is None else {"window": layer.window}
            name = attention_name(layer.number)
            specs.append(LayerSpec(name, kind, _BLOCK, **shape, options=options))
        sized = {"max_model_len": longest + _BLOCK, "max_num_batched_tokens": total}
        page_bytes = plan_cache(specs, 1 << 40, **sized).page_bytes
        num_pages = len(specs) * int((-(-seq_lens // _BLOCK) + 1).sum()) + 1
        plan = plan_cache(specs, page_bytes * num_pages, **sized)
        self.cache: KVCache = build(
            plan, max_num_reqs=len(seq_lens), device="cuda", enable_caching=False,
            num_preallocate_tokens=0,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        requests = [Request(f"r{i}", rng.integers(0, 100, n)) for i, n in enumerate(seq_lens)]
        step = self.cache.manager.step(new=requests)
        assert (step.rows >= 0).all(), f"the pages do not hold all requests: {step.status}"
        self.cache.worker.apply(step)
        tokens = [np.zeros(n, np.int64) for n in query_lens]
        self.batch = Batch(self.cache, step.rows, seq_lens - query_lens, tokens)
        for storage in self.cache.storages:
            for i in range(storage.num_layers):
                for part in (storage.key_cache(i), storage.value_cache(i)):
                    part.copy_(torch.randn(part.shape, device=part.device))
        t = self.batch.num_tokens
        drawn = torch.randn(t, _HEADS + 2 * _KV_HEADS, _HEAD_SIZE, device="cuda").bfloat16()
        heads = drawn.transpose(0, 1)[None].split([_HEADS, _KV_HEADS, _KV_HEADS], 1)
        self.query, self.key, self.value = heads
        shapes = [LayerShape(i, spec, None) for i, spec in enumerate(specs)]
        self._places = places_of(self.cache, shapes)
        self.ways = {way: PagedCache(self.cache, shapes, True) for way in _WAYS}
        kernels = self.ways["flashinfer"]
        kernels.use_flashinfer(set(), torch.bfloat16)
        for layer in _LAYERS:
            assert kernels.kernels_of(layer.number), f"FlashInfer does not serve {layer}"

    @contextmanager
    def attending(self, way: str, layer: Layer) -> Iterator[Callable[[], torch.Tensor]]:
        """Write the batch's K and V.

        Yields a function that returns the attention output, [t, heads, size].
        """
        from kvcache_serve.engine.transformers.attention import CURRENT, paged_attention

        module = torch.nn.Module()
        module.layer_idx, module.is_causal = layer.number, False
        module.num_key_value_groups = _HEADS // _KV_HEADS
        place, reader = self._places[layer.number], self.ways[way]

        def attend() -> torch.Tensor:
            contexts = self.key, self.value
            if way == "gathered":
                contexts = place.read(reader.parts_of(place.group).slots, self.key)
            scale = {"scaling": _HEAD_SIZE**-0.5}
            return paged_attention(module, self.query, *contexts, None, **scale)[0][0]

        reader.begin(self.batch)
        token = CURRENT.set(reader)
        try:
            reader.update(self.key, self.value, layer.number)
            yield attend
        finally:
            CURRENT.reset(token)
            reader.begin(None)

    def exact(self, layer: Layer) -> torch.Tensor:
        """Compute the attention output in float32, per request. K and V must have been written."""
        place, at, found = self._places[layer.number], 0, []
        table = self.cache.tables[place.group]
        for row, start, count in zip(self.batch.rows, self.batch.starts, self.batch.query_lens):
            positions = torch.arange(start, start + count, device="cuda")[:, None]
            seen = torch.arange(start + count, device="cuda")
            mask = seen <= positions
            if layer.window is not None:
                mask &= seen > positions - layer.window
            first = int(mask.any(0).nonzero()[0])
            slots = table.slots_of(
                np.full(start + count - first, row), np.arange(first, start + count)
            )
            q = self.query[0, :, at : at + count].float()
            k, v = (
                x[0].float().repeat_interleave(_HEADS // _KV_HEADS, 0)
                for x in place.read(slots, self.key)
            )
            scores = q @ k.transpose(1, 2) * _HEAD_SIZE**-0.5
            weights = scores.masked_fill(~mask[:, first:], float("-inf")).softmax(-1)
            found.append((weights @ v).transpose(0, 1))
            at += int(count)
        return torch.cat(found)


def compare(case: str, layer: Layer, kind: str) -> None:
    """Compare both methods with float32. Raises AssertionError if any token exceeds the tolerance."""
    seq_lens = np.array(_LENGTHS)
    query_lens = np.ones_like(seq_lens)
    if kind == "mixed":
        query_lens[::2] = np.minimum(_CHUNK, seq_lens[::2])
    attention = Attention(seq_lens, query_lens)
    found, seconds = {}, {}
    for way in _WAYS:
        begin = time.monotonic()
        with attention.attending(way, layer) as attend:
            found[way] = attend()
        torch.cuda.synchronize()
        seconds[way] = time.monotonic() - begin
    exact = attention.exact(layer)
    errors = {way: relative_error(output, exact) for way, output in found.items()}
    between = relative_error(found["flashinfer"], found["gathered"].float())
    say.row(
        kind="compared", case=case, tokens=len(exact), errors=errors, between=between,
        tolerance=_TOLERANCE, first_call_s=seconds["flashinfer"],
    )  # fmt: skip
    for way, error in errors.items():
        assert error <= _TOLERANCE, f"{way} is {error:.2%} off float32, tolerance {_TOLERANCE:.0%}"
    say.learned(
        f"{case}: FlashInfer {errors['flashinfer']:.2%} off float32, gathered {errors['gathered']:.2%}; "
        f"its first call took {seconds['flashinfer']:.1f} s"
    )


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest relative error over tokens and heads; infinite for non-finite values."""
    error = (found.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    return float(error.nan_to_num(float("inf")).max())


def measure() -> None:
    """Measure a large decode step with both methods, and a device copy as the limit."""
    num_requests, length = (sizes.scaled(n, least) for n, least in zip(_TIMED, (2, 64)))
    seq_lens = np.full(num_requests, length)
    attention = Attention(seq_lens, np.ones_like(seq_lens))
    layer = _LAYERS[0]
    num_bytes = int(seq_lens.sum()) * 2 * _KV_HEADS * _HEAD_SIZE * 2
    limit = copy_gb_per_s()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for way in _WAYS:
        with attention.attending(way, layer) as attend:
            attend()  # the first call includes planning
            seconds = stream_seconds(attend, stream)
        rate = num_bytes / seconds / 1e9
        say.row(
            kind="decode", way=way, requests=num_requests, context=length, us=seconds * 1e6,
            gb_per_s=rate, of_copy=rate / limit,
        )  # fmt: skip
        say.learned(
            f"decode of {num_requests} requests of {length:,} tokens, {way}: {seconds * 1e6:.0f} us, "
            f"{rate:.0f} GB/s of K and V ({rate / limit:.0%} of a copy)"
        )


if __name__ == "__main__":
    say.ready()
    sys.exit(main())
