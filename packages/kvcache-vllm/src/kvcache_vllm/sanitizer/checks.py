# SPDX-License-Identifier: Apache-2.0
"""Compares a step's inputs with the scheduler's output and with each other.

A difference is a finding (`Sanitizer.reject`), even if the slots that attention reads hold what the
inputs say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from kvcache.sanitizer import Sanitizer
from kvcache_vllm.sanitizer.runners import Runner, StepInputs, as_array, tokens_of


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
        self._scales: np.ndarray | None = None

    def begin(self, output: Any) -> None:
        """Keep what the scheduler sends for a step."""
        cached = output.scheduled_cached_reqs
        for name in output.finished_req_ids:
            self._prompts.pop(name, None)
        self._computed = dict(zip(cached.req_ids, cached.num_computed_tokens))
        for request in output.scheduled_new_reqs:
            self._computed[request.req_id] = request.num_computed_tokens
            self._prompts[request.req_id] = tokens_of(request)
        self._counts = output.num_scheduled_tokens
        self._continues = bool(cached.req_ids)  # whether requests of earlier steps run

    def check_batch(self, batch: StepInputs, drafted: dict[str, int]) -> None:
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

    def _check_tokens(self, batch: StepInputs) -> None:
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

    def slots(self, gid: int, batch: StepInputs, slot_mappings: Any, metadata: Any) -> np.ndarray:
        """Return the slots of a batch's tokens, and check those of padding and of other layers."""
        total, first, *others = int(batch.splits[-1]), *self._mappings(gid, slot_mappings)
        slots = as_array(first)
        self._check_padding(gid, slots[total:])
        layers = (metadata or {}).get
        others += _different(
            getattr(layers(name), "slot_mapping", None) for name in self._runner.layers_of(gid)
        )
        for other in others:
            if not np.array_equal(as_array(other[:total]), slots[:total]):
                self._reject("slot_mapping", f"layers of group {gid} differ: expected equal slots")
        return slots[:total]

    def check_dummy(self, slot_mappings: Any) -> None:
        """Check the slots of a forward pass without requests."""
        for gid in self._gids if isinstance(slot_mappings, dict) else ():
            for each in self._mappings(gid, slot_mappings):
                self._check_padding(gid, as_array(each))

    def _mappings(self, gid: int, slot_mappings: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the different slot mappings of a group's layers."""
        layers = self._runner.layers_of(gid)
        if missing := [name for name in layers if slot_mappings.get(name) is None]:
            self._reject(
                "slot_mapping", f"layer {missing[0]} has no slots: expected those of group {gid}"
            )
        return _different(slot_mappings.get(name) for name in layers)

    def _check_padding(self, gid: int, slots: np.ndarray) -> None:
        size = self._runner.runner.kv_cache_config.kv_cache_groups[gid].kv_cache_spec.block_size
        if len(slots) and slots.max() >= size:
            slot = int(slots.max())
            self._reject(
                "slot_mapping",
                f"group {gid} writes padding to slot {slot} of block {slot // size}: expected -1 or the "
                "null block",
            )

    def rows(
        self, g: int, gid: int, batch: StepInputs, metadata: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the block table and the number of tokens that each request attends to, as the layers
        of a group receive them, and check that all layers receive the same.
        """
        n, expected = len(batch.names), batch.starts + batch.counts
        table, lengths, seen_table = self._runner.table(gid, n), expected, None
        if self._sanitizer.groups[g].kind == "chunk":
            return table, lengths  # a backend splits requests into chunks, which are its rows
        layers = [(metadata or {}).get(name) for name in self._runner.layers_of(gid)]
        for rows, found in _with_rows(layers, "block_table", n, 2):
            own = self._runner.table_of_layer(found, gid, rows.stop - rows.start)
            if own is None:
                continue
            if rows.start or rows.stop < n:  # MLA has separate tables of decodes and prefills
                table = table.copy()  # it may be the runner's own memory
                table[rows] = own
            elif seen_table is None:
                table = seen_table = own
            elif not np.array_equal(own, seen_table):
                self._reject("block_table", f"layers of group {gid} differ: expected equal tables")
        for rows, found in _with_rows(layers, "seq_lens", n, 1):
            own, wanted = as_array(found[: rows.stop - rows.start]).astype(np.int64), expected[rows]
            if (own < wanted).any():
                row = int(np.flatnonzero(own < wanted)[0])
                self._reject(
                    "seq_lens",
                    f"a layer of group {gid} has length {own[row]} for request "
                    f"{batch.names[rows.start + row]!r}: expected {wanted[row]}",
                )
            lengths = lengths.copy()
            lengths[rows] = np.maximum(lengths[rows], own)
        for rows, found in _with_rows(layers, "query_start_loc", n + 1, 1):
            whole = rows.start == 0 and rows.stop == n + 1
            if whole and not np.array_equal(as_array(found[: n + 1]), batch.splits):
                self._reject(
                    "query_start_loc",
                    f"a layer of group {gid} has {as_array(found[: n + 1])[:8]}: expected "
                    f"{batch.splits[:8]}",
                )
        return table, lengths

    def _check_scales(self) -> None:
        """Check that the scales of the cache are those with which earlier tokens were written. They may
        change with the weights while no request runs.
        """
        runner = self._runner.runner
        config = runner.cache_config
        if not str(config.cache_dtype).startswith(("fp8", "int8", "int4", "nvfp4")):
            return
        if getattr(config, "calculate_kv_scales", False):
            return
        scales = [
            torch.as_tensor(scale).float().reshape(-1)
            for layer in runner.compilation_config.static_forward_context.values()
            for name in ("_k_scale", "_v_scale", "_k_scale_float", "_v_scale_float")
            if isinstance(scale := getattr(layer, name, None), torch.Tensor | float)
        ]
        found = (
            as_array(torch.cat([each.to(scales[0].device) for each in scales])) if scales else None
        )
        before, self._scales = self._scales, found
        if before is None or not self._continues or np.array_equal(found, before):
            return
        self._reject(
            "kv_scale", "a layer's scale has changed: expected the scale of the tokens in the cache"
        )

    def _has_fewer_drafts(self) -> bool:
        """Return whether the runner verifies fewer drafts than are scheduled."""
        return getattr(self._runner.runner, "adaptive_verification", None) is not None

    def _reject(self, call: str, reason: str) -> None:
        self._sanitizer.reject(call, reason)


def _different(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return the tensors with different addresses."""
    found = {}
    for each in tensors:
        if isinstance(each, torch.Tensor):
            found.setdefault((each.data_ptr(), *each.shape), each)
    return [*found.values()]


def _with_rows(
    layers: list[Any], name: str, n: int, ndim: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the different tensors with this name in the metadata of layers, and the rows of the batch
    that they describe: all, or in MLA the decodes, which come first, or the prefills.
    """
    seen: set[tuple[int, ...]] = set()
    for layer in layers:
        num_decodes = getattr(layer, "num_decodes", 0)
        parts = ((layer, slice(0, n)), (getattr(layer, "decode", None), slice(0, num_decodes)),
                 (getattr(layer, "prefill", None), slice(num_decodes, n)))  # fmt: skip
        for part, rows in parts:
            found = getattr(part, name, None)
            if not isinstance(found, torch.Tensor) or found.ndim != ndim:
                continue
            key = (found.data_ptr(), *found.shape, rows.start)
            if rows.stop > rows.start and len(found) >= rows.stop - rows.start and key not in seen:
                seen.add(key)
                yield rows, found
