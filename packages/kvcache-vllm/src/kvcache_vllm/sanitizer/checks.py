# SPDX-License-Identifier: Apache-2.0
"""Compares a step's inputs with the scheduler's output and with each other.

A difference is a finding (`Sanitizer.reject`), even if the slots that attention reads hold what the
inputs say.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvcache.sanitizer import Sanitizer
from kvcache_vllm.sanitizer.runners import Batch, Runner, as_array


class StepChecks:
    """Checks the inputs of one runner.

    Args:
        sanitizer: The sanitizer, which reports differences.
        runner: The runner.
        gids: vLLM's number of each sanitized group.
    """

    def __init__(self, sanitizer: Sanitizer, runner: Runner, gids: list[int]) -> None:
        self._sanitizer, self._runner, self._gids = sanitizer, runner, gids
        self._computed: dict[str, int] = {}  # number of computed tokens, from the scheduler
        self._prompts: dict[str, list[int]] = {}  # the tokens that the scheduler sent
        self._scales: list[float] | None = None

    def begin(self, output: Any) -> None:
        """Keep what the scheduler sends for a step."""
        cached = output.scheduled_cached_reqs
        for name in output.finished_req_ids:
            self._prompts.pop(name, None)
        self._computed = dict(zip(cached.req_ids, cached.num_computed_tokens))
        for request in output.scheduled_new_reqs:
            self._computed[request.req_id] = request.num_computed_tokens
            tokens = getattr(request, "prefill_token_ids", None)
            self._prompts[request.req_id] = request.prompt_token_ids if tokens is None else tokens
        self._counts = output.num_scheduled_tokens

    def check_batch(self, batch: Batch, drafted: dict[str, int]) -> None:
        """Check rows, positions and tokens.

        Args:
            batch: The batch.
            drafted: The position of the first token in the previous step, for requests with drafts.
        """
        self._check_scales()
        counts = dict(zip(batch.names, batch.counts.tolist()))
        if counts != dict(self._counts) and not self._has_fewer_drafts():
            wrong = next(
                name
                for name in {**counts, **self._counts}
                if counts.get(name) != self._counts.get(name)
            )
            self._reject(
                "query_start_loc",
                f"request {wrong!r} has {counts.get(wrong, 0)} tokens in the batch: expected "
                f"{self._counts.get(wrong, 0)}, as scheduled",
            )
        for row, (name, start) in enumerate(zip(batch.names, batch.starts.tolist())):
            computed, first = self._computed.get(name, -1), drafted.get(name)
            # The scheduler may count drafts that were rejected meanwhile.
            least = (
                min(first + 1, computed)
                if self._runner.is_async and first is not None
                else computed
            )
            if not least <= start <= computed:
                self._reject(
                    "positions",
                    f"request {name!r} begins at position {start}: expected {computed}, the number of "
                    "its computed tokens",
                )
            own = batch.positions[batch.splits[row] : batch.splits[row + 1]]
            if (np.diff(own) != 1).any():
                self._reject(
                    "positions", f"request {name!r} has positions {own[:8]}: expected each once"
                )
        self._check_tokens(batch)

    def _check_tokens(self, batch: Batch) -> None:
        sampled = self._runner.sampled()
        for row, (name, start) in enumerate(zip(batch.names, batch.starts.tolist())):
            tokens = batch.tokens[batch.splits[row] : batch.splits[row + 1]]
            prompt = self._prompts.get(name, ())
            last = [sampled[name]] if name in sampled and start >= len(prompt) else []
            for known in (
                np.array(prompt[start : start + len(tokens)], np.int64),
                self._runner.recorded(name, start, start + len(tokens)),
                np.array(last, np.int64),
            ):
                is_wrong = (known != tokens[: len(known)]) & (known >= 0)
                if is_wrong.any():
                    at = int(np.flatnonzero(is_wrong)[0])
                    self._reject(
                        "input_ids",
                        f"request {name!r} computes token {tokens[at]} at position {start + at}: "
                        f"expected {known[at]}",
                    )

    def slots(self, gid: int, batch: Batch, slot_mappings: Any) -> np.ndarray:
        """Return the slots of a batch's tokens, and check those of padding and of other layers."""
        total, first, *others = int(batch.splits[-1]), *self._mappings(gid, slot_mappings)
        slots = as_array(first)
        self._check_padding(gid, slots[total:])
        for other in others:
            if not np.array_equal(as_array(other), slots):
                self._reject("slot_mapping", f"layers of group {gid} differ: expected equal slots")
        return slots[:total]

    def check_dummy(self, slot_mappings: Any) -> None:
        """Check the slots of a forward pass without requests."""
        for gid in self._gids if isinstance(slot_mappings, dict) else ():
            for each in self._mappings(gid, slot_mappings):
                self._check_padding(gid, as_array(each))

    def _mappings(self, gid: int, slot_mappings: Any) -> list[torch.Tensor]:
        """Return the different slot mappings of a group's layers."""
        layers = self._runner.layers_of(gid)
        found = {id(each): each for name in layers if (each := slot_mappings.get(name)) is not None}
        return [*found.values()]

    def _check_padding(self, gid: int, slots: np.ndarray) -> None:
        size = self._runner.runner.kv_cache_config.kv_cache_groups[gid].kv_cache_spec.block_size
        if len(slots) and slots.max() >= size:
            slot = int(slots.max())
            self._reject(
                "slot_mapping",
                f"group {gid} writes padding to slot {slot} of block {slot // size}: expected -1 or the "
                "null block",
            )

    def lengths(self, g: int, gid: int, batch: Batch, metadata: Any) -> np.ndarray:
        """Return the number of tokens that each request attends to, and check the metadata of all of a
        group's layers.
        """
        n, expected, found = len(batch.names), batch.starts + batch.counts, None
        if self._sanitizer.groups[g].kind == "chunk" or not isinstance(metadata, dict):
            return expected  # a backend may split requests into chunks
        seen: set[int] = set()
        for name in self._runner.layers_of(gid):
            layer = metadata.get(name)
            lengths, splits = (
                getattr(layer, each, None) for each in ("seq_lens", "query_start_loc")
            )
            if _has_rows(lengths, n) and id(lengths) not in seen:
                seen.add(id(lengths))
                own = as_array(lengths[:n]).astype(np.int64)
                if (own < expected).any():
                    row = int(np.flatnonzero(own < expected)[0])
                    self._reject(
                        "seq_lens",
                        f"layer {name} has length {own[row]} for request {batch.names[row]!r}: expected "
                        f"{expected[row]}",
                    )
                found = own if found is None else np.maximum(found, own)
            if _has_rows(splits, n + 1) and id(splits) not in seen:
                seen.add(id(splits))
                if not np.array_equal(as_array(splits[: n + 1]), batch.splits):
                    self._reject(
                        "query_start_loc",
                        f"layer {name} has {as_array(splits[: n + 1])[:8]}: expected {batch.splits[:8]}",
                    )
        return expected if found is None else found

    def _check_scales(self) -> None:
        """Check that the scales of the cache are those with which earlier tokens were written."""
        runner = self._runner.runner
        config = runner.cache_config
        if not str(config.cache_dtype).startswith(("fp8", "int8")):
            return
        if getattr(config, "calculate_kv_scales", False):
            return
        layers = runner.compilation_config.static_forward_context.values()
        tensors = [
            scale.reshape(-1)[0]
            for layer in layers
            for name in ("_k_scale", "_v_scale")
            if isinstance(scale := getattr(layer, name, None), torch.Tensor) and scale.numel()
        ]
        scales = torch.stack(tensors).float().cpu().tolist() if tensors else []
        if self._scales is not None and scales != self._scales:
            i = next(i for i, pair in enumerate(zip(scales, self._scales)) if pair[0] != pair[1])
            self._reject(
                "kv_scale",
                f"scale {i} is {scales[i]}: expected {self._scales[i]}, as in earlier steps",
            )
        self._scales = scales

    def _has_fewer_drafts(self) -> bool:
        """Return whether the runner verifies fewer drafts than are scheduled."""
        return getattr(self._runner.runner, "adaptive_verification", None) is not None

    def _reject(self, call: str, reason: str) -> None:
        self._sanitizer.reject(call, reason)


def _has_rows(found: object, n: int) -> bool:
    return isinstance(found, torch.Tensor) and found.ndim == 1 and len(found) >= n
